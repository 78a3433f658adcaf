"""What training says of itself while it runs (signals), and what a policy may make of it (decisions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Signal:
    """A measured value and its standard error; None where no error is known."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """Where a run stands after ``step`` completed steps; equal on every worker.

    Attributes:
        step, epoch, samples: Completed steps, completed epochs, used samples.
        seconds: Training time so far, in seconds, by rank 0's clock.
        workers: Number of workers.
        batch_size: Samples of the global batch.
        lr: The learning rate of the first parameter group.
        micro_batch: The most samples of one forward pass; None: no bound.
        loss: The newest step's mean loss, whatever it is.
        signals: The monitors' newest values, by name.
        lr_at_start, batch_at_start: The program's own.
        sync: The sync strategy.
        left_out: How many learners the newest round ended without.
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
        """Return the snapshot that ``dataclasses.asdict`` gave, after it has travelled as JSON."""
        signals = {name: Signal(**signal) for name, signal in told["signals"].items()}
        return cls(**{**told, "signals": signals})


@dataclass(frozen=True)
class Decision:
    """What is to change at the next step boundary; None and False leave things as they are.

    Attributes:
        workers: Ask for so many workers; they join when warm.
        mesh: Ask for this mesh ("data=2,shard=2"), and for as many workers as it has.
        replace_rank: Ask for another worker in place of that of this rank.
        batch_size, micro_batch: The global batch size; the most samples of one forward pass.
        lr: The learning rate of every parameter group.
        lr_factor: Multiplies the learning rate (after ``lr``), over ``ramp_steps`` steps in equal parts where that is
            positive.
        correct_momentum: Divide SGD's momentum buffers by ``lr_factor``, so that the velocity of the parameters does
            not jump with the learning rate.
        sync: The sync strategy from then on ("local:learners=8,every=16").
        remember: Keep a copy of model and optimizer in memory.
        restore: Go back to that copy; the place in the data stays.
        stop: Write a checkpoint and end.
        topology: The routes of the workers' sums ("tree").
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
        """Return whether both set one thing: ``later`` was decided without knowing of this decision."""
        alone = ("workers", "mesh", "replace_rank", "batch_size", "micro_batch", "lr", "sync", "topology")
        return any(getattr(self, name) is not None and getattr(later, name) is not None for name in alone)

    def to_json(self) -> dict[str, Any]:
        """Return what differs from an empty decision."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
