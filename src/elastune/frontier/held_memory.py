"""What one worker of a program holds: state and passes from its rehearsal, corrected by what a probe measured here."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.journal.records import WorkerMemory
from elastune.plan.steps.memory import BUFFERS, HeldAlone
from elastune.train.rehearsal import ProgramSize


def held_by(size: ProgramSize, alone: Sequence[WorkerMemory] = (), copies: int = 1) -> HeldAlone:
    """What a worker holds that trains alone. What a pass keeps is divided with the layers as their parameters are.

    Args:
        size: From the rehearsal. It counts tensors, not what operations take for themselves while they run.
        alone: Measured here, of the program's own batch in one pass on one worker: where that is more, it counts.
        copies: Holders of each part of divided state.
    """
    told = max((each.activations for each in alone if each.activations is not None), default=0)
    kept = max(size.pass_bytes, (told - size.pass_fixed_bytes) / size.batch_size)
    return HeldAlone(
        parameters=float(size.parameter_bytes),
        gradients=float(size.gradient_bytes),
        optimizer=float(size.optimizer_bytes),
        kept_split=kept * size.divided,
        kept_whole=kept * (1 - size.divided),
        fixed=size.pass_fixed_bytes,
        buffer=float(size.gradient_bytes),
        copies=copies,
    )


def trained_bytes(of: WorkerMemory) -> int:
    """The measured bytes of the kinds that a step needs, its activations among them."""
    return of.parameters + of.gradients + of.optimizer + (of.activations or 0)


def beside_bytes(told: Sequence[WorkerMemory]) -> float:
    """What a worker's process takes beside what plans count: Python, torch, its data. From measured workers that hold
    everything."""
    beside = (each.peak - trained_bytes(each) - BUFFERS * each.gradients for each in told)
    return float(max(0, max(beside, default=0)))
