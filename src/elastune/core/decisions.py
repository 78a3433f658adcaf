"""Signals, snapshots and decisions: what a policy reads, what it may change, and how workers agree on a decision.

Workers agree in the reduction of a training step. Every worker adds its vote, small whole numbers that add up exactly,
and all workers read the same sums. The sums show whether all votes were equal. If they were, a worker without a vote
(it had no samples in the step) knows the decision, too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any

from elastune.core.communication import Topology
from elastune.core.errors import UserError
from elastune.core.mesh import AXES, Mesh


@dataclass(frozen=True)
class Signal:
    """A value that a monitor measured, with its standard error.

    Attributes:
        value: The newest value.
        error: Its standard error; None where the monitor knows none.

    Example:
        >>> Signal(512.0, error=30.0)
        Signal(value=512.0, error=30.0)
    """

    value: float
    error: float | None = None


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after ``step`` completed steps, as a policy reads it; equal on every worker.

    Attributes:
        step, epoch, samples: Completed steps, completed epochs, used samples.
        seconds: Training time so far, in seconds, by rank 0's clock.
        workers: The number of workers.
        batch_size: The samples of the global batch.
        lr: The learning rate of the first parameter group.
        micro_batch: The most samples of one forward pass; None: no bound.
        loss: The mean loss of the newest step; it may be infinite or NaN.
        signals: The newest values of the monitors, by name.
        lr_at_start, batch_at_start: The learning rate and the batch size that the program chose.
        sync: The sync strategy.
        left_out: The number of learners without which the newest round ended.

    Example:
        >>> def after_step(self, run):  # of a policy
        ...     now = run.snapshot
        ...     if now.signals["noise_scale"].value > 4 * now.batch_size:
        ...         run.set_batch_size(2 * now.batch_size)
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
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot whose ``dataclasses.asdict`` came back from JSON as ``data``."""
        signals = {name: Signal(**signal) for name, signal in data["signals"].items()}
        return cls(**{**data, "signals": signals})


@dataclass(frozen=True)
class Decision:
    """The changes at the next step boundary. None and False leave a setting as it is.

    Attributes:
        workers: Ask for so many workers; they join when warm.
        mesh: Ask for this mesh ("data=2,shard=2"), and for as many workers as it has.
        replace_rank: Ask for another worker in place of this rank's.
        batch_size, micro_batch: The global batch size; the most samples of one forward pass.
        lr: The learning rate of every parameter group.
        lr_factor: Multiplies the learning rate (after ``lr``). Where ``ramp_steps`` is positive, it does so in equal
            parts over that many steps.
        correct_momentum: Divide SGD's momentum buffers by ``lr_factor``, so that the velocity of the parameters does
            not jump with the learning rate.
        sync: The sync strategy from then on ("local:learners=8,every=16").
        remember: Keep a copy of model and optimizer in memory.
        restore: Go back to that copy; the position in the data stays.
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
        """Whether the decision changes nothing."""
        return self == Decision()

    def contradicts(self, later: Decision) -> bool:
        """Return whether both decisions set one thing. ``later`` was made without knowledge of this one."""
        alone = ("workers", "mesh", "replace_rank", "batch_size", "micro_batch", "lr", "sync", "topology")
        return any(getattr(self, name) is not None and getattr(later, name) is not None for name in alone)

    def to_json(self) -> dict[str, Any]:
        """Return what differs from an empty decision."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


# Votes: decisions as small whole numbers that add up exactly in a step's reduction.

MOST_VOTERS = 256  # sums of this many digits, and of this many squared marks, are exact in single precision
_DIGIT = 1 << 16
_CHECKSUM_MODULI = (251, 241, 239)  # moduli of the checks; a mark's square must stay below 2^24 / MOST_VOTERS
_FLAGS = ("correct_momentum", "remember", "restore", "stop")
_COUNTS = ("workers", "replace_rank", "batch_size", "micro_batch", "ramp_steps")  # whole numbers, nothing as 0
_REALS = ("lr", "lr_factor")
_MESHES = ("mesh",)
_TEXTS = {"sync": 192, "topology": 128}  # bytes: no strategy with all its settings is longer, lists of parents can be
_NOTHING = Decision()
assert {*_FLAGS, *_COUNTS, *_REALS, *_MESHES, *_TEXTS} == {f.name for f in fields(Decision)}


def vote(decision: Decision) -> list[float]:
    """Return one worker's part of the sums: ``VOTE_LENGTH`` numbers."""
    digits = _digits(decision)
    marks = _checksums(digits)
    return [float(x) for x in (*digits, *marks, *(mark * mark for mark in marks))]


def topology_for_vote(topology: Topology) -> str:
    """Return ``topology`` as a decision holds it. Raises ``UserError`` where it is too long for a vote."""
    if len(str(topology).encode()) > _TEXTS["topology"]:
        rule = f"a list of parents that workers vote on has at most {_TEXTS['topology']} characters"
        raise UserError(rule, f"{len(topology.parents)} parents", "use a shape by its name, or --topology")
    return str(topology)


def outcome(sums: Sequence[float], voters: int) -> Decision | None:
    """Return the common decision of all ``voters``, from the sums of their votes; None where votes differ."""
    ends = _LENGTH, _LENGTH + len(_CHECKSUM_MODULI)
    digits, marks, squares = sums[: ends[0]], sums[ends[0] : ends[1]], sums[ends[1] :]
    # By Cauchy and Schwarz: n times the sum of squares is the square of the sum only where all are equal.
    if any(voters * square != mark * mark for mark, square in zip(marks, squares, strict=True)):
        return None
    shares = [digit / voters for digit in digits]
    if any(share != int(share) or not 0 <= share < _DIGIT for share in shares):
        return None
    return _decision([int(share) for share in shares])


def _digits(decision: Decision) -> list[int]:
    digits = [sum(1 << i for i, name in enumerate(_FLAGS) if getattr(decision, name))]
    for name in _COUNTS:
        value = getattr(decision, name)
        number = 0 if value == getattr(_NOTHING, name) else value + 1
        if not 0 <= number < _DIGIT * _DIGIT:
            raise ValueError(f"{name} {value} is out of bounds")
        digits += divmod(number, _DIGIT)
    for name in _REALS:
        value = getattr(decision, name)
        digits += [0] * 5 if value is None else [1, *struct.unpack("<4H", struct.pack("<d", value))]
    for name in _MESHES:
        value = getattr(decision, name)
        digits += [0] * len(AXES) if value is None else [Mesh.parse(value).size(axis) for axis in AXES]
    for name, longest in _TEXTS.items():
        text = (getattr(decision, name) or "").encode()
        if len(text) > longest:
            raise ValueError(f"{name} is longer than {longest} bytes")
        digits += struct.unpack(f"<{longest // 2}H", text.ljust(longest, b"\0"))
    return digits


def _decision(digits: list[int]) -> Decision:
    read: Iterator[int] = iter(digits)
    flags = next(read)
    values: dict[str, bool | int | float | str | None] = {name: bool(flags & 1 << i) for i, name in enumerate(_FLAGS)}
    for name in _COUNTS:
        number = next(read) * _DIGIT + next(read)
        values[name] = getattr(_NOTHING, name) if number == 0 else number - 1
    for name in _REALS:
        known, *parts = (next(read) for _ in range(5))
        values[name] = struct.unpack("<d", struct.pack("<4H", *parts))[0] if known else None
    for name in _MESHES:
        sizes = dict(zip(AXES, (next(read) for _ in AXES), strict=True))
        values[name] = str(Mesh(**sizes)) if all(sizes.values()) else None
    for name, longest in _TEXTS.items():
        packed = struct.pack(f"<{longest // 2}H", *(next(read) for _ in range(longest // 2)))
        values[name] = packed.rstrip(b"\0").decode(errors="replace") or None
    return Decision(**values)  # type: ignore[arg-type]


def _checksums(digits: Sequence[int]) -> list[int]:
    """Zeros for an empty decision. For others, numbers from 1 on that are almost never all equal for different
    decisions.
    """
    if not any(digits):
        return [0] * len(_CHECKSUM_MODULI)
    hashed = int.from_bytes(blake2b(struct.pack(f"<{len(digits)}H", *digits), digest_size=8).digest(), "big")
    return [1 + hashed % (modulus - 1) for modulus in _CHECKSUM_MODULI]


_LENGTH = len(_digits(_NOTHING))
VOTE_LENGTH = len(vote(_NOTHING))
