"""What the processes of an observed command did: read from the files that their hook wrote, and checked.

The hook (``hook/sitecustomize.py``) runs in the user's processes, so its files are input from outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from elastune.core.errors import UserError

Sketch = list[float]
"""Dot products of a tensor with fixed signs; empty: there was none."""
_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class Started:
    """The process's place among its peers."""

    rank: Annotated[int, Field(ge=0)]
    world: Annotated[int, Field(ge=1)]
    kind: Literal["start"]


@dataclass(frozen=True, config=_RULES)
class Made:
    """An object that may explain a difference, and the user's line that made it."""

    line: str
    what: str
    kind: Literal["optimizer", "loader"]


@dataclass(frozen=True, config=_RULES)
class Seeded:
    """A call of ``torch.manual_seed``."""

    line: str
    value: int
    kind: Literal["seed"]


@dataclass(frozen=True, config=_RULES)
class SamplerIterated:
    """A ``DistributedSampler`` begins a pass. ``epoch``: the number from which it shuffles."""

    line: str
    shuffles: bool
    epoch: int
    key: int
    kind: Literal["sampler"]


@dataclass(frozen=True, config=_RULES)
class Forward:
    """An outermost call of a model.

    Attributes:
        step: The optimizer steps before it.
        trains: The model trains and gradients are on.
        rows: A digest of each row of the batch.
        random: A digest of the CPU's random state.
        batch_norms, dropout, weights: Of the first call in training: layers that normalise by the batch, whether
            dropout is on, and a sketch of each parameter.
    """

    step: int
    trains: bool
    rows: list[str]
    line: str
    random: str
    kind: Literal["forward"]
    batch_norms: int = 0
    dropout: bool = False
    weights: list[Sketch] | None = None


@dataclass(frozen=True, config=_RULES)
class Backward:
    """A call of ``loss.backward()``. ``loss``: None if it is no single number."""

    step: int
    loss: float | None
    line: str
    kind: Literal["backward"]


@dataclass(frozen=True, config=_RULES)
class Step:
    """An optimizer is about to step: its rates, and its gradients before and after they were put together."""

    step: int
    rates: list[float]
    local: list[Sketch]
    reduced: list[Sketch]
    line: str
    kind: Literal["step"]


@dataclass(frozen=True, config=_RULES)
class AfterStep:
    """The weights and the buffers after a step."""

    step: int
    weights: list[Sketch]
    buffers: dict[str, Sketch]
    kind: Literal["done"]


@dataclass(frozen=True, config=_RULES)
class Unwatched:
    """From this step on the hook looked at nothing."""

    step: int
    kind: Literal["unwatched"]


Observed = Annotated[
    Started | Made | Seeded | SamplerIterated | Forward | Backward | Step | AfterStep | Unwatched,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[Observed] = TypeAdapter(Observed)


@dataclass(frozen=True)
class Process:
    """One process of the command, in the order in which things happened."""

    rank: int
    world: int
    events: list[Observed] = field(default_factory=list)

    def forwards(self, step: int | None = None, *, trains: bool = True) -> list[Forward]:
        """Its outermost calls of models, of one step or of all."""
        return [
            event
            for event in self.events
            if isinstance(event, Forward) and event.trains == trains and step in (None, event.step)
        ]

    def rows(self, step: int) -> list[str]:
        """The rows on which step ``step`` was trained."""
        return [row for forward in self.forwards(step) for row in forward.rows]

    def backwards(self, step: int) -> list[Backward]:
        """Its backward passes of a step."""
        return [event for event in self.events if isinstance(event, Backward) and event.step == step]

    @property
    def steps(self) -> dict[int, Step]:
        """Its steps, by number."""
        return {event.step: event for event in self.events if isinstance(event, Step)}

    @property
    def done(self) -> dict[int, AfterStep]:
        """What it had after each step."""
        return {event.step: event for event in self.events if isinstance(event, AfterStep)}

    @property
    def first(self) -> Forward | None:
        """The first call of a model in training."""
        return next(iter(self.forwards()), None)

    def line_of(self, kind: str) -> str:
        """The user's line that made the first optimizer or loader, or set the first seed; empty: none did."""
        return next((e.line for e in self.events if isinstance(e, (Made, Seeded)) and e.kind == kind and e.line), "")


@dataclass(frozen=True)
class ObservedCommand:
    """One run of the command: its processes in the order of their ranks.

    Attributes:
        ended: The command ended by itself; otherwise its time was over, and the last step may lack some of it.
    """

    processes: list[Process]
    ended: bool = True

    @property
    def world(self) -> int:
        """The number of processes that took steps."""
        return len(self.processes)

    @property
    def steps(self) -> int:
        """The number of steps that all processes took and the hook watched."""
        return min(len(process.done) for process in self.processes)

    @property
    def whole(self) -> bool:
        """Whether all its steps were watched, to its own end."""
        return self.ended and not any(isinstance(e, Unwatched) for p in self.processes for e in p.events)

    def rows(self, step: int) -> Counter[str]:
        """How often the step was trained on each row, over all processes."""
        return Counter(row for process in self.processes for row in process.rows(step))

    def all_rows(self) -> Counter[str]:
        """How often each row was trained on in all watched steps."""
        return Counter(row for p in self.processes for forward in p.forwards() for row in forward.rows)

    def evaluated(self) -> Counter[str]:
        """How often each row was evaluated, over all processes."""
        passes = (f for p in self.processes for f in p.forwards(trains=False))
        return Counter(row for forward in passes for row in forward.rows)

    def each_first(self) -> Iterator[Forward]:
        """The first call of a model in training, of each process."""
        for process in self.processes:
            if process.first is not None:
                yield process.first


def read_observation(folder: Path, *, ended: bool = True) -> ObservedCommand:
    """Read the files of one run of the command. ``ended``: by itself.

    A torn last line (its process was ended) is left out.

    Raises:
        UserError: Where a line is no record of the hook's, two processes have one rank, or a rank is missing.
    """
    processes = [_process(file) for file in sorted(folder.glob("rank-*.jsonl"))]
    processes.sort(key=lambda process: process.rank)
    ranks = [process.rank for process in processes]
    if ranks and ranks != list(range(len(ranks))):
        fix = "let the command call init_process_group, or start its processes by torchrun"
        raise UserError("each process of the command must have a rank of its own", f"ranks {ranks}", fix)
    return ObservedCommand(processes, ended)


def _process(file: Path) -> Process:
    lines = file.read_bytes().split(b"\n")[:-1]
    events = [_event(file, number, line) for number, line in enumerate(lines, start=1)]
    if not events or not isinstance(events[0], Started):
        raise UserError("a process's observations must begin with its rank", file, "run the check again")
    return Process(events[0].rank, events[0].world, events[1:])


def _event(file: Path, number: int, line: bytes) -> Observed:
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        what = f"{file}, line {number}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError("every observation must be a record of the hook's", what, "run the check again") from None


def mean(sketches: Sequence[Sketch]) -> Sketch:
    """The sketch of the mean of tensors; empty if one of them has none."""
    if not sketches or not all(sketches):
        return []
    return [sum(values) / len(sketches) for values in zip(*sketches, strict=True)]
