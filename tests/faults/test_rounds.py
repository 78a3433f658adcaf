"""Workers that train learners by themselves die in the midst of a round: it is done again, and nothing shows it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs

from elastune.core.journal.records import RoundsShortened, SyncChanged
from elastune.core.run import Adapt, Elastic, Program
from elastune.core.sync_plan import SyncPlan, SyncSchedule
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
STREAMING = "diloco:learners=4,every=4,fragments=2,delay=1"  # a fragment leaves after two steps
SPEC = {"sync": SyncPlan("local", learners=4, every=3)}  # rounds begin at steps 0, 3, ... 15, and 16 with the next pass


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Runs(cluster, tmp_path_factory.mktemp("undisturbed"), PROGRAM)(1, spec=SPEC)


@pytest.fixture
def runs(cluster: LocalCluster, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path, PROGRAM)


def same(ran: Ran, undisturbed: Ran) -> None:
    """Equal to the bit, every sample once, and reported alike."""
    assert ran.sha256 == undisturbed.sha256
    assert ran.ledger.exact, ran.ledger
    results = [[r for r in each.reports if "loss" in r] for each in (ran, undisturbed)]
    assert results[0] == results[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fault",
    [
        "kill 1 3 before",  # before its learners' first pass of a round
        "kill 2 9 scatter",  # in the exchange
        "kill 0 9 gather",  # when all have given what they have
        "kill 2 16 tail",  # before workers of the pass that is over have met
        # In the round that ends a pass, before its last optimizer step: the second.
        *soaked("kill 1 6 after", "kill 1 15 reduced", "kill 1 16 evaluation"),
    ],
)
def test_killed_at_every_place_of_a_round(runs: Runs, undisturbed: Ran, fault: str) -> None:
    ran = runs(3, faults=[fault], spec=SPEC, elastic=Elastic(low=1, high=3))
    same(ran, undisturbed)
    assert ran.lost == [int(fault.split()[1])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "sync",
    [
        "diloco:learners=4,every=3",
        "parameter_server:learners=4,every=4,staleness=2",
        "local:learners=4,every=3,send=int8",
        *soaked("gossip:learners=4,every=4", "averaging:learners=4,every=4,mix=2"),
    ],
)
def test_killed_where_learners_mix(runs: Runs, sync: str) -> None:
    """And two more workers come: they get what the strategy keeps."""
    how: dict[str, Any] = {"spec": {"sync": SyncPlan.parse(sync)}}
    ran = runs(2, faults=["kill 1 28 before"], resize=["12 3"], pause_s=0.2, elastic=Elastic(low=1, high=3), **how)
    same(ran, runs(1, **how))
    assert ran.lost == [1]
    assert max(len(r.members) for r in ran.regrouped) == 3


@pytest.mark.soak
def test_killed_while_a_fragment_is_under_way(runs: Runs) -> None:
    """Before a worker sends its part, before it sends the others theirs of the sum, and after all have adopted it."""
    how: dict[str, Any] = {"spec": {"sync": SyncPlan.parse("diloco:learners=4,every=6,fragments=2")}}
    faults = ["kill 1 6 scatter", "kill 2 22 gather", "kill 3 38 reduced"]
    ran = runs(4, faults=faults, resize=["12 4"], pause_s=0.1, elastic=Elastic(low=1, high=4), **how)
    same(ran, runs(1, **how))
    assert sorted(ran.lost) == [1, 2, 3]


def test_killed_where_nobody_waits_for_its_partner(runs: Runs) -> None:
    """In fast mode: no sample is lost, and who is left goes on; two more workers come."""
    how: dict[str, Any] = {"spec": {"sync": SyncPlan.parse("pair_averaging:learners=4,every=4")}, "mode": "fast"}
    ran = runs(2, faults=["kill 1 28 after"], resize=["12 3"], pause_s=0.2, elastic=Elastic(low=1, high=3), **how)
    assert ran.ledger.exact, ran.ledger
    assert ran.lost == [1]
    assert max(len(r.members) for r in ran.regrouped) == 3


def tour(names: Sequence[str]) -> list[str]:
    """A way on which every name comes right after every other one, once (Hierholzer)."""
    left = {name: [other for other in names if other != name] for name in names}
    way: list[str] = []
    stack = [names[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            way.append(stack.pop())
    return way[::-1]


@pytest.mark.soak
def test_every_strategy_takes_every_others_place(runs: Runs) -> None:
    """All pairs, two steps each, or a round in which what is sent late arrives, with two deaths and two changes of
    workers."""
    rounds = [f"{name}:learners=4,every=2" for name in ("local", "diloco", "averaging", "gossip", "pair_averaging")]
    late = {STREAMING: 4, "parameter_server:learners=4,every=4,staleness=1": 4}
    rounds += late
    begin, *others = tour(["allreduce", *rounds])
    assert len(set(pairwise([begin, *others]))) == len(others) == 56
    ends = list(accumulate(late.get(plan, 2) for plan in [begin, *others]))
    schedule = SyncSchedule.parse("; ".join(f"{at}={plan}" for at, plan in zip(ends, others, strict=False)))
    how: dict[str, Any] = {"spec": {"sync_schedule": schedule}, "epochs": -(-ends[-1] // 16)}
    faults, resizes = ["kill 1 20 before", "kill 0 34 scatter"], ["26 4", "44 2"]
    ran = runs(3, faults=faults, resize=resizes, pause_s=0.1, elastic=Elastic(low=1, high=4), **how)
    undisturbed = runs(1, **how)
    same(ran, undisturbed)
    assert sorted(ran.lost) == [0, 1]
    for each in (ran, undisturbed):
        changes = [record for record in each.records if isinstance(record, SyncChanged)]
        assert [(change.step, change.sync) for change in changes] == [(at, str(plan)) for at, plan in schedule.changes]


def random_changes(count: int, seed: int) -> tuple[SyncSchedule, dict[str, Any]]:
    """``count`` changes at random, of strategy, topology and size, and what the program is told of it; at most one of
    each every three steps, where rounds end."""
    draw = random.Random(seed)
    rounds = "local", "diloco", "averaging", "gossip", "pair_averaging", "parameter_server"
    plans = ["allreduce", STREAMING, *(f"{name}:learners=4,every=3" for name in rounds[:-1])]
    plans += ["parameter_server:learners=4,every=3,staleness=1"]
    topologies = ["star", "ring:chunk_kib=1", "tree", "binary_tree", "hierarchical", "native"]
    schedule, change, resize, at, now = list[str](), list[str](), list[str](), 0, "allreduce"
    while len(schedule) + len(change) + len(resize) < count:
        at += 3
        now = draw.choice([plan for plan in plans if plan != now])
        schedule.append(f"{at}={now}")
        if draw.random() < 0.3:
            change.append(f"{at} topology {draw.choice(topologies)}")
        if draw.random() < 0.15:
            resize.append(f"{at} {draw.randint(1, 4)}")
    results = {"samples": 960, "epochs": at // 15 + 2, "change": change, "resize": resize, "pause_s": 0.05}
    return SyncSchedule.parse("; ".join(schedule)), results


@pytest.mark.parametrize("count", [50, *soaked(200)])
def test_anything_changes_at_any_time(runs: Runs, count: int) -> None:
    schedule, result = random_changes(count, seed=200)
    spec = {"sync_schedule": schedule}
    ran = runs(2, spec=spec, elastic=Elastic(low=1, high=4), **result)
    same(ran, runs(1, spec=spec, **{**result, "resize": [], "change": [], "pause_s": 0.0}))
    assert len({len(record.members) for record in ran.regrouped}) > 1


@pytest.mark.soak
def test_the_program_and_a_policy_change_how_workers_agree(runs: Runs) -> None:
    """What the lines of step 5 ask for rides in step 6, and counts after it; in a round, after the next one."""
    sync = "local:learners=4,every=3"
    asked = runs(2, agree=[f"4 {sync}", "19 allreduce"], elastic=Elastic(low=1, high=4))
    changes = [record for record in asked.records if isinstance(record, SyncChanged)]
    assert [(each.step, each.why) for each in changes] == [(6, "session.set_sync"), (25, "session.set_sync")]
    same(asked, runs(1, spec={"sync_schedule": SyncSchedule.parse(f"6={sync}; 25=allreduce")}))
    policy = Adapt(policies=("sync_by_size:above=2,strategy=local,every=3",))  # as many learners as fit
    grown = runs(2, resize=["12 4"], pause_s=0.1, elastic=Elastic(low=1, high=4), spec={"adapt": policy})
    (change,) = [record for record in grown.records if isinstance(record, SyncChanged)]
    assert (change.sync, change.why) == (sync, "policy sync_by_size")
    same(grown, runs(1, spec={"sync_schedule": SyncSchedule.parse(f"{change.step}={sync}")}))


def test_other_settings_of_a_strategy_outlive_a_death(runs: Runs) -> None:
    """The momentum of the outer step goes on from what it was, for a worker that comes just then, too."""
    begin = {"sync": SyncPlan.parse("diloco:learners=4,every=3,outer_momentum=0.8")}
    agree = ["6 diloco:learners=4,every=4,outer_lr=0.4,outer_momentum=0.7"]
    more: dict[str, Any] = {"faults": ["kill 1 16 before"], "resize": ["9 4"], "pause_s": 0.1}
    ran = runs(3, spec=begin, agree=agree, elastic=Elastic(low=1, high=4), **more)
    undisturbed = runs(1, spec=begin, agree=agree)
    same(ran, undisturbed)
    assert ran.lost == [1]
    (change,) = [record for record in ran.records if isinstance(record, SyncChanged)]
    assert (change.sync, change.why) == (agree[0].removeprefix("6 "), "session.set_sync")
    anew = runs(1, spec={**begin, "sync_schedule": SyncSchedule.parse(f"{change.step}={change.sync}")})
    assert anew.sha256 == undisturbed.sha256, "whoever asks for it"


def test_rounds_that_a_pass_cuts_short_are_told_once(runs: Runs) -> None:
    """Passes have 16 steps."""
    ran = runs(2, spec={"sync": SyncPlan("local", learners=4, every=20)})
    results = [record for record in ran.records if isinstance(record, RoundsShortened)]
    assert results == [RoundsShortened("local:learners=4,every=20", 16)]
    same(ran, runs(1, spec={"sync": SyncPlan("local", learners=4, every=16)}))


def test_two_die_and_workers_are_more_and_fewer(runs: Runs, undisturbed: Ran) -> None:
    more: dict[str, Any] = {"resize": ["3 4", "25 2"], "pause_s": 0.2}
    ran = runs(2, faults=["kill 0 19 before", "kill 1 19 scatter"], spec=SPEC, elastic=Elastic(low=1, high=4), **more)
    same(ran, undisturbed)
    assert sorted(ran.lost) == [0, 1]
    assert max(len(r.members) for r in ran.regrouped) == 4
