"""Several learners on one worker: each has its own model and optimizer state, put into the one model in turn.

At the end of a round the optimizer states of learners become their mean. An optimizer has no state of a parameter
before the first gradient of it. So one learner may lack a state that another has, for example of a layer that only
some samples reach. The missing state counts as zeros, the start values of SGD, Adam and RMSprop. (NAdam, ASGD and Rprop
begin some numbers elsewhere: their first means are too small.)
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

Values = Sequence[torch.Tensor]
Moments = Sequence[dict[str, Any]]
"""The optimizer's state of each parameter, in the parameters' order."""


class Learners:
    """The learners of one worker over a round: all begin with the model's values, and end as one.

    The program has one model and one optimizer. ``enter`` exchanges the memory of their tensors, which costs nothing,
    so they have the values of one learner at a time. With ``keeps_moments`` the optimizer's state outlives a round, as
    its mean.

    A round: ``begin_round``; ``enter`` before each learner's pass; then ``states`` for the exchange and ``settle`` with
    its means. ``restore`` goes back to the round's beginning.
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
        """Begin a round, to which ``restore`` goes back. Return its parameters; the caller must not change them."""
        self._held, self._current = {}, None
        self._origin = self._live().copied()
        groups = self._replica.optimizer.param_groups
        options = ({name: value for name, value in group.items() if name != "params"} for group in groups)
        # Deep copies, because a learning rate may be a tensor that the program changes in place.
        self._options = [copy.deepcopy(group_options) for group_options in options]
        return self._origin.values

    @property
    def buffers(self) -> int:
        """How many tensors of a learner's ``states`` are buffers."""
        return sum(buffer.is_floating_point() for buffer in self._buffers)

    def start_numbers(self, entries: Sequence[StateEntry]) -> list[torch.Tensor]:
        """The tensors of ``states`` at the round's beginning; the caller must not change them.

        An entry of ``entries`` that the optimizer did not have then is zero.
        """
        assert self._origin is not None
        params = self._replica.params
        moments = numbers_of(completed(self._origin.moments, entries, params)) if self._keeps_moments else []
        return [*self._origin.values, *(b for b in self._origin.buffers if b.is_floating_point()), *moments]

    @property
    def start_values(self) -> list[torch.Tensor]:
        """The parameters at the round's beginning; the caller must not change them."""
        assert self._origin is not None
        return self._origin.values

    def enter(self, learner: int) -> None:
        """Put the values of ``learner`` into the model and the optimizer."""
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
        """Each learner's parameters, between two of its steps; the caller may change them in place."""
        self._put_away()
        return {learner: self._held[learner].values for learner in carried}

    def entries(self, carried: Sequence[int]) -> list[StateEntry]:
        """The entries of the optimizer states of these learners. Raises ``UserError`` as ``entries_of``."""
        self._put_away()
        return united(entries_of(self._held[learner].moments, self._replica.params) for learner in carried)

    def complete(self, carried: Sequence[int], entries: Sequence[StateEntry]) -> None:
        """Give each of these learners all of ``entries``: zeros if its optimizer has no value yet."""
        self._put_away()
        for learner in carried:
            held = self._held[learner]
            held.moments = completed(held.moments, entries, self._replica.params)

    def states(self, carried: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Each learner's floating-point numbers at the end of its round, in one order.

        Parameters come first, then buffers, then the optimizer's state, with single numbers as tensors.
        """
        self._put_away()
        for learner in carried:
            held = self._held[learner]
            buffers = [buffer for buffer in held.buffers if buffer.is_floating_point()]
            moments = numbers_of(held.moments) if self._keeps_moments else []
            yield learner, [*held.values, *buffers, *moments]

    def settle(self, averages: Sequence[torch.Tensor], end: Callable[[Values, Values], Values]) -> None:
        """Make all learners one again, from the means of their numbers.

        Values without a mean, such as a model's counters, come from this worker's first learner: they change alike for
        all learners.

        Args:
            averages: The mean of each tensor of ``states``.
            end: Returns the new parameters, from those at the round's beginning and their means.
        """
        self._put_away()
        numel = len(self._replica.params)
        values = end(self.start_values, averages[:numel])
        self._install(self._held[min(self._held)])
        if not self._keeps_moments:
            for p in self._replica.params:
                self._replica.optimizer.state.pop(p, None)
        left = iter([*values, *averages[numel:]])
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
        """Go back to the round's beginning."""
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
        """The optimizer's state of ``p``; reading it does not create one."""
        state: dict[str, Any] = self._replica.optimizer.state.get(p, {})
        return state

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


@dataclass
class _Learner:
    """One learner's parameters, buffers and optimizer state (``Moments``)."""

    values: list[torch.Tensor]
    buffers: list[torch.Tensor]
    moments: list[dict[str, Any]]

    def copied(self) -> _Learner:
        return _Learner(
            [value.clone() for value in self.values],
            [buffer.clone() for buffer in self.buffers],
            copy.deepcopy(self.moments),
        )


# --- an optimizer's state as numbers that have a mean -----------------------------------------------------------------


@dataclass(frozen=True)
class StateEntry:
    """The description of one tensor or number of an optimizer's state.

    Attributes:
        place: The parameter that it belongs to.
        name: Its name in the optimizer.
        kind: The dtype of a tensor, or the type of a number: "int" or "float".
        shape: The shape of a tensor.
        beside: It is on the parameter's device; if False, on the CPU.
    """

    place: int
    name: str
    kind: str
    shape: tuple[int, ...] = ()
    beside: bool = False


def entries_of(moments: Moments, params: Sequence[torch.Tensor]) -> list[StateEntry]:
    """Describe the optimizer state of one learner.

    Raises:
        UserError: If the state has a value without a mean, such as a tensor of whole numbers.
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
    kind = f"{value.dtype} tensors" if isinstance(value, torch.Tensor) else type(value).__name__
    rule = "learners become their mean, so an optimizer's state must be of numbers"
    raise UserError(rule, f"{name!r}: {kind}", "use another optimizer, or --sync allreduce")


def united(lists: Iterable[Sequence[StateEntry]]) -> list[StateEntry]:
    """The entries of all learners, each once, parameter by parameter.

    Raises:
        UserError: If two learners have different entries of one name.
    """
    every_entry = (entry for learner_entries in lists for entry in learner_entries)
    entries = sorted(dict.fromkeys(every_entry), key=lambda entry: entry.place)
    by_name: dict[tuple[int, str], StateEntry] = {}
    for entry in entries:
        other = by_name.setdefault((entry.place, entry.name), entry)
        if other != entry:
            rule, value = "learners' optimizers must have alike states", f"{entry.name!r}: {other.shape}, {entry.shape}"
            raise UserError(rule, value, "use another optimizer, or moments=fresh")
    return entries


def agreed(entries: list[StateEntry], group: Group) -> list[StateEntry]:
    """The entries of all learners of all workers, from ``entries`` of this worker. All workers call this.

    Usually all workers have the same entries; then it costs one number from each worker to each.

    Raises:
        GroupBroken: If the group ends.
        UserError: As ``united``.
    """
    text = json.dumps([astuple(entry) for entry in entries]).encode()
    if len({checksum for (checksum,) in group.gather_row([float(zlib.crc32(text))])}) == 1:
        return entries
    rows = group.gather_tensors(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    lists = [json.loads(row.numpy().tobytes()) for row in rows]
    return united([StateEntry(at, name, kind, tuple(shape), on) for at, name, kind, shape, on in row] for row in lists)


def completed(moments: Moments, entries: Sequence[StateEntry], params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """A learner's state with all of ``entries``, in their order; missing values are zeros."""
    complete: list[dict[str, Any]] = [{} for _ in moments]
    for entry in entries:
        value = moments[entry.place].get(entry.name)
        complete[entry.place][entry.name] = _zero(entry, params[entry.place]) if value is None else value
    without_value = ({name: value for name, value in state.items() if value is None} for state in moments)
    return [{**empty, **state} for empty, state in zip(without_value, complete, strict=True)]


def _zero(entry: StateEntry, p: torch.Tensor) -> Any:
    if entry.kind in ("int", "float"):
        return 0 if entry.kind == "int" else 0.0
    dtype: torch.dtype = getattr(torch, entry.kind.removeprefix("torch."))
    return torch.zeros(entry.shape, dtype=dtype, device=p.device if entry.beside else "cpu")


def numbers_of(moments: Moments) -> list[torch.Tensor]:
    """All numbers of a state, in order, single numbers as tensors."""
    values = (value for state in moments for value in state.values() if value is not None)
    return [
        value if isinstance(value, torch.Tensor) else torch.tensor([float(value)], dtype=torch.float64)
        for value in values
    ]
