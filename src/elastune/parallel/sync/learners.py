"""Several learners on one worker: each has its own model and optimizer state, put into the one model in turn.

The optimizer states of learners are averaged where a round ends. An optimizer has no state of a parameter before
the first gradient of it, so one learner may lack what another has. What it lacks counts as zeros, with which SGD,
Adam and RMSprop begin. (NAdam, ASGD and Rprop begin some numbers elsewhere: their first means are too small.)
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.parallel.comm.group import Group
from elastune.parallel.mechanisms.base import Replica

# [moments] An optimizer's state as numbers that have a mean: the same ones of every learner, on all workers.
#
# An optimizer has no state of a parameter before its first step with a gradient of it. So one learner may lack what
# another has: that of a layer which only some samples reach, or which is left out at random. What it lacks counts as
# zeros, with which SGD, Adam and RMSprop begin. (NAdam, ASGD and Rprop begin some numbers elsewhere: their first means
# are too small.)

Moments = Sequence[dict[str, Any]]
"""The optimizer's state of each parameter, in the parameters' order."""


@dataclass(frozen=True)
class StateEntry:
    """What one part of the state is.

    Attributes:
        place: The parameter that it belongs to.
        name: As the optimizer calls it.
        kind: A tensor's type, or that of a number: "int" or "float".
        shape: A tensor's.
        beside: It is on the parameter's device; else on the CPU.
    """

    place: int
    name: str
    kind: str
    shape: tuple[int, ...] = ()
    beside: bool = False


def entries_of(moments: Moments, params: Sequence[torch.Tensor]) -> list[StateEntry]:
    """What a learner has.

    Raises:
        UserError: Where an optimizer keeps what has no mean.
    """
    pairs = enumerate(zip(moments, params, strict=True))
    return [
        _entry(place, name, value, p)
        for place, (state, p) in pairs
        for name, value in state.items()
        if value is not None
    ]


def _entry(place: int, name: str, value: Any, p: torch.Tensor) -> StateEntry:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return StateEntry(place, name, str(value.dtype), tuple(value.shape), value.device == p.device)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return StateEntry(place, name, type(value).__name__)
    what = f"{value.dtype} tensors" if isinstance(value, torch.Tensor) else type(value).__name__
    rule = "learners become their mean, so an optimizer's state must be of numbers"
    raise UserError(rule, f"{name!r}: {what}", "use another optimizer, or --sync allreduce")


def united(lists: Iterable[Sequence[StateEntry]]) -> list[StateEntry]:
    """What any of several learners has, parameter by parameter.

    Raises:
        UserError: Where two have different things by one name.
    """
    found = sorted(dict.fromkeys(each for own in lists for each in own), key=lambda each: each.place)
    known: dict[tuple[int, str], StateEntry] = {}
    for each in found:
        other = known.setdefault((each.place, each.name), each)
        if other != each:
            rule, value = "learners' optimizers must have alike states", f"{each.name!r}: {other.shape}, {each.shape}"
            raise UserError(rule, value, "use another optimizer, or moments=fresh")
    return found


def agreed(own: list[StateEntry], group: Group) -> list[StateEntry]:
    """What any learner of any worker has, by what each worker's learners have. All workers call this.

    One number from each to each, where all have the same, as they nearly always have. Raises ``GroupBroken`` and, as
    ``united``, ``UserError``.
    """
    text = json.dumps([astuple(each) for each in own]).encode()
    if len({mark for (mark,) in group.gather_row([float(zlib.crc32(text))])}) == 1:
        return own
    rows = group.gather_tensors(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    told = [json.loads(row.numpy().tobytes()) for row in rows]
    return united([StateEntry(at, name, kind, tuple(shape), on) for at, name, kind, shape, on in row] for row in told)


def completed(moments: Moments, entries: Sequence[StateEntry], params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """A learner's state with all of ``entries``, in their order."""
    found: list[dict[str, Any]] = [{} for _ in moments]
    for each in entries:
        value = moments[each.place].get(each.name)
        found[each.place][each.name] = _zero(each, params[each.place]) if value is None else value
    nothing = ({name: value for name, value in state.items() if value is None} for state in moments)
    return [{**empty, **state} for empty, state in zip(nothing, found, strict=True)]


def _zero(entry: StateEntry, p: torch.Tensor) -> Any:
    if entry.kind in ("int", "float"):
        return 0 if entry.kind == "int" else 0.0
    dtype: torch.dtype = getattr(torch, entry.kind.removeprefix("torch."))
    return torch.zeros(entry.shape, dtype=dtype, device=p.device if entry.beside else "cpu")


def numbers_of(moments: Moments) -> list[torch.Tensor]:
    """All of a state, in order, single numbers as tensors."""
    values = (value for state in moments for value in state.values() if value is not None)
    return [
        value if isinstance(value, torch.Tensor) else torch.tensor([float(value)], dtype=torch.float64)
        for value in values
    ]


# [learners] Several learners on one worker: each is model and optimizer as they stand there, put into the one model in turn.

Values = Sequence[torch.Tensor]


@dataclass
class _Learner:
    """One learner's tensors. ``moments``: the optimizer's state of each parameter, in the parameters' order."""

    values: list[torch.Tensor]
    buffers: list[torch.Tensor]
    moments: list[dict[str, Any]]

    def copied(self) -> _Learner:
        return _Learner(
            [value.clone() for value in self.values],
            [buffer.clone() for buffer in self.buffers],
            copy.deepcopy(self.moments),
        )


class Learners:
    """The learners of one worker over a round: all begin as the model stands then, and end as one.

    The program has one model and one optimizer; whose values they have is changed by exchanging the memory of their
    tensors, which costs nothing. ``keeps_moments``: the optimizer's state outlives a round, as its mean.
    """

    def __init__(self, replica: Replica, *, keeps_moments: bool = True) -> None:
        self._replica = replica
        self._keeps_moments = keeps_moments
        self._buffers = list(replica.module.buffers())
        self._origin: _Learner | None = None
        self._held: dict[int, _Learner] = {}
        self._options: list[dict[str, Any]] = []
        self._current: int | None = None

    def begin_round(self) -> list[torch.Tensor]:
        """A round begins here: ``restore`` comes back to this place. Returns its parameters, not to be changed."""
        self._held, self._current = {}, None
        self._origin = self._live().copied()
        groups = self._replica.optimizer.param_groups
        options = ({name: value for name, value in group.items() if name != "params"} for group in groups)
        self._options = [copy.deepcopy(own) for own in options]  # a learning rate may be a tensor, changed in place
        return self._origin.values

    @property
    def buffers(self) -> int:
        """How many of a learner's numbers (``states``) are buffers."""
        return sum(buffer.is_floating_point() for buffer in self._buffers)

    def begun_numbers(self, entries: Sequence[StateEntry]) -> list[torch.Tensor]:
        """What each number that ``states`` tells was when the round began, not to be changed: zero, of those of
        ``entries`` that the optimizer did not have."""
        assert self._origin is not None
        params = self._replica.params
        moments = numbers_of(completed(self._origin.moments, entries, params)) if self._keeps_moments else []
        return [*self._origin.values, *(b for b in self._origin.buffers if b.is_floating_point()), *moments]

    @property
    def begun(self) -> list[torch.Tensor]:
        """The parameters that the round began with, not to be changed."""
        assert self._origin is not None
        return self._origin.values

    def enter(self, learner: int) -> None:
        """From here on the model is ``learner``'s."""
        if learner == self._current:
            return
        self._put_away()
        self._current = learner
        if learner in self._held:
            self._install(self._held.pop(learner))
        elif self._held:
            assert self._origin is not None
            self._install(self._origin.copied())

    def values(self, carried: Sequence[int]) -> dict[int, list[torch.Tensor]]:
        """Each learner's parameters, between two of its steps; they may be changed in place."""
        self._put_away()
        return {learner: self._held[learner].values for learner in carried}

    def entries(self, carried: Sequence[int]) -> list[StateEntry]:
        """What the optimizer has of any of these learners. Raises ``UserError`` where it keeps what has no mean."""
        self._put_away()
        return united(entries_of(self._held[learner].moments, self._replica.params) for learner in carried)

    def complete(self, carried: Sequence[int], entries: Sequence[StateEntry]) -> None:
        """Let each of these learners have all of ``entries``: zeros where its optimizer has nothing yet."""
        self._put_away()
        for learner in carried:
            held = self._held[learner]
            held.moments = completed(held.moments, entries, self._replica.params)

    def states(self, carried: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Each learner's floating-point numbers at the end of its round, in one order, single numbers as tensors."""
        self._put_away()
        for learner in carried:
            held = self._held[learner]
            buffers = [buffer for buffer in held.buffers if buffer.is_floating_point()]
            moments = numbers_of(held.moments) if self._keeps_moments else []
            yield learner, [*held.values, *buffers, *moments]

    def settle(self, execution: Sequence[torch.Tensor], end: Callable[[Values, Values], Values]) -> None:
        """All learners are one again: ``execution`` has the mean of each number that ``states`` told.

        ``end``: what parameters become, of what they were when the round began and their means. What has no mean (a
        model's counters) is the first learner's of this worker: it moves alike for all.
        """
        self._put_away()
        numel = len(self._replica.params)
        values = end(self.begun, execution[:numel])
        self._install(self._held[min(self._held)])
        if not self._keeps_moments:
            for p in self._replica.params:
                self._replica.optimizer.state.pop(p, None)
        left = iter([*values, *execution[numel:]])
        live = self._live()
        for target in (*live.values, *(buffer for buffer in live.buffers if buffer.is_floating_point())):
            target.copy_(next(left))
        for state in (self._replica.optimizer.state[p] for p in self._replica.params if self._moments(p)):
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    value.copy_(next(left))
                elif value is not None:
                    state[name] = type(value)(next(left).item())
        self._held, self._current, self._origin = {}, None, None

    def restore(self) -> None:
        """As all was when the round began."""
        if self._origin is None:
            return
        self._install(self._origin)
        for group, options in zip(self._replica.optimizer.param_groups, self._options, strict=True):
            for name, value in options.items():
                if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                    group[name].copy_(value)  # the program may hold it, to change it
                else:
                    group[name] = value
        self._held, self._current, self._origin = {}, None, None

    # -- whose memory is in place -------------------------------------------------------------------------------------

    def _put_away(self) -> None:
        if self._current is not None:
            self._held[self._current], self._current = self._live(), None

    def _live(self) -> _Learner:
        params = self._replica.params
        buffers = [buffer.data for buffer in self._buffers]
        return _Learner([p.data for p in params], buffers, [dict(self._moments(p)) for p in params])

    def _moments(self, p: torch.nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of ``p``; a look at it makes none."""
        found: dict[str, Any] = self._replica.optimizer.state.get(p, {})
        return found

    def _install(self, learner: _Learner) -> None:
        state = self._replica.optimizer.state
        for p, value, moments in zip(self._replica.params, learner.values, learner.moments, strict=True):
            p.data = value
            if moments:
                state[p] = moments
            else:
                state.pop(p, None)
        for buffer, value in zip(self._buffers, learner.buffers, strict=True):
            buffer.data = value
