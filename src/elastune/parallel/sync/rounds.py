"""Rounds: the learners of all workers take steps of their own, may mix within a round, and become one at its end.

``Learners`` holds the learners of one worker, ``RoundSync`` runs the rounds, and ``strategy_of`` chooses how the
parameters come together.
"""

from __future__ import annotations

import copy
import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar

import torch

from elastune.core.errors import UserError
from elastune.core.slots import BatchSlice, Mode
from elastune.core.sync_plan import Send, Strategy, SyncPlan, fragments_of
from elastune.parallel.comm.compressed import (
    BLOCK,
    Blocks,
    Codec,
    EncodedReducer,
    Half,
    HalfBytes,
    ShorterFloat8,
    ShorterHalf,
)
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms, replicated
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.sync.allreduce import AllReduce, ExactAllReduce, FastAllReduce
from elastune.parallel.sync.base import STATISTICS, Sync, step_statistics
from elastune.parallel.sync.local_sgd import Averaging, DiLoCo, Local, ParameterServer, StreamingDiLoCo, Values
from elastune.parallel.sync.peer_averaging import AsyncPairAveraging, Gossip, PairAveraging

# Several learners on one worker: each has its own model and optimizer state, put into the one model in turn.
#
# At the end of a round the optimizer states of learners become their mean. An optimizer has no state of a parameter
# before the first gradient of it. So one learner may lack a state that another has, for example of a layer that only
# some samples reach. The missing state counts as zeros, the start values of SGD, Adam and RMSprop. (NAdam, ASGD and
# Rprop begin some numbers elsewhere: their first means are too small.)

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


# Rounds: learners take steps of their own, may mix within a round, and become one again at its end.
#
# ``RoundSync`` runs the rounds. ``strategy_of`` chooses how the parameters come together: local SGD, DiLoCo,
# averaging, gossip, pair averaging or a parameter server.
#
# If numbers travel rounded, a learner sends its change since the round began, as all learners begin a round alike.
# The loss of rounding is small beside the change. If the numbers themselves were rounded, a second moment that
# changes by a thousandth would not change at all.

Tensors = Sequence[torch.Tensor]
_CODECS: dict[Send, tuple[Codec, Codec]] = {
    "bf16": (Half(torch.bfloat16), ShorterHalf()),
    "int8": (Blocks(), ShorterFloat8()),
    "int4": (HalfBytes(), ShorterFloat8()),
}
"""The codec of parameters, and the codec of optimizers' states."""
_STRATEGIES: dict[Strategy, type[Local]] = {
    "local": Local,
    "diloco": DiLoCo,
    "averaging": Averaging,
    "gossip": Gossip,
    "pair_averaging": PairAveraging,
    "parameter_server": ParameterServer,
}


class RoundSync(Sync):
    """Training in rounds, as one worker sees it.

    Each learner takes the gradient of its own slots, and the program's optimizer takes the learner's step. After
    ``plan.every`` steps all learners become one: the parameters by the plan's strategy
    (``parallel.sync.local_sgd.Local``), buffers and the optimizer's state by their mean. (Averaging momenta as well as
    parameters: Yu, Jin and Yang, ICML 2019, arXiv 1905.03817.)

    A round is completed by all workers, adopted, or done again from its beginning. Within a round a learner is on one
    worker alone. Between rounds all learners are equal, so no learner is lost with its worker. If the plan has a
    quorum, the remaining workers may complete the round: they exchange again, and the mean is over the present
    learners; ``absent`` lists the others.

    Means follow the canonical tree over learners, and in ``exact`` mode the gradient of a learner follows the tree over
    its slots. So the result does not depend on which worker carries which learner. If the plan sends rounded numbers,
    each worker rounds the sum of its learners in ``fast`` mode, and the result then depends on the number of workers.
    """

    name: ClassVar[str] = "rounds"
    exact: bool = False
    drifts: ClassVar[bool] = False
    all_contribute: ClassVar[bool] = True
    meets_after_step: ClassVar[bool] = True

    def __init__(
        self,
        replica: Replica,
        comms: Comms,
        plan: SyncPlan,
        num_slots: int,
        control: int = 0,
        *,
        mode: Mode = "exact",
        elastic: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(replica, comms, control)
        self.exact = mode == "exact"
        self.plan, self._elastic = plan, elastic
        self._slots = num_slots // plan.learners
        alone = replicated(Group())
        self._learner_sync: AllReduce = (
            ExactAllReduce(replica, alone, self._slots) if self.exact else FastAllReduce(replica, alone)
        )
        self._learners = Learners(replica, keeps_moments=plan.moments == "mean")
        self._strategy = strategy_of(plan, replica.params, self.group, mode)
        self._strategy.seed = seed
        self._reducer: ExactReducer | EncodedReducer | None = None
        self._rounding = plan.send != "whole"
        self._entries: list[StateEntry] = []  # the optimizer's state that it sums beside parameters and buffers
        self._sums = [0.0] * len(STATISTICS)
        self._starts = True
        self._local_steps = 0  # of this round, that all learners of this worker have taken
        self._due = False  # a mix is due before the next pass
        self._mixing_s = 0.0
        self._owes_step = False
        self._carried: list[int] = []
        self._counted = 0.0  # the share of the round that this worker's learners have
        self._hook = replica.optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _stepped(self) -> None:
        self._owes_step = False

    # -- a learner's own step -----------------------------------------------------------------------------------------

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        if starts_step:
            self._strategy.steps = sum(part.ends_local_step for part in self.parts)
            self._strategy.begin(self._learners.begin_round())
            self._sums, self._starts = [0.0] * len(STATISTICS), True
            self._local_steps, self._mixing_s, self._counted, self._carried = 0, 0.0, 0.0, []
        elif self._due:
            self._mix()
        self._due = False
        if self._starts:
            self._learners.enter(share.learner)
            if share.learner not in self._carried:
                self._carried.append(share.learner)
        self._learner_sync.begin(self._within(share), starts_step=self._starts)
        self._starts = share.ends_update

    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        self._learner_sync.wants_statistics = self.wants_statistics
        self._learner_sync.backward(loss, self._within(share))
        if share.ends_update:
            self._learner_sync.divide_by_counts()
            parts = self._learner_sync.statistics.parts
            weighted = [parts.get(name, 0.0) * share.counts for name in STATISTICS]
            self._sums = [a + b for a, b in zip(self._sums, weighted, strict=True)]
            self._counted += share.counts
        if share.ends_local_step:
            self._local_steps += 1
            self._due = self.plan.mixes and self._local_steps % self.plan.mix == 0
        self._owes_step = share.ends_step

    def count_elements(self, elements: float, weight: float) -> None:
        self._learner_sync.count_elements(elements, weight)

    def divide_by_counts(self) -> None:
        """Do nothing: each learner has divided its own gradients before its step."""

    def _mix(self) -> None:
        """Mix the learners within the round. Raises ``GroupBroken``."""
        started = time.perf_counter()
        self._strategy.mix(self._learners.values(self._carried), self._local_steps // self.plan.mix - 1)
        self._mixing_s += time.perf_counter() - started

    def _within(self, share: BatchSlice) -> BatchSlice:
        """``share`` with slots counted within its learner, for the learner's own sums."""
        return replace(share, slot=share.slot - share.learner * self._slots, ends_step=share.ends_update)

    # -- the exchange -------------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Exchange with the other workers and complete the round. Raises ``GroupBroken``."""
        self._due = False
        started = time.perf_counter()
        self._strategy.finish()
        self._complete()
        self._mixing_s += time.perf_counter() - started
        parts, slots = self._contributions(self._carried), self._carried
        if self.plan.has_quorum or (self._rounding and not self.exact):
            # All learners as one part, in a slot that this worker has. Its learners may be of an earlier deal than the
            # group's. And rounded numbers then travel once for each worker, not once for each learner.
            slots = [self.plan.carried(self.group.size, self.group.rank).start]
            parts = iter([(slots[0], _sum(parts))])
        for slot, values in parts:
            reducer = self._reducer_of(values)
            if slot == slots[0]:
                reducer.begin()
            reducer.begin_slot(slot, last=slot == slots[-1])
            for place, value in enumerate(values):
                reducer.put(place, value.detach())
        assert self._reducer is not None
        sums = self._reducer.finish()
        self.wait_s = self._mixing_s + self._reducer.wait_s
        self._adopt_sums(sums)

    def _complete(self) -> None:
        """Give all learners the same state entries: an optimizer may have met a parameter with one of them only.

        Raises ``GroupBroken``.
        """
        if self.plan.moments == "fresh":
            return
        entries = agreed(self._learners.entries(self._carried), self.group)
        self._learners.complete(self._carried, entries)
        if entries != self._entries:
            self._entries, self._reducer = entries, None

    def _contributions(self, carried: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """The tensors that each learner of this worker adds to the sums.

        The last tensor is the tail: the worker's numbers (only of its last learner), the presence of the learner, and
        its ``squared_delta``. ``_adopt_sums`` reads it from the other end.
        """
        strategy, params = self._strategy, self.replica.params
        worker_numbers = [*self.control, *self._sums, float(strategy.taken), float(strategy.taken_age * self.plan.mix)]
        for learner, numbers in self._learners.states(carried):
            head = worker_numbers if learner == carried[-1] else [0.0] * len(worker_numbers)
            presence = self._presence(learner, last=learner == carried[-1])
            tail = torch.tensor([*head, *presence, 0.0], device=params[0].device)
            tail[-1] = squared_delta(numbers[: len(params)], self._learners.start_values)
            if self._rounding:
                start_values, codecs = self._learners.start_numbers(self._entries), self._codecs_of(numbers)
                numbers = [
                    n.detach() - b if i in codecs else n
                    for i, (n, b) in enumerate(zip(numbers, start_values, strict=True))
                ]
            yield learner, [*numbers, tail]

    def _presence(self, learner: int, *, last: bool) -> list[float]:
        """With a quorum: a 1 at the place of ``learner``, and the worker's share of the round (with its last one)."""
        if not self.plan.has_quorum:
            return []
        return [*(float(other == learner) for other in range(self.plan.learners)), self._counted if last else 0.0]

    def _reducer_of(self, like: Sequence[torch.Tensor]) -> ExactReducer | EncodedReducer:
        """The reducer for tensors like ``like``, made late: an optimizer has no state before its first step."""
        if self._reducer is None:
            like, learners = [value.detach() for value in like], self.plan.learners
            codecs = self._codecs_of(like[:-1])
            self._reducer = (
                EncodedReducer(like, learners, self.group, codecs, by_slot=self.exact, hold=self._elastic)
                if self._rounding
                else ExactReducer(like, learners, self.group, hold=self._elastic)
            )
        return self._reducer

    def _codecs_of(self, numbers: Sequence[torch.Tensor]) -> dict[int, Codec]:
        return codecs_of(self.plan.send, numbers, len(self.replica.params), self._learners.buffers)

    def _adopt_sums(self, sums: Sequence[torch.Tensor]) -> None:
        """Complete the round with the sums over learners: set the tail's results, and make all learners one."""
        *numbers, tail = sums
        *totals, square = tail.tolist()
        count, part = self.plan.learners, 1.0
        if self.plan.has_quorum:
            *totals, part = totals
            totals, presence = totals[:-count], totals[-count:]
            self.absent = tuple(learner for learner, present in enumerate(presence) if present == 0)
            count -= len(self.absent)
        *totals, taken, taken_age = totals
        params, averages = self.replica.params, [number / count for number in numbers]
        if self._rounding:
            start_values = self._learners.start_numbers(self._entries)
            for i in self._codecs_of(averages):
                averages[i] = start_values[i] + averages[i]
        apart = distance(square / count, averages[: len(params)], self._learners.start_values)
        self._learners.settle(averages, self._strategy.end)
        self.totals = totals[: -len(STATISTICS)]
        self.statistics = step_statistics([total / (part or 1.0) for total in totals[-len(STATISTICS) :]], None, apart)
        self.statistics = replace(self.statistics, staleness=taken_age / taken if taken else None)
        for p in params:
            p.grad = None

    @property
    def awaits_step(self) -> bool:
        return self._owes_step

    # -- when workers come and go -------------------------------------------------------------------------------------

    def last_result(self) -> list[torch.Tensor]:
        return self._exchange.last_result()

    def result_room(self) -> list[torch.Tensor]:
        return self._exchange.result_room()

    def adopt_result(self, result: Sequence[torch.Tensor]) -> None:
        self._adopt_sums(self._exchange.adopt(result))

    @property
    def _exchange(self) -> ExactReducer | EncodedReducer:
        if self._reducer is None:
            raise RuntimeError("this worker has had no exchange")
        return self._reducer

    def abandon(self) -> None:
        if self._reducer is not None:
            self._reducer.drain()
        self._strategy.abandon()
        self._learner_sync.abandon()
        self._learners.restore()
        self._owes_step, self._starts, self._due = False, True, False

    def regroup(self, comms: Comms, over: Group | None = None) -> None:
        super().regroup(comms, over)
        if self._reducer is not None:
            self._reducer.regroup(self.group)
        self._strategy.regroup(self.group)

    def close(self) -> None:
        self._hook.remove()

    # -- saved state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._strategy.load_state_dict(state)


def _sum(parts: Iterator[tuple[int, list[torch.Tensor]]]) -> list[torch.Tensor]:
    """The sum of several learners' tensors; those of a single learner are not copied."""
    _, total = next(parts)
    copied = False
    for _, values in parts:
        if not copied:
            total, copied = [value.detach().clone() for value in total], True
        for summed, value in zip(total, values, strict=True):
            summed += value.detach()
    return total


def strategy_of(plan: SyncPlan, like: Values, group: Group, mode: Mode) -> Local:
    """The strategy of ``plan`` for learners whose parameters are ``like``. Raises as ``check_model``."""
    kind = _STRATEGIES[plan.strategy]
    if plan.streams:
        kind = StreamingDiLoCo
    elif mode == "fast" and kind is PairAveraging:
        kind = AsyncPairAveraging
    return kind(plan, like, group)


def check_model(plan: SyncPlan, like: Values) -> None:
    """Raise ``UserError`` if ``plan`` cannot train a model with the parameters ``like``."""
    fragments_of([value.nbytes for value in like], plan.fragments)


# --- rounding, and the distance of learners ---------------------------------------------------------------------------
def codecs_of(send: Send, numbers: Sequence[torch.Tensor], params: int, buffers: int) -> dict[int, Codec]:
    """The codecs of the tensors that travel rounded, by their place in ``numbers``.

    Buffers, counts of steps, and tensors with less than a block of numbers (gains and biases) travel whole.

    Args:
        send: How the plan sends numbers.
        numbers: A learner's tensors: parameters, buffers, and the optimizer's state.
        params: How many of them are parameters.
        buffers: How many of them are buffers.
    """
    if send == "whole":
        return {}
    of_params, of_state = _CODECS[send]
    codecs = dict.fromkeys(range(params), of_params) | dict.fromkeys(range(params + buffers, len(numbers)), of_state)
    return {i: codec for i, codec in codecs.items() if numbers[i].numel() >= BLOCK and numbers[i].is_floating_point()}


def check_rounding(plan: SyncPlan, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UserError`` if rounding would break a relation between parts of the optimizer's state."""
    centred = isinstance(optimizer, torch.optim.RMSprop) and any(group["centered"] for group in optimizer.param_groups)
    if plan.send != "whole" and plan.moments == "mean" and centred:
        rule = "RMSprop(centered=True) takes the root of a difference, which rounded numbers make negative"
        raise UserError(rule, str(plan), "use moments=fresh, or send=whole")


def distance(mean_square: float, averages: Tensors, start_values: Tensors) -> float | None:
    """How far learners are apart: the root mean square of their distances from their mean, over the norm of the mean.

    (Consensus distance, over the norm of the model: Kong et al., ICML 2021, arXiv 2102.04828.)

    It needs no second exchange, because one number of each learner travels with the mean. With d_i the change of
    learner i since the round began, mean |x_i - mean x|^2 = mean |d_i|^2 - |mean d|^2. Changes are short beside
    parameters, so the difference keeps its digits. If learners are closer together than some 1e-3 of their common
    change, the result is rounding.

    Args:
        mean_square: The mean of learners' ``squared_delta``.
        averages: The means of their parameters.
        start_values: The parameters at the round's beginning.

    Returns:
        None if the result is not finite: a learner has diverged, or all parameters are zero.
    """
    norms = torch.stack([torch.linalg.vector_norm(mean.float()) for mean in averages])
    common, square = torch.stack([squared_delta(averages, start_values), norms.square().sum()]).tolist()
    if not (math.isfinite(mean_square - common) and 0 < square < math.inf):
        return None
    return math.sqrt(max(0.0, mean_square - common) / square)


def squared_delta(values: Tensors, start_values: Tensors) -> torch.Tensor:
    """The squared norm of ``values - start_values``, as one number on their device, in single precision."""
    # One tensor at a time, so that no second copy of all parameters is in memory.
    norms = [torch.linalg.vector_norm((now - then).float()) for now, then in zip(values, start_values, strict=True)]
    return torch.stack(norms).square().sum()
