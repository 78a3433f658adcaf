"""What a worker's memory holds: of its state by kind, and the most that a step needed beside it. Measured.

On a CPU the process's resident memory is looked at (proc(5): ``VmRSS``, and ``VmHWM``, its peak, which a 5 in
``clear_refs`` begins anew); what the C library has kept of freed memory is given back before. On a GPU it is the memory
that torch's allocator has given out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from elastune.journal.records import WorkerMemory

MEASURED_STEP = 3  # of a view: the optimizer's state is there, and whatever is set up once
KINDS = ("parameters", "gradients", "optimizer", "copies")
UNKNOWN = -1.0


class StepMemory:
    """Looks at one step of each view; nothing of it is done in the others."""

    def __init__(self, device: torch.device | None = None, status: Path = Path("/proc/self")) -> None:
        self._device = device or torch.device("cpu")
        self._status = status
        self._view = self._steps = 0
        self._before = UNKNOWN
        self._peak = 0.0
        self._activations = UNKNOWN
        self._state: Mapping[str, int] = {}

    def begin_view(self, view: int) -> None:
        """Steps are taken in ``view`` from here on."""
        if view != self._view:
            self._view, self._steps = view, 0

    def begin_step(self) -> None:
        """A step's first data are about to be fetched."""
        self._steps += 1
        if self._steps == MEASURED_STEP:
            self._before = self._begin_anew()

    @property
    def due(self) -> bool:
        """Whether the step that is under way is the one that is looked at."""
        return self._steps == MEASURED_STEP

    def reduced(self, state: Mapping[str, int]) -> None:
        """The step's gradients are here; ``state``: the bytes of each of ``KINDS`` here, see ``Replica.memory``."""
        self._state = dict(state)

    def end_step(self) -> None:
        """The step's last line ran."""
        if self.due and self._state and self._before != UNKNOWN:
            most = self._most() - self._before - self._state["gradients"]
            self._activations = max(0.0, most)

    def row(self) -> list[float]:
        """All that is known, as numbers to gather; ``memory_of_workers`` reads them."""
        known = [float(self._state.get(kind, UNKNOWN)) for kind in KINDS]
        return [*known, self._activations, max(self._peak, self._most())]

    def _begin_anew(self) -> float:
        """The bytes that are in use; their peak is counted from here."""
        self._peak = max(self._peak, self._most())
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return float(torch.cuda.memory_allocated(self._device))
        with suppress(OSError, AttributeError):  # a C library without it keeps more, and the peak above that is less
            ctypes.CDLL(None).malloc_trim(0)
        try:
            (self._status / "clear_refs").write_text("5")
        except OSError:
            return UNKNOWN
        return self._told("VmRSS")

    def _most(self) -> float:
        """The peak since it was begun anew."""
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        return self._told("VmHWM")

    def _told(self, name: str) -> float:
        """Bytes by name, of a file with lines such as "VmRSS:    1234 kB"."""
        with suppress(OSError):
            for line in (self._status / "status").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    return 1024.0 * int(line.split()[1])
        return UNKNOWN


def memory_of_workers(rows: Sequence[Sequence[float]]) -> list[WorkerMemory]:
    """From every worker's ``row``, by rank; those that took too few steps are left out."""
    found = []
    for rank, (*known, activations, peak) in enumerate(rows):
        if UNKNOWN not in known:
            bytes_of = {kind: int(value) for kind, value in zip(KINDS, known, strict=True)}
            told = None if activations == UNKNOWN else int(activations)
            found.append(WorkerMemory(rank, **bytes_of, activations=told, peak=max(0, int(peak))))
    return found
