"""Rounds: learners take steps of their own, may mix within a round, and become one again where it ends.

What may travel rounded is a learner's change since the round began. What rounding loses is small beside the change,
but not beside the number itself: a second moment that moves by a thousandth would not move at all.
How far learners are apart needs no second exchange: one number of each learner travels with the mean.
With d_i the change of learner i since the round began, mean |x_i - mean x|^2 = mean |d_i|^2 - |mean d|^2.
Changes are short beside parameters, so the difference keeps its digits. Where learners are closer together than
some 1e-3 of their common change, the result is rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.core.run import Mode
from elastune.core.sync_plan import Send, Strategy, SyncPlan, fragments_of
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms, replicated
from elastune.parallel.comm.quantized import (
    BLOCK,
    Blocks,
    Codec,
    EncodedReducer,
    Half,
    HalfBytes,
    ShorterFloat8,
    ShorterHalf,
)
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.sync.allreduce import AllReduce, ExactAllReduce, FastAllReduce
from elastune.parallel.sync.base import STATISTICS, Sync, step_statistics
from elastune.parallel.sync.diloco import DiLoCo, StreamingDiLoCo
from elastune.parallel.sync.learners import Learners, StateEntry, agreed
from elastune.parallel.sync.local_sgd import Averaging, Local, ParameterServer, Values
from elastune.parallel.sync.peer_averaging import AsyncPairAveraging, Gossip, PairAveraging

# [distance] How far apart learners are where a round ends, from what each of them knows alone before the exchange.
#
# With d_i the way of learner i since the round began, mean |x_i - mean x|^2 = mean |d_i|^2 - |mean d|^2: one number of
# each learner rides in the exchange that brings the mean, and nothing is exchanged twice. Ways are short beside
# parameters, so the difference keeps its digits; where learners are closer together than some 1e-3 of their common way,
# it is rounding.

Tensors = Sequence[torch.Tensor]


def squared_delta(values: Tensors, begun: Tensors) -> torch.Tensor:
    """The squared norm of ``values - begun``, as one number on their device, in single precision."""
    # One tensor at a time: a second copy of all parameters is not held for a figure.
    norms = [torch.linalg.vector_norm((now - then).float()) for now, then in zip(values, begun, strict=True)]
    return torch.stack(norms).square().sum()


def distance(mean_square: float, execution: Tensors, begun: Tensors) -> float | None:
    """The root mean square of learners' distances from their mean, over the norm of the mean; relative, without unit.

    (Consensus distance, over the norm of the model: Kong et al., ICML 2021, arXiv 2102.04828.)

    Args:
        mean_square: The mean of learners' ``squared_delta``.
        means: The means of their parameters.
        begun: The parameters that the round began with.

    Returns:
        None where it is no finite number: a learner has diverged, or all parameters are zero.
    """
    norms = torch.stack([torch.linalg.vector_norm(mean.float()) for mean in execution])
    common, square = torch.stack([squared_delta(execution, begun), norms.square().sum()]).tolist()
    if not (math.isfinite(mean_square - common) and 0 < square < math.inf):
        return None
    return math.sqrt(max(0.0, mean_square - common) / square)


# [sending] How the numbers of learners travel where a round ends: which of them are rounded, and to what.
#
# All learners begin a round alike, so a number can travel as the way that it has come since. What is lost of a way is
# small beside the way, and not beside the number: a second moment that moves by a thousandth in a round would not move at
# all, if it were rounded itself.

_CODECS: dict[Send, tuple[Codec, Codec]] = {
    "bf16": (Half(torch.bfloat16), ShorterHalf()),
    "int8": (Blocks(), ShorterFloat8()),
    "int4": (HalfBytes(), ShorterFloat8()),
}
"""Of parameters' ways, and of those of optimizers' states."""


def codecs_of(send: Send, numbers: Sequence[torch.Tensor], params: int, buffers: int) -> dict[int, Codec]:
    """The codec of each of a learner's ``numbers`` that is rounded, by its place.

    They are ``params`` parameters, ``buffers`` buffers, and the optimizer's state. Buffers, counts of steps and what
    has less than a block of numbers travel as they are: gains and biases are few.
    """
    if send == "whole":
        return {}
    of_params, of_state = _CODECS[send]
    found = dict.fromkeys(range(params), of_params) | dict.fromkeys(range(params + buffers, len(numbers)), of_state)
    return {i: codec for i, codec in found.items() if numbers[i].numel() >= BLOCK and numbers[i].is_floating_point()}


def check_rounding(plan: SyncPlan, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UserError`` where parts of an optimizer's state have to fit each other more exactly than they would."""
    centred = isinstance(optimizer, torch.optim.RMSprop) and any(group["centered"] for group in optimizer.param_groups)
    if plan.send != "whole" and plan.moments == "mean" and centred:
        rule = "RMSprop(centered=True) takes the root of a difference, which rounded numbers make negative"
        raise UserError(rule, str(plan), "use moments=fresh, or send=whole")


# [strategies] What learners do within a round and at its end, by what a plan asks for.

_STRATEGIES: dict[Strategy, type[Local]] = {
    "local": Local,
    "diloco": DiLoCo,
    "averaging": Averaging,
    "gossip": Gossip,
    "pair_averaging": PairAveraging,
    "parameter_server": ParameterServer,
}


def strategy_of(plan: SyncPlan, like: Values, group: Group, mode: Mode) -> Local:
    """The strategy of ``plan`` for learners whose parameters are ``like``. Raises as ``check_model``."""
    kind = _STRATEGIES[plan.strategy]
    if plan.streams:
        kind = StreamingDiLoCo
    elif mode == "fast" and kind is PairAveraging:
        kind = AsyncPairAveraging
    return kind(plan, like, group)


def check_model(plan: SyncPlan, like: Values) -> None:
    """Raise ``UserError`` where a model with the parameters ``like`` cannot be trained so."""
    fragments_of([value.nbytes for value in like], plan.fragments)


# [rounds] Rounds: learners take steps of their own, may mix within a round, and become one again where it ends.


class RoundSync(Sync):
    """One worker's learners: each takes the gradient of its own slots, the program's optimizer takes its step, and
    after ``plan.every`` of them all learners become one: parameters as the plan's strategy says (``sync.local``),
    buffers and the optimizer's state the mean of all.

    A round is what is completed by all workers, adopted, or done again from its beginning: between two exchanges a
    learner is on one worker alone, and between rounds all are equal, so that no learner dies with its worker. Where the
    plan has a quorum it may be completed by those that are left: they exchange again what they have, and the mean is
    over the learners that are there (``absent``: those that were not). Means are taken along the canonical tree over
    learners, and in ``exact`` mode a learner's gradient along that over its slots: who carries which learner does not
    show. (Averaging momenta as well as parameters: Yu, Jin and Yang, ICML 2019, arXiv 1905.03817.)

    Where the plan has what is sent rounded (``sync.sending``) numbers travel as ways from the round's beginning. In
    ``fast`` mode each worker rounds the sum of its learners then, so the number of workers shows.
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
        self._own: AllReduce = (
            ExactAllReduce(replica, alone, self._slots) if self.exact else FastAllReduce(replica, alone)
        )
        self._learners = Learners(replica, keeps_moments=plan.moments == "mean")
        self._strategy = strategy_of(plan, replica.params, self.group, mode)
        self._strategy.seed = seed
        self._reducer: ExactReducer | EncodedReducer | None = None
        self._rounding = plan.send != "whole"
        self._entries: list[StateEntry] = []  # of the optimizer's state, that it sums beside parameters and buffers
        self._sums = [0.0] * len(STATISTICS)
        self._starts = True
        self._local_steps = 0  # of this round, that all learners here have taken
        self._due = False  # a mix, before the next pass
        self._mixing_s = 0.0
        self._owes_step = False
        self._carried: list[int] = []
        self._counted = 0.0  # the part of the round that this worker's learners are
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
        self._own.begin(self._within(share), starts_step=self._starts)
        self._starts = share.ends_update

    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        self._own.wants_statistics = self.wants_statistics
        self._own.backward(loss, self._within(share))
        if share.ends_update:
            parts = self._own.statistics.parts
            own = [parts.get(name, 0.0) * share.counts for name in STATISTICS]
            self._sums = [a + b for a, b in zip(self._sums, own, strict=True)]
            self._counted += share.counts
        if share.ends_local_step:
            self._local_steps += 1
            self._due = self.plan.mixes and self._local_steps % self.plan.mix == 0
        self._owes_step = share.ends_step

    def _mix(self) -> None:
        """Raises ``GroupBroken``."""
        started = time.perf_counter()
        self._strategy.mix(self._learners.values(self._carried), self._local_steps // self.plan.mix - 1)
        self._mixing_s += time.perf_counter() - started

    def _within(self, share: BatchSlice) -> BatchSlice:
        """``share`` as the learner's own sums see it: they know its slots alone."""
        return replace(share, slot=share.slot - share.learner * self._slots, ends_step=share.ends_update)

    # -- the exchange -------------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Raises ``GroupBroken``."""
        self._due = False
        started = time.perf_counter()
        self._strategy.finish()
        self._complete()
        self._mixing_s += time.perf_counter() - started
        parts, slots = self._contributions(self._carried), self._carried
        if self.plan.has_quorum or (self._rounding and not self.exact):
            # All as one part, in a slot that this worker has: its learners may be of an earlier deal than the group's,
            # and what is rounded travels once a worker then, not once a learner.
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
        """All learners have the same numbers from here on: an optimizer may have met a parameter with one of them only.

        Raises ``GroupBroken``.
        """
        if self.plan.moments == "fresh":
            return
        entries = agreed(self._learners.entries(self._carried), self.group)
        self._learners.complete(self._carried, entries)
        if entries != self._entries:
            self._entries, self._reducer = entries, None

    def _contributions(self, carried: Sequence[int]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """What each learner of this worker adds to the sums; the last one tells what the worker tells, too."""
        strategy, params = self._strategy, self.replica.params
        told = [*self.control, *self._sums, float(strategy.taken), float(strategy.taken_age * self.plan.mix)]
        for learner, numbers in self._learners.states(carried):
            ours = told if learner == carried[-1] else [0.0] * len(told)
            here = self._here(learner, last=learner == carried[-1])
            tail = torch.tensor([*ours, *here, 0.0], device=params[0].device)
            tail[-1] = squared_delta(numbers[: len(params)], self._learners.begun)
            if self._rounding:
                begun, codecs = self._learners.begun_numbers(self._entries), self._codecs_of(numbers)
                numbers = [
                    n.detach() - b if i in codecs else n for i, (n, b) in enumerate(zip(numbers, begun, strict=True))
                ]
            yield learner, [*numbers, tail]

    def _here(self, learner: int, *, last: bool) -> list[float]:
        """Where a round may end without some learners: a 1 at the place of this one, and the worker's part of it."""
        if not self.plan.has_quorum:
            return []
        return [*(float(each == learner) for each in range(self.plan.learners)), self._counted if last else 0.0]

    def _reducer_of(self, like: Sequence[torch.Tensor]) -> ExactReducer | EncodedReducer:
        """An optimizer has no state before its first step."""
        if self._reducer is None:
            like, learners = [value.detach() for value in like], self.plan.learners
            codecs = self._codecs_of(like[:-1])
            self._reducer = (
                EncodedReducer(like, learners, self.group, codecs, each=self.exact, hold=self._elastic)
                if self._rounding
                else ExactReducer(like, learners, self.group, hold=self._elastic)
            )
        return self._reducer

    def _codecs_of(self, numbers: Sequence[torch.Tensor]) -> dict[int, Codec]:
        return codecs_of(self.plan.send, numbers, len(self.replica.params), self._learners.buffers)

    def _adopt_sums(self, sums: Sequence[torch.Tensor]) -> None:
        *numbers, tail = sums
        *told, square = tail.tolist()
        count, part = self.plan.learners, 1.0
        if self.plan.has_quorum:
            *told, part = told
            told, here = told[:-count], told[-count:]
            self.absent = tuple(learner for learner, there in enumerate(here) if there == 0)
            count -= len(self.absent)
        *told, taken, taken_age = told
        params, execution = self.replica.params, [number / count for number in numbers]
        if self._rounding:
            begun = self._learners.begun_numbers(self._entries)
            for i in self._codecs_of(execution):
                execution[i] = begun[i] + execution[i]
        apart = distance(square / count, execution[: len(params)], self._learners.begun)
        self._learners.settle(execution, self._strategy.end)
        self.totals = told[: -len(STATISTICS)]
        self.statistics = step_statistics([each / (part or 1.0) for each in told[-len(STATISTICS) :]], None, apart)
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
        self._own.abandon()
        self._learners.restore()
        self._owes_step, self._starts, self._due = False, True, False

    def regroup(self, comms: Comms, over: Group | None = None) -> None:
        super().regroup(comms, over)
        if self._reducer is not None:
            self._reducer.regroup(self.group)
        self._strategy.regroup(self.group)

    def close(self) -> None:
        self._hook.remove()

    # -- what is saved ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._strategy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._strategy.load_state_dict(state)


def _sum(parts: Iterator[tuple[int, list[torch.Tensor]]]) -> list[torch.Tensor]:
    """Of what several learners add; a lone one's is not copied."""
    _, total = next(parts)
    copied = False
    for _, values in parts:
        if not copied:
            total, copied = [value.detach().clone() for value in total], True
        for own, value in zip(total, values, strict=True):
            own += value.detach()
    return total
