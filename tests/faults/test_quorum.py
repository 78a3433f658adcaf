"""Workers die, freeze or lag in the midst of a round that needs only some of its learners: the others go on."""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, gone, together

from elastune.core.communication import Topology
from elastune.core.journal.records import Decided, LearnerLeftOut, RunFinished, WorkerGone
from elastune.core.run import Adapt, Elastic, Program
from elastune.core.slots import cut
from elastune.core.sync_plan import SyncPlan, SyncSchedule
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.rng import epoch_order

PROGRAMS = Path(__file__).parent / "programs"
BATCH, LEARNERS, EVERY = 32, 4, 3
PATIENT = Elastic(low=1, high=4, heartbeat_s=60.0)  # nobody is lost by silence


@pytest.fixture
def runs(cluster: LocalCluster, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path, Program(PROGRAMS / "apart.py"))


def plan(text: str) -> dict[str, Any]:
    """With all the time in the world, where ``text`` does not say otherwise: nobody is late on a busy machine."""
    grace = "" if "grace" in text else ",grace=300"
    return {"sync": SyncPlan.parse(f"{text},learners={LEARNERS},every={EVERY}{grace}")}


def ran(runs: Runs, file: Path, sync: str, faults: Sequence[str], **how: Any) -> Ran:
    elastic = how.pop("elastic", PATIENT)
    spec = plan(sync) | ({"adapt": how.pop("adapt")} if "adapt" in how else {})
    result = runs(4, mode="fast", spec=spec, faults=list(faults), file=str(file), elastic=elastic, **how)
    assert isinstance(result.outcome, RunFinished), result.outcome
    assert result.ledger.exact, result.ledger
    return result


def left_out(found: Ran) -> dict[int, list[int]]:
    """Learners by the step before the round that ended without them."""
    results: dict[int, list[int]] = {}
    for record in found.records:
        if isinstance(record, LearnerLeftOut):
            results.setdefault(record.first_step - 1, []).append(record.learner)
    return results


def reference(sync: SyncPlan, missing: Mapping[int, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Plain PyTorch: each learner for itself, then the mean over those that are not ``missing`` in the round that
    begins after so many steps."""
    program = runpy.run_path(str(PROGRAMS / "apart.py"))
    x, y = program["samples"]()
    model = program["network"]()
    names, begun = [name for name, _ in model.named_parameters()], [p.detach().clone() for p in model.parameters()]
    speeds = [torch.zeros_like(p) for p in begun]
    outer = [torch.zeros_like(p) for p in begun]
    batches = len(x) // BATCH
    for first in range(0, 2 * batches, EVERY):
        ends = []
        for learner in range(LEARNERS):
            net = program["network"]()
            optimizer = program["optimizer_of"](net)
            for p, value, speed in zip(net.parameters(), begun, speeds, strict=True):
                p.data = value.clone()
                if first:
                    optimizer.state[p] = {"momentum_buffer": speed.clone()}
            for step in range(first, first + EVERY):
                order = epoch_order(len(x), 3, step // batches)
                places = order[step % batches * BATCH :][:BATCH][slice(*_ends(cut(BATCH, LEARNERS)[learner]))]
                optimizer.zero_grad()
                ((net(x[places]) - y[places]) ** 2).mean().backward()
                optimizer.step()
            moments = [optimizer.state[p]["momentum_buffer"] for p in net.parameters()]
            ends.append(([p.detach() for p in net.parameters()], moments))
        there = [end for learner, end in enumerate(ends) if learner not in missing.get(first, ())]
        execution, speeds = [
            [sum(row) / len(there) for row in zip(*part, strict=True)] for part in zip(*there, strict=True)
        ]
        if sync.strategy == "diloco":
            for i, (old, mean) in enumerate(zip(begun, execution, strict=True)):
                outer[i] = sync.outer_momentum * outer[i] + (old - mean)
                execution[i] = old - sync.outer_lr * ((old - mean) + sync.outer_momentum * outer[i])
        begun = execution
    return dict(zip(names, begun, strict=True))


def _ends(run: range) -> tuple[int, int]:
    return run.start, run.stop


def same(file: Path, sync: str, missing: Mapping[int, Sequence[int]]) -> None:
    wanted, result = reference(plan(sync)["sync"], missing), load_file(file)
    gaps = {name: float((result[name] - value).abs().max()) for name, value in wanted.items()}
    assert max(gaps.values()) < 1e-6, gaps


@pytest.mark.parametrize("sync", ["diloco:quorum=3", *soaked("local:quorum=3")])
def test_a_death_in_mid_round_costs_the_others_nothing(runs: Runs, tmp_path: Path, sync: str) -> None:
    """The mean is over those that are left, as a loop in plain PyTorch has it; policies see that one is missing."""
    run_result = ran(runs, tmp_path / "end", sync, ["kill 2 3 amid"], adapt=Adapt(policies=("Counting",)))
    assert [(r.cause.step, r.outcome) for r in run_result.records if isinstance(r, Decided)] == [(6, "applied")]
    assert run_result.lost == [2]
    assert left_out(run_result) == {3: [2]}
    assert [r.worker for r in run_result.records if isinstance(r, LearnerLeftOut)] == [2]
    assert sum(each.discarded for each in run_result.regrouped) == 0
    assert run_result.ledger.epochs[0].left_out == EVERY * BATCH // LEARNERS
    same(tmp_path / "end", sync, {3: [2]})


@pytest.mark.parametrize("place", ["9 scatter", "9 gather", *soaked("6 before")])
def test_wherever_it_dies_all_agree_who_is_in_the_mean(runs: Runs, tmp_path: Path, place: str) -> None:
    """One that has the last round's mean and dies before its next step is left out of that, if others wait for it
    still."""
    run_result = ran(runs, tmp_path / "end", "diloco:quorum=2", [f"kill 1 {place}"])
    assert run_result.lost == [1]
    assert sum(each.discarded for each in run_result.regrouped) == 0
    step = int(place.split()[0])
    assert set(left_out(run_result)) <= {step, step - EVERY if place.endswith("before") else step}
    same(tmp_path / "end", "diloco:quorum=2", left_out(run_result))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", ["before", *soaked("after")])
def test_a_frozen_worker_stalls_nobody_for_longer_than_the_grace(runs: Runs, tmp_path: Path, place: str) -> None:
    run_result = ran(runs, tmp_path / "end", "diloco:quorum=3,grace=8", [f"stop 1 6 {place}"])
    (late,) = [record for record in run_result.records if isinstance(record, WorkerGone) and record.how == "lost"]
    assert late.worker == 1
    assert "(grace)" in late.why  # too late, or silent for too long: what is first depends on the others' pace
    assert left_out(run_result) == {6: [1]}
    assert sum(each.discarded for each in run_result.regrouped) == 0
    same(tmp_path / "end", "diloco:quorum=3,grace=8", {6: [1]})


@pytest.mark.soak
def test_who_freezes_in_the_exchange_is_not_waited_for_until_its_heartbeats_are_missed(
    runs: Runs, tmp_path: Path
) -> None:
    run_result = ran(runs, tmp_path / "end", "diloco:quorum=3,grace=8", ["stop 1 6 scatter"])
    (late,) = [record for record in run_result.records if isinstance(record, WorkerGone) and record.how == "lost"]
    assert late.worker == 1
    assert "at the end of a round" in late.why
    assert left_out(run_result) == {6: [1]}
    same(tmp_path / "end", "diloco:quorum=3,grace=8", {6: [1]})


@pytest.mark.soak
def test_who_has_more_learners_than_the_others_is_not_late(runs: Runs, tmp_path: Path) -> None:
    """Two of three workers have a learner each, which is a quorum, 4.5 s before the third has trained its two."""
    spec = plan("local:quorum=2,grace=4")
    result = runs(3, mode="fast", spec=spec, file=str(tmp_path / "end"), elastic=PATIENT, first_s=1.5, epochs=1)
    assert isinstance(result.outcome, RunFinished), result.outcome
    assert (result.lost, left_out(result)) == ([], {})


def test_below_the_quorum_a_round_is_done_again(runs: Runs, tmp_path: Path) -> None:
    """Of two that die one may be left out before the other is known to be dead."""
    run_result = ran(runs, tmp_path / "end", "local:quorum=3", ["kill 1 3 after", "kill 2 3 after"])
    assert sorted(run_result.lost) == [1, 2]
    absent = left_out(run_result)
    assert all(len(each) == 1 for each in absent.values()), "three of four are the quorum"
    same(tmp_path / "end", "local:quorum=3", absent)


@pytest.mark.parametrize("topology", ["native", "ring"])
def test_who_had_not_begun_the_round_begins_it_with_the_learners_it_had(
    runs: Runs, tmp_path: Path, topology: str
) -> None:
    """Worker 0 is not done with a checkpoint when the others begin, and one of them dies. New routes are settled when
    the round is over: until then the others do not come to where that is done."""
    faults = ["nap 0 3 gathered", "kill 2 3 amid"]
    spec = {**plan("local:quorum=3"), "checkpoint_every_steps": EVERY}
    execution = {"topology": Topology.parse(topology)}
    result = runs(
        4, mode="fast", spec=spec, faults=faults, file=str(tmp_path / "end"), elastic=PATIENT, execution=execution
    )
    assert (result.lost, left_out(result)) == ([2], {3: [2]})
    assert result.ledger.exact
    assert sum(each.discarded for each in result.regrouped) == 0
    same(tmp_path / "end", "local:quorum=3", {3: [2]})


def test_strategies_with_and_without_a_quorum_take_each_others_place(runs: Runs, tmp_path: Path) -> None:
    first, last = plan("local:quorum=2")["sync"], plan("diloco:quorum=3")["sync"]
    schedule = SyncSchedule.parse(f"6=allreduce; 9={last}; 18=averaging:learners=4,every=3")
    faults = ["kill 3 3 amid", "kill 2 7 before", "kill 1 12 after", "kill 0 18 scatter"]
    more: dict[str, Any] = {"pause_s": 0.1, "slow_until": gone(0, 1, 2, 3)}
    spec = {"sync": first, "sync_schedule": schedule}
    result = runs(4, mode="fast", spec=spec, faults=faults, file=str(tmp_path / "end"), elastic=PATIENT, **more)
    assert isinstance(result.outcome, RunFinished), result.outcome
    assert sorted(result.lost) == [0, 1, 2, 3]
    assert result.ledger.exact, result.ledger
    assert left_out(result)[3] == [3]
    assert set(left_out(result)) <= {3, 12}  # 12: where the learners of the one that died there were no more than one


def test_others_come_while_rounds_end_without_some(runs: Runs, tmp_path: Path) -> None:
    faults = ["kill 3 3 after", "kill 0 6 after"]
    run_result = ran(runs, tmp_path / "end", "diloco:quorum=2", faults, pause_s=0.2, slow_until=together(4), epochs=2)
    assert sorted(run_result.lost) == [0, 3]
    assert sum(each.discarded for each in run_result.regrouped) == 0
    # Nobody is left out of a round that no other worker had begun. Of the one before it who has its mean may be.
    assert set(left_out(run_result)) <= {0, 3, 6}
    same(tmp_path / "end", "diloco:quorum=2", left_out(run_result))
