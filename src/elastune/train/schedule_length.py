"""Where a learning-rate schedule ends, by its saved state, and what it does beyond.

A training that is made longer may pass the end of its schedule; the user is warned of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RISES, KEEPS = "its rate rises again", "it keeps its last rate"
FREE = "the program's own function sets the rate, perhaps below 0"


@dataclass(frozen=True)
class ScheduleEnd:
    """Where a schedule ends.

    Attributes:
        kind: Its class, "OneCycleLR".
        built_for: The calls of its ``step`` that it was built for; None: its state does not have them.
        beyond: What it does after them, in words; "" where torch raises an error.
    """

    kind: str
    built_for: int | None
    beyond: str

    def __str__(self) -> str:
        schedule = self.kind if self.built_for is None else f"{self.kind} was built for {self.built_for} steps"
        return f"{schedule}; beyond, {self.beyond or 'it raises an error'}"


def ends_of(state: Mapping[str, Any]) -> list[ScheduleEnd]:
    """Return where the scheduler with this ``state_dict`` ends; an empty list if it has no end or is not torch's own.

    Schedulers that are joined (``SequentialLR``, ``ChainedScheduler``) end where their last parts do.
    """
    parts = state.get("_schedulers")
    if isinstance(parts, (list, tuple)):
        return _joined(state, [part for part in parts if isinstance(part, Mapping)])
    for kind, names, length, beyond in (
        ("OneCycleLR", {"_schedule_phases"}, "total_steps", ""),
        ("CosineAnnealingLR", {"eta_min"}, "T_max", RISES),
        ("PolynomialLR", {"power"}, "total_iters", KEEPS),
        ("LinearLR", {"start_factor"}, "total_iters", KEEPS),
    ):
        if names <= state.keys() and isinstance(state.get(length), int):
            return [ScheduleEnd(kind, state[length], beyond)]
    return [ScheduleEnd("LambdaLR", None, FREE)] if "lr_lambdas" in state else []


def _joined(state: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> list[ScheduleEnd]:
    milestones = state.get("_milestones")
    if not isinstance(milestones, (list, tuple)) or not milestones:
        return [end for part in parts for end in ends_of(part)]
    last_start = milestones[-1]  # the last part takes its first step there
    return [
        ScheduleEnd(end.kind, None if end.built_for is None else last_start + end.built_for, end.beyond)
        for end in (ends_of(parts[-1]) if parts else [])
    ]


def ended_by(ends: list[ScheduleEnd], calls: int, epoch: float, before: int | None, after: int) -> list[ScheduleEnd]:
    """Return those of ``ends`` that a training passes because it became longer.

    Args:
        ends: Where its schedules end.
        calls: How often the scheduler has stepped so far.
        epoch: Completed epochs so far, with the completed part of the present one.
        before: The epochs that the training was begun for; None: not known.
        after: The epochs that it has now.
    """
    if not epoch or not calls:
        return []
    calls_per_epoch = calls / epoch
    # A warm-up that ended long before the training was to end is no surprise.
    late = [
        end
        for end in ends
        if end.built_for is None or before is None or end.built_for >= 0.9 * calls_per_epoch * before
    ]
    return [end for end in late if end.built_for is None or round(calls_per_epoch * after) > end.built_for]
