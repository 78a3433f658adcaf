"""Groups over gloo that can be formed at any time, given up from any thread, and let go of.

Gloo itself cannot give up: when a worker dies, only its neighbours in the ring hear of it, the others wait for the
whole timeout; ``abort`` does nothing. So a group's connections are found by their addresses and shut down, which ends
whatever is under way within milliseconds, and bars a worker that was frozen from writing into anybody's buffers later.

Nor does gloo ask who connects: the first who says a peer's number is that peer. So its listener is shut but for the
moments in which the peers connect (one that strangers reach before that is let go of), everybody tells in the store
(which strangers cannot write) which connections are its own, all others are ended, and one exchange proves that what is
left is the group; if not, it is formed anew. Where strangers were seen about, connections are not even heard before
their peers have told of them, for 0.2 s more a group.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from elastune.parallel.comm import socket_filter as door
from elastune.parallel.comm.forming import Forming
from elastune.parallel.comm.group import Group, GroupBroken, drop
from elastune.parallel.comm.sockets import (
    Address,
    Connections,
    Endpoints,
    SocketRef,
    borrowed,
    connections,
    ends,
    listeners,
    repeat_soon,
    sever,
    sockets,
)

THREADS = 2
DEVICES_TRIED = 100  # some 10 ms each, where strangers come
PROOF_S = 5.0  # for one number from each to each, with everybody there
LOOK_S = 0.001
INTRODUCE_AFTER_S = 0.03  # undisturbed, all have connected by then
INTRODUCE_EVERY_S = 0.02

_DEVICES = threading.Lock()
_GLOO: Any = dist.ProcessGroupGloo  # torch's stubs do not know all of it
_STRANGERS = threading.Event()
"""Somebody who is no peer has come to a listener of this process."""


@dataclass(frozen=True)
class GlooFactory:
    """See ``GroupFactory``. ``interface``: the network interface to listen on; ``timeout_s``: how long forming may
    take, and later any collective.
    """

    interface: str
    timeout_s: float
    backend: ClassVar[str] = "gloo"

    def form(
        self, store: Store, name: str, rank: int, size: int, *, superseded: Callable[[], bool] = lambda: False
    ) -> Group:
        if size == 1:
            return Group()
        return _GlooForming(store, name, rank, size, self).result(superseded)


class _GlooForming(Forming):
    def __init__(self, store: Store, name: str, rank: int, size: int, factory: GlooFactory) -> None:
        super().__init__(store, name, factory.timeout_s)
        self._rank, self._size, self._interface = rank, size, factory.interface
        self._own: Address | None = None
        self._others: Collection[Address] = ()
        self._before: Collection[SocketRef] = ()  # sockets that are none of this group's

    def make(self) -> Group:
        device, listener, self._own, self._before = _listening_device(self._interface)
        told = self._meet("at", f"{self._own[0]} {self._own[1]}")
        places = [(host, int(port)) for host, port in (one.split(" ") for one in told)]
        self._others = [place for place in places if place != self._own]
        if door.has_dropped_input(listener):
            _STRANGERS.set()
        options = _GLOO._Options()
        options._devices = [device]
        options._threads = THREADS
        options._timeout = timedelta(seconds=self._timeout_s)
        with self._introducing(listener):
            pg = _GLOO(self._store, self._rank, self._size, options)
        connected = self._connections()
        for it in connected:
            with borrowed(it) as sock:
                if sock is not None:
                    repeat_soon(sock)
        nonce, mine = secrets.randbits(62), list(ends(connected).values())
        cards = [_card(card) for card in self._meet("met", json.dumps([nonce, mine]))]
        connected = self._connections()  # one that waited to be accepted when the door was shut may be there by now
        self._end_strangers(connected, {one for _, theirs in cards for one in theirs})
        group = Group(self._rank, self._size, pg, "gloo", connections=Connections(connected))
        if not self._proves(group, nonce, [nonce for nonce, _ in cards]):
            _STRANGERS.set()
            drop(group)
            raise RuntimeError("a stranger took a worker's place")
        return group

    def break_off(self) -> None:
        sever(self._connections())

    @contextlib.contextmanager
    def _introducing(self, listener: SocketRef) -> Iterator[None]:
        """The listener is open meanwhile. Where strangers are about, nobody is heard who was not introduced.

        Who connects is introduced by its process, by what it has connected from.
        """
        wary, connected = _STRANGERS.is_set(), threading.Event()
        (door.drop_input if wary else door.remove_filter)(listener)

        def introduce() -> None:
            known: set[SocketRef] = set()
            pause_s = INTRODUCE_AFTER_S
            while not connected.wait(pause_s):
                pause_s = INTRODUCE_EVERY_S
                arrived = self._arrived() if wary else set()
                for it, (own, other) in ends(self._connections()).items():
                    if it in known:
                        continue
                    if other in self._others:
                        self._store.set(f"from/{_words(Endpoints(other, own))}", b"")
                        known.add(it)
                    elif wary and (
                        Endpoints(other, own) in arrived or self._store.check([f"from/{_words(Endpoints(own, other))}"])
                    ):
                        door.remove_filter(it)
                        known.add(it)

        thread = threading.Thread(target=introduce, name="introduce", daemon=True)
        thread.start()
        try:
            yield
        except RuntimeError:
            _STRANGERS.set()  # perhaps; it costs the next group a fifth of a second
            raise
        finally:
            door.refuse_connections(listener)
            connected.set()
            thread.join()

    def _arrived(self) -> set[Endpoints]:
        """The connections of those who have all that they wait for: they introduce nobody any more."""
        there = [key for key in (f"met/{rank}" for rank in range(self._size)) if self._store.check([key])]
        return {one for key in there for one in _card(self._store.get(key).decode())[1]}

    def _end_strangers(self, connected: Collection[SocketRef], peers: Collection[Endpoints]) -> None:
        """End the connections that no peer has; where a network hides who has them, that cannot be told."""
        own = ends(connected)
        strange = [it for it, (here, there) in own.items() if Endpoints(there, here) not in peers]
        if strange and len(own) - len(strange) == self._size - 1:
            _STRANGERS.set()
            sever(strange)

    def _proves(self, group: Group, own: int, theirs: list[int]) -> bool:
        """Whether each gets from each what that one told in the store."""
        data, out = torch.full((self._size,), own), torch.zeros(self._size, dtype=torch.int64)
        until = time.monotonic() + PROOF_S
        try:
            work = group.all_to_all(out, data, [], [])
            while not work.is_completed():
                if self.given_up or time.monotonic() > until:
                    return False
                time.sleep(LOOK_S)
            work.wait()
        except GroupBroken:
            return False
        return bool(out.tolist() == theirs)

    def _meet(self, place: str, message: str) -> list[str]:
        return self.meet(place, self._rank, self._size, message)

    def _connections(self) -> list[SocketRef]:
        return connections(self._own, self._others, self._before) if self._own is not None else []


def _card(text: str) -> tuple[int, list[Endpoints]]:
    """A worker's nonce, and the connections that it has."""
    nonce, theirs = json.loads(text)
    return int(nonce), [Endpoints(tuple(own), tuple(other)) for own, other in theirs]


def _words(connection: Endpoints) -> str:
    (host, port), (from_host, from_port) = connection
    return f"{host} {port} {from_host} {from_port}"


def _listening_device(interface: str) -> tuple[Any, SocketRef, Address, Collection[SocketRef]]:
    """A device of its own for one group, so that its connections are known from those of other groups; ~0.5 ms.

    Nobody can connect to it yet, and nobody has: gloo's listener is open for a moment before its door can be shut. Who
    came in by then is no peer (they have not been told where it is), and would be taken for one once the peers connect;
    so gloo starts again, at another port. Raises ``RuntimeError`` where strangers are always faster.

    Returns the device, its listener, where that is, and the sockets that were there before it.
    """
    for _ in range(DEVICES_TRIED):
        with _DEVICES:
            before = sockets()
            device = _GLOO.create_device(interface=interface)
            new = listeners(but=before)
        if len(new) > 1:  # the program has begun to listen somewhere in this very moment: which one is it?
            continue
        ((listener, own),) = new.items()
        door.refuse_connections(listener)
        if not door.entered(listener, own, but=before):
            return device, listener, own, before
        _STRANGERS.set()
        del device  # now: its end takes 10 ms, for which the next one would be open too
    raise RuntimeError(f"strangers were at each of {DEVICES_TRIED} listeners before it could be shut")
