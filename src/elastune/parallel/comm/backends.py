"""Groups over gloo and over NCCL that can be formed at any time and given up from any thread.

A factory (``GlooFactory``, ``NcclFactory``) forms groups of its backend, on threads of their own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from elastune.parallel.comm import sockets
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
    open_sockets,
    repeat_soon,
    sever,
)

# Groups form on a thread of their own, because nothing can interrupt a backend while it forms one.
#
# ``Forming`` is the base of both backends. With ``BackgroundForming`` a group forms while its workers go on training.

FORMED_LOOK_S = 0.005
LAZY_LOOK_S = 1.0
STORE_WAIT_S = 0.5
CONNECT_LIMIT_S = 10.0  # after all workers have arrived; ``timeout_s`` limits how long they take to arrive
T = TypeVar("T")


class Forming(ABC):
    """The forming of the group ``name``; its workers find each other in ``store``. A subclass is one backend.

    ``result`` runs ``make`` on a thread, waits for it, and gives up when it takes too long or is superseded.
    """

    def __init__(self, store: Store, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._given_up = threading.Event()
        self._store = _Patient(PrefixStore(name, store), self._given_up)
        self._group: Group | None = None
        self._why = ""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._connect_until = math.inf

    @abstractmethod
    def make(self) -> Group:
        """Form the group; blocks. Raises ``RuntimeError``, ``OSError`` or ``ValueError`` if that fails."""

    @abstractmethod
    def break_off(self) -> None:
        """Make ``make`` fail soon; called again and again until ``make`` has ended."""

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for the group any more."""
        return self._given_up.is_set()

    def result(self, superseded: Callable[[], bool]) -> Group:
        """Return the group.

        Raises:
            GroupBroken: If no group forms in time, and at once when ``superseded`` turns true. A thread then clears
                away the half-made group.
        """
        threading.Thread(target=self._run, name=f"form {self._name}", daemon=True).start()
        while not self._ended.wait(FORMED_LOOK_S):
            if superseded():
                self._give_up()
                raise GroupBroken(f"group {self._name} was superseded while it formed")
            if time.monotonic() > self._connect_until:
                self._give_up()
                raise GroupBroken(f"group {self._name}: its workers do not reach each other in {CONNECT_LIMIT_S:g} s")
        if self._group is None:
            raise GroupBroken(self._why)
        return self._group

    def meet(self, place: str, rank: int, size: int, message: str) -> list[str]:
        """Exchange one message at ``place`` with all workers; return every worker's message, by rank, own included.

        Each worker meets at a place once. Only the timeout limits how long the others take to arrive. From then on
        ``CONNECT_LIMIT_S`` limits what the workers do together.
        """
        self._connect_until = math.inf
        self._store.set(f"{place}/{rank}", message.encode())
        keys = [f"{place}/{other}" for other in range(size)]
        self._store.wait(keys, timedelta(seconds=self._timeout_s))
        messages = [self._store.get(key).decode() for key in keys]
        self._connect_until = time.monotonic() + CONNECT_LIMIT_S
        return messages

    def _run(self) -> None:
        try:
            group = self.make()
            with self._lock:
                if not self._given_up.is_set():
                    self._group = group
            if self._group is None:
                drop(group)
        except (RuntimeError, OSError, ValueError) as error:
            self._why = " ".join(str(error).split("\n", 1)[0].split()) or type(error).__name__
        finally:
            self._ended.set()

    def _give_up(self) -> None:
        """Make the thread end soon, and drop its result."""
        with self._lock:
            self._given_up.set()
            group, self._group = self._group, None
        if group is not None:
            drop(group)
        threading.Thread(target=self._break_off_until_ended, name="give up forming", daemon=True).start()

    def _break_off_until_ended(self) -> None:
        pause_s = FORMED_LOOK_S
        while not self._ended.wait(pause_s):
            self.break_off()
            pause_s = min(2 * pause_s, LAZY_LOOK_S)  # for a worker that never connects


class _Patient(Store):
    """A store whose ``wait`` ends when the forming is given up."""

    def __init__(self, store: Store, given_up: threading.Event) -> None:
        super().__init__()
        self._store = store
        self._given_up = given_up

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            if self._given_up.is_set():
                raise RuntimeError("nobody waits for this group any more")
            started = time.monotonic()
            patience_s = min(STORE_WAIT_S, max(0.001, deadline - started))
            try:
                self._store.wait(keys, timedelta(seconds=patience_s))
                return
            except (RuntimeError, TimeoutError):
                now = time.monotonic()
                if now >= deadline or now - started < patience_s / 2:  # not a timeout: the store itself fails
                    raise


class BackgroundForming(Generic[T]):
    """Groups that form on a thread of their own while their workers go on training.

    The caller either takes the groups with ``result`` or drops them with ``discard``.

    Args:
        form: Forms the groups; blocks. It may raise ``GroupBroken``, or anything else.
        let_go: Lets go of groups that were formed and are not wanted.
    """

    def __init__(self, form: Callable[[], T], let_go: Callable[[T], None]) -> None:
        self._form, self._let_go = form, let_go
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._unwanted = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="prepare groups", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether ``result`` returns or raises at once."""
        return self._ended.is_set()

    def result(self) -> T:
        """Wait for the groups and return them; from now on they are the caller's. Raises what ``form`` raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        with self._lock:
            if not self._made:
                raise GroupBroken("the groups were let go of before they were wanted")
            return self._made.pop()

    def discard(self) -> None:
        """Let go of the result, now or once it is formed; no caller will ask for it. From any thread."""
        with self._lock:
            self._unwanted = True
            made, self._made = self._made, []
        for unwanted in made:
            self._let_go(unwanted)

    def _run(self) -> None:
        try:
            formed = self._form()
        except BaseException as error:  # noqa: BLE001 - ``result`` raises it again
            self._error = error
        else:
            with self._lock:
                unwanted = self._unwanted
                if not unwanted:
                    self._made.append(formed)
            if unwanted:
                self._let_go(formed)
        finally:
            self._ended.set()


# Groups over gloo that can be formed at any time, given up from any thread, and let go of.
#
# Gloo cannot give up by itself. When a worker dies, only its neighbours in the ring notice it; the others wait for
# the whole timeout, and ``abort`` does nothing. So this module finds a group's connections by their addresses and
# shuts them down. That ends all operations within milliseconds. A worker that was frozen cannot write into a buffer
# later.
#
# Gloo does not check who connects: it takes the first connection that gives a peer's number for that peer. So:
#
# 1. Gloo's listener is closed except while the peers connect. A listener that a stranger reached earlier is dropped.
# 2. Each worker lists its own connections in the store, which strangers cannot write. All other connections are
# ended. 3. One exchange proves that the remaining connections are the group. If it fails, the group is formed again.
#
# After a stranger was seen, a connection is not even read before its peer has listed it. That costs 0.2 s per group.

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
        if sockets.has_dropped_input(listener):
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
        (sockets.drop_input if wary else sockets.remove_filter)(listener)

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
                        sockets.remove_filter(ref)
                        introduced.add(ref)

        thread = threading.Thread(target=introduce, name="introduce", daemon=True)
        thread.start()
        try:
            yield
        except RuntimeError:
            _STRANGERS.set()  # a stranger is possible; the suspicion costs the next group a fifth of a second
            raise
        finally:
            sockets.refuse_connections(listener)
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
            before = open_sockets()
            device = _GLOO.create_device(interface=interface)
            new = listeners(but=before)
        if len(new) > 1:  # the program has opened a listener at the same moment: which one is gloo's?
            continue
        ((listener, address),) = new.items()
        sockets.refuse_connections(listener)
        if not sockets.entered(listener, address, but=before):
            return device, listener, address, before
        _STRANGERS.set()
        del device  # now: its end takes 10 ms, in which the next listener would be open too
    raise RuntimeError(f"strangers were at each of {DEVICES_TRIED} listeners before it could be shut")


# Groups over NCCL that can be given up from any thread, for workers that have a GPU each.
#
# NCCL can give up by itself: ``abort`` ends a communicator's kernels, whatever they wait for. But it does not report
# the end of a collective to the host: ``wait`` only makes the stream wait, so a step would count as completed while
# its sums still run. Therefore the waits of this module end on the host.

POLL_S = 0.00005


@dataclass(frozen=True)
class NcclFactory:
    """Forms groups over NCCL; see ``GroupFactory``.

    ``device``: this worker's GPU, which no other worker of a group may use. ``timeout_s``: limits forming, and later
    each collective.
    """

    device: torch.device
    timeout_s: float
    backend: ClassVar[str] = "nccl"

    def form(
        self, store: Store, name: str, rank: int, size: int, *, superseded: Callable[[], bool] = lambda: False
    ) -> Group:
        if size == 1:  # it may grow: then the tensors to send lie on the GPU already
            return Group(backend=self.backend, device=self.device)
        return _NcclForming(store, name, rank, size, self).result(superseded)


class _NcclForming(Forming):
    def __init__(self, store: Store, name: str, rank: int, size: int, factory: NcclFactory) -> None:
        super().__init__(store, name, factory.timeout_s)
        self._rank, self._size, self._device = rank, size, factory.device
        self._communicator: Communicator | None = None

    def make(self) -> Group:
        # Torch's watchdog would end the process after an error; in elastune the membership decides what follows.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self.meet("at", self._rank, self._size, "here")  # the communicator starts to form after all have arrived
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.blocking = 0  # forming can then be aborted as well
        options._timeout = timedelta(seconds=self._timeout_s)
        backend = nccl(self._store, self._rank, self._size, options)
        self._communicator = Communicator(backend)
        torch.cuda.set_device(self._device)  # of this thread
        backend.eager_connect_single_device(self._device)
        waits = HostWaits(backend, self._communicator)
        self._prove(waits)
        return Group(self._rank, self._size, waits, NcclFactory.backend, self._device, connections=self._communicator)

    def _prove(self, waits: HostWaits) -> None:
        """Make a first sum: non-blocking forming returns before it has connected, and NCCL reports errors only then."""
        count = torch.ones(1, device=self._device)
        waits.allreduce([count]).wait()
        if int(count) != self._size:
            raise RuntimeError(f"{self._size} workers added up to {float(count)}")

    def break_off(self) -> None:
        if self._communicator is not None:
            self._communicator.sever()


class Communicator:
    """A group's NCCL communicators, with the methods by which a ``Group`` ends them (``GroupConnections``)."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._aborting: threading.Thread | None = None

    def sever(self) -> None:
        """Abort them, on a thread of its own: ``abort`` returns only after their kernels have ended."""
        with self._lock:
            if self._aborting is None:
                aborting = threading.Thread(target=self._backend.abort, name="abort nccl", daemon=True)
                self._aborting = aborting  # before any kernel ends by it: see _HostWork.wait
                aborting.start()

    @property
    def severed(self) -> bool:
        """Whether they are being ended, or have been."""
        return self._aborting is not None

    def all_closed(self) -> bool:
        """Whether they have ended: no kernel reads or writes any more."""
        return self._aborting is not None and self._aborting.ident is not None and not self._aborting.is_alive()


class HostWaits:
    """A ``ProcessGroupNCCL`` whose works wait on the host, as long as ``communicator`` is not severed."""

    def __init__(self, backend: Any, communicator: Communicator) -> None:
        self._backend = backend
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        start = getattr(self._backend, name)
        return lambda *args: _HostWork(start(*args), self._communicator)


class _HostWork:
    """A ``dist.Work`` whose wait ends when the result has arrived, and may time out without harm."""

    def __init__(self, work: Any, communicator: Communicator) -> None:
        self._work = work
        self._communicator = communicator

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            if deadline is not None and time.monotonic() > deadline:
                raise RuntimeError("not yet")
            time.sleep(POLL_S)
        # Torch reports a kernel that an abort has ended as one that has completed.
        if self._communicator.severed:
            raise RuntimeError("the communicator was aborted")
        self._work.wait()  # raises the error of the work, if it failed
