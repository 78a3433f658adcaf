"""An optimizer's step in two calls: the bits of one, and nobody sees two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastune.core.layout import UNIT, ParamBlock, Segment, Split
from elastune.parallel.mechanisms.owned.replica import SplitOptimizerStep
from elastune.parallel.mechanisms.owned.store import ParameterStore

SIZE = 3 * UNIT
OWN, COPIED = Segment(0, 0, UNIT), Segment(0, UNIT, SIZE)
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Counting(torch.optim.SGD):
    """One that is not torch's own, and counts its steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["count"] = self.state.get("count", 0) + 1
        super().step()


class Halves:
    """A parameter in two shards, of which the first is to be updated before the other."""

    def __init__(self, make: Make, *, own: set[Segment]) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.values = nn.Parameter(torch.randn(SIZE, generator=self.random))
        self.optimizer = make([self.values])
        self.store = ParameterStore(
            Split((ParamBlock("w", "w", ((0, SIZE),)),)), [self.values], self.optimizer, {self.values: "w"}
        )
        self.store.rebuild([0], [OWN, COPIED])
        self.between: list[torch.Tensor] = []
        first = SplitOptimizerStep(self.store)

        def after(*_: Any) -> None:
            self.between.append(self.values.detach().clone())
            first.finish()

        self.optimizer.register_step_pre_hook(lambda _, args, kwargs: first.begin(own, args, kwargs))
        self.optimizer.register_step_post_hook(after)

    def step(self, *closure: Callable[[], torch.Tensor]) -> None:
        self.store.give({0: [(Segment(0, 0, SIZE), torch.randn(SIZE, generator=self.random))]})
        self.optimizer.step(*closure)

    def updated(self, before: torch.Tensor) -> list[bool]:
        """Whether each shard was new when the first call was over."""
        now = self.between[-1]
        return [not torch.equal(before[s.start : s.stop], now[s.start : s.stop]) for s in (OWN, COPIED)]


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def counts(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Counting(params, lr=0.1)


@pytest.mark.parametrize("make", [adamw, momentum])
def test_the_bits_are_those_of_one_call(make: Make) -> None:
    at_once, in_two = Halves(make, own={OWN, COPIED}), Halves(make, own={OWN})
    for halves, expected in ((at_once, [True, True]), (in_two, [True, False])):
        schedule = torch.optim.lr_scheduler.StepLR(halves.optimizer, 1, 0.5)
        for _ in range(3):
            before = halves.values.detach().clone()
            halves.step()
            schedule.step()
            assert halves.updated(before) == expected
        assert all(shard.parameter.grad is not None for shard in halves.store.shards)
        assert len(halves.between) == 3
    assert torch.equal(at_once.values, in_two.values)


def test_who_may_see_two_calls_sees_one() -> None:
    hooked, counting, asked = (Halves(make, own={OWN}) for make in (adamw, counts, adamw))
    hooked.optimizer.register_step_post_hook(lambda *_: None)
    for halves, closure in ((hooked, []), (counting, []), (asked, [lambda: torch.zeros(())])):
        before = halves.values.detach().clone()
        halves.step(*closure)
        assert halves.updated(before) == [True, True]
    assert counting.optimizer.state["count"] == 1


@pytest.mark.parametrize("keeps", [functools.wraps, lambda _: lambda outer: outer], ids=["wraps", "plain"])
def test_a_step_that_somebody_has_wrapped_is_called_once(keeps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adamw([nn.Parameter(torch.zeros(1))])  # with torch's hooks around it
    inner, calls = torch.optim.AdamW.step, []

    @keeps(inner)
    def outer(*args: Any) -> Any:
        calls.append(args)
        return inner(*args)

    monkeypatch.setattr(torch.optim.AdamW, "step", outer)
    halves = Halves(adamw, own={OWN})
    before = halves.values.detach().clone()
    halves.step()
    assert all(halves.updated(before))
    assert len(calls) == 1
