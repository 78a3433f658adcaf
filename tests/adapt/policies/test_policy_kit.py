"""The kit itself: it passes what is right, and finds what is wrong; and the example of a policy of one's own."""

from __future__ import annotations

import itertools
import math
import random
import re
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.adapt.policies.base import Limits, Policy, Run
from elastune.adapt.policies.host import PolicyEntry
from elastune.core.decisions import Decision
from elastune.testing.kits.policy import CALM, Measured, PolicyKit, SimulatedWorkers, decide, make_snapshot, moved

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "gns_policy.py"


class TestTheExample(PolicyKit):
    def make(self) -> Policy:
        made: Policy = runpy.run_path(str(EXAMPLE))["GNSPolicy"]()
        return made


def test_the_example_adds_workers_while_the_noise_scale_rises() -> None:
    crowd = SimulatedWorkers(1, lambda rank: [PolicyEntry("GNSPolicy", TestTheExample().make())], limits=Limits(1, 3))
    for gns in (math.nan, 5.0, 6.0, 6.0, 6.0, 5.0, 5.0, 7.0, 8.0, 9.0, 10.0, 11.0):
        crowd.step({"noise_scale": gns})
    assert [(step, decision.workers) for step, decision in crowd.decisions] == [(5, 2), (10, 3)]
    assert crowd.failures() == []


def test_the_policy_that_the_readme_prints_grows_to_the_bound_and_goes_on(tmp_path: Path) -> None:
    (printed,) = re.findall(r"```python\n(class GNSPolicy.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = tmp_path / "printed.py"
    program.write_text(f"import elastune\n\n\n{printed}")
    policy: Policy = runpy.run_path(str(program))["GNSPolicy"]()
    crowd = SimulatedWorkers(1, lambda rank: [PolicyEntry("GNSPolicy", policy)], limits=Limits(1, 3))
    for step in range(20):
        crowd.step({"noise_scale": math.nan if step == 0 else float(step)})
    assert crowd.failures() == [], "at the bound it is not switched off"
    assert [decision.workers for _, decision in crowd.decisions] == [2, 3]
    assert crowd.hosts[0].to_json()[0]["state"]["prev"] > 17.0, "it still looks"


class Bad(Policy):
    """One fault at a time."""

    calls: ClassVar[int] = 0

    def __init__(self, fault: str, rank: int = 0) -> None:
        self.fault = fault
        self.rank = rank
        self.count = 0

    def after_step(self, run: Run) -> None:
        self.count += 1
        Bad.calls += 1
        if self.fault == "outside":
            run.replace(run.size())
        elif self.fault == "NaN" and not run.loss() < math.inf:
            run.set_batch_size(int(run.grad_noise_scale()))
        elif self.fault == "rank":
            run.set_batch_size(8 + run.rank() + self.count % 2)
        elif self.fault == "forgets":  # what it decides by is no attribute of its own
            run.set_batch_size(8 + Bad.calls)
        elif self.fault == "restless":
            run.set_lr(0.1 + self.count)


class Kit(PolicyKit):
    """Not collected: its name does not begin with Test."""

    def __init__(self, fault: str = "", calm: Mapping[str, Measured] | None = CALM) -> None:
        self._fault = fault
        self.calm = calm  # type: ignore[misc]

    def make(self) -> Policy:
        return Bad(self._fault)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("outside", lambda kit: kit.test_it_asks_for_nothing_that_cannot_be(0, None)),
        ("outside", lambda kit: kit.test_it_asks_for_nothing_that_cannot_be(0, Limits(2, 2))),
        ("NaN", lambda kit: kit.test_it_survives_signals_that_are_no_use(math.nan)),
        ("NaN", lambda kit: kit.test_nothing_measured_is_survived()),
        ("rank", lambda kit: kit.test_it_asks_for_nothing_that_cannot_be(0, None)),
        ("forgets", lambda kit: kit.test_it_goes_on_from_its_state(0)),
        ("restless", lambda kit: kit.test_it_leaves_a_calm_run_alone()),
    ],
)
def test_the_kit_finds_faults(fault: str, test: Callable[[Kit], None]) -> None:
    with pytest.raises(AssertionError):
        test(Kit(fault))
    test(Kit())


def test_a_policy_that_never_does_anything_is_no_schedule() -> None:
    Kit("restless", calm=None).test_it_leaves_a_calm_run_alone()
    with pytest.raises(AssertionError):
        Kit(calm=None).test_it_leaves_a_calm_run_alone()


def test_one_hook_by_hand() -> None:
    assert decide(Bad("rank"), rank=1) == Decision(batch_size=10)
    assert make_snapshot({"a": 1.0, "b": (2.0, 0.5)}).signals["b"].error == 0.5


def test_a_decision_moves_the_snapshot() -> None:
    after = moved(make_snapshot(), Decision(workers=3, batch_size=128, lr=0.4, lr_factor=0.5, micro_batch=8))
    assert after == make_snapshot(workers=3, batch_size=128, lr=0.2, micro_batch=8)
    assert moved(make_snapshot(), Decision()) == make_snapshot()


def test_workers_that_disagree_change_nothing() -> None:
    crowd = SimulatedWorkers(2, lambda rank: [PolicyEntry("bad", Bad("rank"))])
    for _ in range(3):
        crowd.step()
    assert {verdict.outcome for verdict in crowd.verdicts} == {"disagreed"}
    assert crowd.snapshot.batch_size == 64
    assert crowd.decisions == []


class Talks(Policy):
    """Begins collectives in an order that its rank draws, takes their results in another, and notes them."""

    count: ClassVar[int] = 5

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.log: list[Any] = []

    def after_step(self, run: Run) -> None:
        rng = random.Random(f"{self.seed} {run.rank()} {run.step}")
        begun = {}
        for number in rng.sample(range(self.count), self.count):
            value = [run.rank() + 0.1 * number] * number
            name = f"c{number}"
            match number % 3:
                case 0:
                    begun[number] = run.allreduce_async(value, name=name)
                case 1:
                    begun[number] = run.broadcast_async(value, root=run.size() - 1, name=name)
                case _:
                    begun[number] = run.allgather_async(value[: run.rank()], name)
        results = {number: begun[number].result() for number in rng.sample(sorted(begun), self.count)}
        self.log = [results[number] for number in range(self.count)]
        run.set_batch_size(65 + run.step)


@settings(max_examples=30, deadline=None)
@given(workers=st.integers(1, 4), policies=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_policies_talk_in_any_order_on_any_worker(workers: int, policies: int, seed: int) -> None:
    crowd = SimulatedWorkers(workers, lambda rank: [PolicyEntry(f"p{n}", Talks(seed + n)) for n in range(policies)])
    for _ in itertools.repeat(None, 3):
        crowd.step()
    crowd.exchange()
    assert not crowd.waiting
    assert crowd.exchanges == 3, "one brings them all"
    assert crowd.failures() == []
    states = [[entry["state"]["log"] for entry in host.to_json()] for host in crowd.hosts]
    assert all(state == states[0] for state in states)
    assert len(crowd.decisions) == policies, "of step 1; those of step 2 are about to be agreed on"
