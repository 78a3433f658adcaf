"""Groups over gloo that can be formed anew at any time, given up from any thread, and let go of.

Gloo itself cannot give up: when a worker dies, only its neighbours in the ring hear of it, the others wait for the
whole timeout; ``abort`` does nothing. So a group's connections are found by their addresses and shut down, which ends
whatever is under way within milliseconds, and bars a worker that was frozen from writing into anybody's buffers later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from elastune.comm.group import Group, GroupBroken, drop
from elastune.comm.sockets import Address, Connections, Found, connections, listeners, sever

THREADS = 2
LOOK_S = 0.005
LAZY_LOOK_S = 1.0
STORE_WAIT_S = 0.5

_DEVICES = threading.Lock()
_GLOO: Any = dist.ProcessGroupGloo  # torch's stubs do not know all of it


def form(
    store: Store,
    name: str,
    rank: int,
    size: int,
    *,
    interface: str,
    timeout_s: float,
    superseded: Callable[[], bool] = lambda: False,
) -> Group:
    """The group ``name`` of ``size`` workers that all call this, with ``rank`` 0 to ``size`` - 1; blocks.

    ``store`` is where they find each other; ``interface`` the network interface to listen on (``lo``); ``timeout_s``
    how long this may take, and later any collective. Raises ``GroupBroken`` where it fails, and at once when
    ``superseded`` turns true; a half-made group is then cleared away behind the scenes.
    """
    if size == 1:
        return Group()
    forming = _Forming(store, name, rank, size, interface, timeout_s)
    threading.Thread(target=forming.run, name=f"form {name}", daemon=True).start()
    while not forming.ended.wait(LOOK_S):
        if superseded():
            forming.give_up()
            raise GroupBroken(f"group {name} was superseded while it formed")
    if forming.group is None:
        raise GroupBroken(forming.why)
    return forming.group


class _Forming:
    """The making of a group, on a thread of its own, since nothing in it can be interrupted."""

    def __init__(self, store: Store, name: str, rank: int, size: int, interface: str, timeout_s: float) -> None:
        self.group: Group | None = None
        self.why = ""
        self.ended = threading.Event()
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._store = _Patient(PrefixStore(name, store), self._given_up)
        self._rank, self._size, self._interface, self._timeout_s = rank, size, interface, timeout_s
        self._own: Address | None = None
        self._others: Collection[Address] = ()

    def run(self) -> None:
        try:
            group = self._make()
            with self._lock:
                if not self._given_up.is_set():
                    self.group = group
            if self.group is None:
                drop(group)
        except (RuntimeError, OSError, ValueError) as error:
            self.why = " ".join(str(error).split("\n", 1)[0].split()) or type(error).__name__
        finally:
            self.ended.set()

    def give_up(self) -> None:
        """Make the thread end soon, and its result go where nobody sees it."""
        with self._lock:
            self._given_up.set()
            group, self.group = self.group, None
        if group is not None:
            drop(group)
        threading.Thread(target=self._sever_until_ended, name="give up forming", daemon=True).start()

    def _sever_until_ended(self) -> None:
        pause_s = LOOK_S
        while not self.ended.wait(pause_s):
            sever(self._connections())
            pause_s = min(2 * pause_s, LAZY_LOOK_S)  # gloo may wait as long as it likes for who never connects

    def _connections(self) -> list[Found]:
        return connections(self._own, self._others) if self._own is not None else []

    def _make(self) -> Group:
        device, self._own = _listening_device(self._interface)
        self._others = self._meet(self._own)
        options = _GLOO._Options()
        options._devices = [device]
        options._threads = THREADS
        options._timeout = timedelta(seconds=self._timeout_s)
        pg = _GLOO(self._store, self._rank, self._size, options)
        return Group(self._rank, self._size, pg, "gloo", connections=Connections(self._connections()))

    def _meet(self, own: Address) -> list[Address]:
        """Tell the others where this worker listens, and hear the same of them."""
        self._store.set(f"at/{self._rank}", f"{own[0]} {own[1]}".encode())
        keys = [f"at/{rank}" for rank in range(self._size) if rank != self._rank]
        self._store.wait(keys, timedelta(seconds=self._timeout_s))
        told = [self._store.get(key).decode().split(" ") for key in keys]
        return [(host, int(port)) for host, port in told]


def _listening_device(interface: str) -> tuple[Any, Address]:
    """A device of its own for one group, so that its connections are known from those of other groups; ~0.5 ms."""
    with _DEVICES:
        before = listeners()
        device = _GLOO.create_device(interface=interface)
        (own,) = [address for found, address in listeners().items() if found not in before]
    return device, own


class _Patient(Store):
    """A store whose ``wait`` ends when nobody waits for its outcome any more."""

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
                if now >= deadline or now - started < patience_s / 2:  # not for want of time: the store itself fails
                    raise
