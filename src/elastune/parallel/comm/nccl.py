"""Groups over NCCL that can be given up from any thread, for workers that have a GPU each.

NCCL can give up by itself: ``abort`` ends a communicator's kernels, whatever they wait for. But it does not report the
end of a collective to the host: ``wait`` only makes the stream wait, so a step would count as completed while its sums
still run. Therefore the waits of this module end on the host.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from elastune.parallel.comm.forming import Forming
from elastune.parallel.comm.group import Group

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
