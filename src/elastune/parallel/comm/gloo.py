"""Groups over gloo that can be formed at any time, given up from any thread, and let go of.

Gloo cannot give up by itself. When a worker dies, only its neighbours in the ring notice it; the others wait for the
whole timeout, and ``abort`` does nothing. So this module finds a group's connections by their addresses and shuts them
down. That ends all operations within milliseconds. A worker that was frozen cannot write into a buffer later.

Gloo does not check who connects: it takes the first connection that gives a peer's number for that peer. So:

1. Gloo's listener is closed except while the peers connect. A listener that a stranger reached earlier is dropped.
2. Each worker lists its own connections in the store, which strangers cannot write. All other connections are ended.
3. One exchange proves that the remaining connections are the group. If it fails, the group is formed again.

After a stranger was seen, a connection is not even read before its peer has listed it. That costs 0.2 s per group.
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

from elastune.parallel.comm import socket_filter
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
DEVICES_TRIED = 100  # some 10 ms each, if strangers connect
PROOF_S = 5.0  # for one number from each worker to each, after all have arrived
LOOK_S = 0.001
INTRODUCE_AFTER_S = 0.03  # undisturbed, all have connected by then
INTRODUCE_EVERY_S = 0.02

_DEVICES = threading.Lock()
_GLOO: Any = dist.ProcessGroupGloo  # torch's stubs do not declare all of it
_STRANGERS = threading.Event()
"""A process that is no peer has connected to a listener of this process."""


@dataclass(frozen=True)
class GlooFactory:
    """Forms groups over gloo; see ``GroupFactory``.

    ``interface``: the network interface to listen on. ``timeout_s``: limits forming, and later each collective.
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
        self._address: Address | None = None  # of this worker's listener
        self._others: Collection[Address] = ()
        self._before: Collection[SocketRef] = ()  # sockets that are not of this group

    def make(self) -> Group:
        device, listener, self._address, self._before = _listening_device(self._interface)
        messages = self._meet("at", f"{self._address[0]} {self._address[1]}")
        addresses = [(host, int(port)) for host, port in (message.split(" ") for message in messages)]
        self._others = [address for address in addresses if address != self._address]
        if socket_filter.has_dropped_input(listener):
            _STRANGERS.set()
        options = _GLOO._Options()
        options._devices = [device]
        options._threads = THREADS
        options._timeout = timedelta(seconds=self._timeout_s)
        with self._introducing(listener):
            pg = _GLOO(self._store, self._rank, self._size, options)
        connected = self._connections()
        for ref in connected:
            with borrowed(ref) as sock:
                if sock is not None:
                    repeat_soon(sock)
        nonce, endpoints = secrets.randbits(62), list(ends(connected).values())
        cards = [_card(card) for card in self._meet("met", json.dumps([nonce, endpoints]))]
        connected = self._connections()  # one that was not accepted yet when the listener was closed may be there now
        self._end_strangers(connected, {connection for _, listed in cards for connection in listed})
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
        """Keep the listener open meanwhile. After a stranger was seen, only introduced connections are read.

        The process that connects introduces its connection in the store, by the address that it connects from.
        """
        wary, connected = _STRANGERS.is_set(), threading.Event()
        (socket_filter.drop_input if wary else socket_filter.remove_filter)(listener)

        def introduce() -> None:
            introduced: set[SocketRef] = set()
            pause_s = INTRODUCE_AFTER_S
            while not connected.wait(pause_s):
                pause_s = INTRODUCE_EVERY_S
                arrived = self._arrived() if wary else set()
                for ref, (local, remote) in ends(self._connections()).items():
                    if ref in introduced:
                        continue
                    if remote in self._others:
                        self._store.set(f"from/{_key(Endpoints(remote, local))}", b"")
                        introduced.add(ref)
                    elif wary and (
                        Endpoints(remote, local) in arrived
                        or self._store.check([f"from/{_key(Endpoints(local, remote))}"])
                    ):
                        socket_filter.remove_filter(ref)
                        introduced.add(ref)

        thread = threading.Thread(target=introduce, name="introduce", daemon=True)
        thread.start()
        try:
            yield
        except RuntimeError:
            _STRANGERS.set()  # a stranger is possible; the suspicion costs the next group a fifth of a second
            raise
        finally:
            socket_filter.refuse_connections(listener)
            connected.set()
            thread.join()

    def _arrived(self) -> set[Endpoints]:
        """The connections of the workers that have connected to all others: they introduce no connection any more."""
        keys = [key for key in (f"met/{rank}" for rank in range(self._size)) if self._store.check([key])]
        return {connection for key in keys for connection in _card(self._store.get(key).decode())[1]}

    def _end_strangers(self, connected: Collection[SocketRef], peers: Collection[Endpoints]) -> None:
        """End the connections that no peer has listed.

        A network that translates addresses hides the owners of connections. The counts do not fit then, and nothing
        is ended.
        """
        endpoints = ends(connected)
        strange = [ref for ref, (local, remote) in endpoints.items() if Endpoints(remote, local) not in peers]
        if strange and len(endpoints) - len(strange) == self._size - 1:
            _STRANGERS.set()
            sever(strange)

    def _proves(self, group: Group, nonce: int, nonces: list[int]) -> bool:
        """Whether this worker receives from each worker the nonce that the worker has in the store."""
        data, out = torch.full((self._size,), nonce), torch.zeros(self._size, dtype=torch.int64)
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
        return bool(out.tolist() == nonces)

    def _meet(self, place: str, message: str) -> list[str]:
        return self.meet(place, self._rank, self._size, message)

    def _connections(self) -> list[SocketRef]:
        return connections(self._address, self._others, self._before) if self._address is not None else []


def _card(text: str) -> tuple[int, list[Endpoints]]:
    """A worker's nonce, and its connections."""
    nonce, endpoints = json.loads(text)
    return int(nonce), [Endpoints(tuple(local), tuple(remote)) for local, remote in endpoints]


def _key(connection: Endpoints) -> str:
    (host, port), (from_host, from_port) = connection
    return f"{host} {port} {from_host} {from_port}"


def _listening_device(interface: str) -> tuple[Any, SocketRef, Address, Collection[SocketRef]]:
    """Make a gloo device for one group, whose connections differ from those of other groups; takes ~0.5 ms.

    Gloo's listener is open for a moment before its filter can close it. A process that connected in that moment is no
    peer, because no peer has the address yet; gloo would take it for a peer later. Gloo then starts again, at another
    port.

    Returns:
        The device, its listener, the address of the listener, and the sockets that existed before it.

    Raises:
        RuntimeError: If strangers are always faster.
    """
    for _ in range(DEVICES_TRIED):
        with _DEVICES:
            before = sockets()
            device = _GLOO.create_device(interface=interface)
            new = listeners(but=before)
        if len(new) > 1:  # the program has opened a listener at the same moment: which one is gloo's?
            continue
        ((listener, address),) = new.items()
        socket_filter.refuse_connections(listener)
        if not socket_filter.entered(listener, address, but=before):
            return device, listener, address, before
        _STRANGERS.set()
        del device  # now: its end takes 10 ms, in which the next listener would be open too
    raise RuntimeError(f"strangers were at each of {DEVICES_TRIED} listeners before it could be shut")
