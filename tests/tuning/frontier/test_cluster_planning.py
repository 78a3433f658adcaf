"""What of a request becomes the model of a search: what is told, what was fitted, and what a sampler's kind says."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from elastune.core.journal.records import RunFinished, WorkerMemory
from elastune.core.mesh import Mesh
from elastune.core.plan.cluster_plan import CROWDING, RANDOM_SEARCH_FACTOR, ClusterPlan, SearchModel
from elastune.core.run import Program
from elastune.train.rehearsal import ProgramSize
from elastune.tuning.cluster_plan.find_plan import (
    PlanRequest,
    command_of,
    plan_cluster,
    program_facts,
    search_command_of,
    search_of,
    trials_note,
)

SIZE = ProgramSize(100, 16, 3, 1e6, 100.0, 100.0, 0.0, 1000, 1000, 2000, 3, 1.0, fake=True)


def searched(**more: Any) -> SearchModel:
    request = PlanRequest(program=Program(Path("p.py")), nodes=4, runs=20, link_gbit_s=8.0, calibrate_s=0.0, **more)
    return search_of(request, SIZE, 0.0, beside_s=2.5)


def test_a_sampler_that_learns_nothing_loses_nothing() -> None:
    for name in ("random", "grid"):
        told = searched(sampler=name)
        assert (told.crowding, told.crowding_within, told.generation, told.blind) == (0.0, None, 0, math.inf)
    assert told.beside_s == 2.5


def test_a_genetic_search_that_waits_has_its_generations() -> None:
    told = searched(sampler="genetic:demes=2,population=4,steady=0")
    assert (told.generation, told.crowding, told.crowding_within) == (8, 0.0, None)


@pytest.mark.parametrize("name", ["auto", "tpe", "genetic"])
def test_what_learns_all_the_time_is_taken_for_tpe(name: str) -> None:
    told = searched(sampler=name)
    assert (told.crowding, told.crowding_within) == CROWDING[False]
    assert (told.generation, told.blind) == (0, RANDOM_SEARCH_FACTOR)


def test_the_search_s_command_names_the_sampler_that_was_asked_for() -> None:
    plan = ClusterPlan(2, Mesh(), False, 16, 16, 1.0, (0.5, 2.0), 10.0, (5.0, 20.0), 1.0, 100.0, 1.0, ("compute", 1.0))
    told = (plan, Program(Path("p.py")), {}, 0, 16)
    assert "--sampler" not in search_command_of(*told, searched())
    assert "--trials 20 --sampler random" in search_command_of(*told, searched(sampler="random"), "random")


def test_commands_end_with_the_programs_own_arguments() -> None:
    plan = ClusterPlan(2, Mesh(), False, 16, 16, 1.0, (0.5, 2.0), 10.0, (5.0, 20.0), 1.0, 100.0, 1.0, ("compute", 1.0))
    program = Program(Path("p.py"), arguments=("--data", "my photos"))
    for command in (
        command_of(plan, program, {}, 0, 16, where="--cluster ray"),
        search_command_of(plan, program, {}, 0, 16, searched(), where="--cluster ray"),
    ):
        assert command.endswith(" --cluster ray -- --data 'my photos'")


def test_what_the_space_chooses_is_left_out_of_the_search_s_command() -> None:
    plan = ClusterPlan(2, Mesh(), False, 32, 16, 1.0, (0.5, 2.0), 10.0, (5.0, 20.0), 1.0, 100.0, 1.0, ("compute", 1.0))
    told = (plan, Program(Path("p.py")), {"lr": 0.5, "decay": 0.1}, 0, 16)
    assert "--set lr=0.5 --set decay=0.1 --set batch_size=32" in search_command_of(*told, searched())
    free = search_command_of(*told, searched(), chosen=("batch_size", "lr"))
    assert "--set decay=0.1 --seed" in free
    assert "batch_size" not in free


def test_more_trials_than_runs_are_explained_by_what_was_declared_or_simulated() -> None:
    plan = ClusterPlan(2, Mesh(), False, 16, 16, 1.0, (0.5, 2.0), 10.0, (5.0, 20.0), 1.0, 100.0, 1.0, ("compute", 1.0))
    assert trials_note(plan, searched(sampler="random")) == ""
    assert "costs 50.0% more trainings (as you said)" in trials_note(plan, searched(crowding=0.5))
    assert "(80 % of simulated studies 4.8% to 11.9%)" in trials_note(plan, searched())


def test_a_program_s_file_says_what_commands_can_say(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("config = {'batch_size': 8, 'lr': 1.0}\n" + TRAIN)
    facts = program_facts(Program(tmp_path / "p.py"), {"lr": 0.1})
    assert (facts.batch_settable, facts.chosen) == (True, ())
    assert facts.lacks.startswith("def space(trial): return ")
    space = "def space(trial):\n    return {'lr': trial.suggest_float('lr', 0.1, 1.0)}\n"
    (tmp_path / "q.py").write_text("objectives = {'loss': 'min'}\n" + TRAIN + space)
    facts = program_facts(Program(tmp_path / "q.py"), {})
    assert (facts.batch_settable, facts.lacks, facts.chosen) == (False, "", ("lr",))


TRAIN = "def train(session): ...\n"


def test_probes_run_on_the_cluster_that_is_named_and_none_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.py").write_text(TRAIN)
    there, asked = object(), list[tuple[Any, str, int]]()

    def run(spec: Any, cluster: Any) -> RunFinished:
        asked.append((cluster, spec.execution.device, spec.execution.workers))
        told = [WorkerMemory(0, 1000, 1000, 2000, 0, 0, 10**8)]
        return RunFinished("0" * 64, spec.execution.workers, 12, 192, 3.0, {}, step_s=0.25, memory=told)

    def nothing(*asked: object, **also: object) -> None:
        raise AssertionError("something ran on this machine")

    monkeypatch.setattr("elastune.tuning.cluster_plan.find_plan.rehearse_apart", lambda *asked: SIZE)
    monkeypatch.setattr("elastune.tuning.cluster_plan.probes.LocalCluster", nothing)
    monkeypatch.setattr("elastune.tuning.cluster_plan.probes.run_job", run)
    monkeypatch.setattr("elastune.tuning.cluster_plan.find_plan.opened", lambda cluster, room: nullcontext(cluster))
    request = PlanRequest(
        program=Program(tmp_path / "p.py"),
        nodes=4,
        workers_per_node=2,
        runs=20,
        link_gbit_s=8.0,
        calibrate_s=0.0,
        noise_scale=1.0,
        cluster=there,  # type: ignore[arg-type]
        out=tmp_path / "out",
        device="l4",
        probe=True,
    )
    found = plan_cluster(request)
    assert {each[:2] for each in asked} == {(there, "cuda")}
    assert {workers for _, _, workers in asked} == {1, 2}, "one node has room for two"
    assert found.probed["data=1, 16 samples a pass"] == 0.25
    assert found.worker_bytes == pytest.approx(24e9 - found.beside_bytes)
    assert found.unmeasured == ""
