"""Real processes for tests of groups: forked from a warm server, each with a store, a pipe to the test, and a rank."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group

LIMIT_S = 60.0
KITS = ("elastune.testing.kits.sync", "elastune.testing.kits.engine")
_CONTEXT = multiprocessing.get_context("forkserver")
# The first optimizer imports torch._dynamo, for seconds; the kits, whose functions many workers run, import pytest.
_CONTEXT.set_forkserver_preload(["torch._dynamo", "elastune.train.worker", "elastune.runtime.job.run", *KITS])


@dataclass
class Worker:
    """The rank, store and pipe that each process has."""

    rank: int
    size: int
    store: Store
    pipe: Connection
    port: int

    def form(self, name: str, timeout_s: float = LIMIT_S, **options: Any) -> Group:
        """Return a group of all workers."""
        return GlooFactory("lo", timeout_s).form(self.store, name, self.rank, self.size, **options)

    def send(self, *values: Any) -> None:
        self.pipe.send(values)

    def receive(self) -> Any:
        """Return the next message of the test."""
        if not self.pipe.poll(LIMIT_S):
            raise TimeoutError("the test says nothing")
        return self.pipe.recv()

    def meet(self, name: str) -> None:
        """Wait until every worker is here."""
        self.store.set(f"{name} {self.rank}", "here")
        self.store.wait([f"{name} {rank}" for rank in range(self.size)])

    def on_thread(self, act: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        return thread


def _live(act: Callable[..., None], rank: int, size: int, port: int, pipe: Connection, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # As the fork server of a run does: a full collection would visit every object of torch.
    gc.freeze()
    code = 1
    try:
        act(Worker(rank, size, TCPStore("127.0.0.1", port, is_master=False), pipe, port), *args)
        code = 0
    except BaseException:  # noqa: BLE001 - the test shall see every error
        pipe.send(("failed", traceback.format_exc()))
    os._exit(code)


class Processes:
    """The processes, from the side of the test."""

    def __init__(self, size: int, port: int, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_live, args=(act, rank, size, port, theirs, args))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def receive(self, rank: int) -> tuple[Any, ...]:
        """Return the next message of ``rank``."""
        assert self.pipes[rank].poll(LIMIT_S), f"worker {rank} says nothing"
        message: tuple[Any, ...] = self.pipes[rank].recv()
        assert message[0] != "failed", message[1]
        return message

    def send(self, rank: int, word: Any) -> None:
        self.pipes[rank].send(word)

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def all_end_well(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].join(LIMIT_S)
            assert self.processes[rank].exitcode == 0


@contextmanager
def processes(size: int, act: Callable[..., None], *args: Any) -> Iterator[Processes]:
    """``size`` processes that run ``act(worker, *args)``, a function of a module that they can import."""
    # Once libuv has run, each fork of this process closes two descriptors by their numbers, and opens a pipe there.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    them = Processes(size, store.port, act, args)
    try:
        yield them
    finally:
        for process in them.processes:
            process.kill()
        for process in them.processes:
            process.join(LIMIT_S)


def until(true: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    """Wait until ``true()``; return False if that takes longer than ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
