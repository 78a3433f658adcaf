"""What several workers send each other at one time, as one work: straight from tensor to tensor, or through buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from elastune.comm.tags import EXCHANGE_TAG

Addressed = tuple[torch.Tensor, int]
"""A tensor, and the rank that it is sent to, or comes from."""


class Transfers:
    """What is under way between workers, as one ``dist.Work`` in the shape of a collective's: one whose wait may time
    out harmlessly. ``start`` appends what it has started to the list that it is given.
    """

    def __init__(self, start: Callable[[list[Any]], None]) -> None:
        self._works: list[Any] = []
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        try:
            start(self._works)
        except RuntimeError as error:
            self._error = error  # told by ``wait``: what was started before still reads and writes
        threading.Thread(target=self._run, name="transfers", daemon=True).start()

    def _run(self) -> None:
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                self._error = self._error or error
        self._works.clear()
        self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not yet")
        if self._error is not None:
            raise self._error


def straight(pg: Any, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Transfers:
    """Begin all of them, each a message of its own between the tensors' own memory."""

    def start(works: list[Any]) -> None:
        for tensor, source in receives:  # first: what comes then finds its place
            works.append(pg.recv([tensor], source, EXCHANGE_TAG))
        for tensor, to in sends:
            works.append(pg.send([tensor], to, EXCHANGE_TAG))

    return Transfers(start)


class Buffered:
    """An all-to-all of bytes in the shape of its work, which unpacks what has come once it is waited for."""

    def __init__(
        self,
        pg: Any,
        sends: Sequence[Addressed],
        receives: Sequence[Addressed],
        size: int,
        device: torch.device,
    ) -> None:
        outgoing = [tensor for rank in range(size) for tensor, to in sends if to == rank]
        self._targets = [tensor for rank in range(size) for tensor, source in receives if source == rank]
        sizes = [sum(len(tensor) for tensor, to in sends if to == rank) for rank in range(size)]
        out_sizes = [sum(len(tensor) for tensor, source in receives if source == rank) for rank in range(size)]
        self._sent = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *outgoing])
        self._arrived = torch.empty(sum(out_sizes), dtype=torch.uint8, device=device)
        self._work = pg.alltoall_base(self._arrived, self._sent, out_sizes, sizes)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()
        for target, values in zip(self._targets, self._arrived.split(list(map(len, self._targets))), strict=True):
            target.copy_(values)
