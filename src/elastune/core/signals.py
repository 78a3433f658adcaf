"""What training says of itself while it runs (signals), and what a policy may make of it (decisions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Signal:
    """A measured value; ``error`` is its standard error, where one is known."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """Where a run stands after ``step`` completed steps, equal on every worker.

    ``lr`` is that of the first parameter group; ``batch_size`` the global one; ``seconds`` training time so far, by
    rank 0's clock; ``loss`` the newest step's mean loss, whatever it is. ``signals``: the monitors' newest values by
    name. ``lr_at_start`` and ``batch_at_start`` are the program's own. ``sync``: how workers agree;
    ``left_out``: how many learners the newest round ended without.
    """

    step: int
    epoch: int
    samples: int
    seconds: float
    workers: int
    batch_size: int
    lr: float
    micro_batch: int | None = None
    loss: float | None = None
    signals: Mapping[str, Signal] = field(default_factory=dict)
    lr_at_start: float = 0.0
    batch_at_start: int = 0
    sync: str = "allreduce"
    left_out: int = 0

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Snapshot:
        """What ``dataclasses.asdict`` gave, which has travelled as JSON."""
        signals = {name: Signal(**signal) for name, signal in told["signals"].items()}
        return cls(**{**told, "signals": signals})


@dataclass(frozen=True)
class Decision:
    """What is to change at the next step boundary; None and False leave things as they are.

    ``workers``: ask for this many (they join when warm). ``mesh``: ask for workers that stand like this, and are as
    many ("data=2,shard=2"). ``topology``: let sums travel like this ("tree"). ``replace_rank``: another worker for that
    of this rank.
    ``lr`` sets every parameter group's learning rate, ``lr_factor`` multiplies it (after ``lr``), over ``ramp_steps``
    steps in equal parts where that is positive. ``correct_momentum``: divide SGD's momentum buffers by ``lr_factor``,
    so that the velocity of the parameters does not jump with the learning rate. ``sync``: how workers agree from then
    on ("local:learners=8,every=16"). ``remember``: keep a copy of model and
    optimizer in memory; ``restore``: go back to it (the place in the data stays). ``stop``: checkpoint and end.
    """

    workers: int | None = None
    mesh: str | None = None
    replace_rank: int | None = None
    batch_size: int | None = None
    micro_batch: int | None = None
    lr: float | None = None
    lr_factor: float | None = None
    ramp_steps: int = 0
    correct_momentum: bool = False
    sync: str | None = None
    remember: bool = False
    restore: bool = False
    stop: bool = False
    topology: str | None = None

    @property
    def empty(self) -> bool:
        """Whether it changes nothing."""
        return self == Decision()

    def contradicts(self, later: Decision) -> bool:
        """Whether both set one thing: ``later`` was decided without knowing of this one."""
        alone = ("workers", "mesh", "replace_rank", "batch_size", "micro_batch", "lr", "sync", "topology")
        return any(getattr(self, name) is not None and getattr(later, name) is not None for name in alone)

    def to_json(self) -> dict[str, Any]:
        """What differs from an empty decision."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
