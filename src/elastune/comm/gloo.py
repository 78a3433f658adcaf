"""Groups over gloo that can be formed at any time, given up from any thread, and let go of.

Gloo itself cannot give up: when a worker dies, only its neighbours in the ring hear of it, the others wait for the
whole timeout; ``abort`` does nothing. So a group's connections are found by their addresses and shut down, which ends
whatever is under way within milliseconds, and bars a worker that was frozen from writing into anybody's buffers later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from elastune.comm.forming import Forming
from elastune.comm.group import Group
from elastune.comm.sockets import Address, Connections, Found, connections, listeners, sever

THREADS = 2

_DEVICES = threading.Lock()
_GLOO: Any = dist.ProcessGroupGloo  # torch's stubs do not know all of it


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

    def make(self) -> Group:
        device, own = _listening_device(self._interface)
        self._own = own
        told = self.meet(self._rank, self._size, f"{own[0]} {own[1]}")
        self._others = [(host, int(port)) for host, port in (one.split(" ") for one in told)]
        options = _GLOO._Options()
        options._devices = [device]
        options._threads = THREADS
        options._timeout = timedelta(seconds=self._timeout_s)
        pg = _GLOO(self._store, self._rank, self._size, options)
        return Group(self._rank, self._size, pg, "gloo", connections=Connections(self._connections()))

    def break_off(self) -> None:
        sever(self._connections())

    def _connections(self) -> list[Found]:
        return connections(self._own, self._others) if self._own is not None else []


def _listening_device(interface: str) -> tuple[Any, Address]:
    """A device of its own for one group, so that its connections are known from those of other groups; ~0.5 ms."""
    with _DEVICES:
        before = listeners()
        device = _GLOO.create_device(interface=interface)
        (own,) = [address for found, address in listeners().items() if found not in before]
    return device, own
