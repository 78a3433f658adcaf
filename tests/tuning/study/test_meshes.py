"""Mechanism and mesh as parameters of a search: what follows from what, what is refused, who gets whole replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FixedTrial

from elastune import suggest_execution
from elastune.adapt.policies.library.registry import NO_POLICY
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import Record, TrialFinished, TrialReallocated, TrialStarted
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program
from elastune.parallel.mechanisms import registry
from elastune.parallel.mechanisms.base import Replicated
from elastune.report.export import to_csv
from elastune.report.overviews import gather_study
from elastune.report.study import failed_trials_table, front_table
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.program.load import load
from elastune.tuning.simulate.run import SurrogateModel, simulate
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.run import tune
from elastune.tuning.study.run_command import run_command
from elastune.tuning.study.trial_results import settings, system_defaults
from elastune.tuning.study.validate import check

PROGRAM = """
config = {"lr": 0.1, "batch_size": 100}
objectives = {"error": "min", "seconds": "min"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 1e-3, 1.0, log=True), "mechanism": "replicated",
            "mesh": trial.suggest_categorical("mesh", ["data=1", "data=2", "shard=2", "data=2,pipeline=2"])}

def surrogate(config, workers):
    return [(10.0 / workers, {"error": config["lr"] + 1 / epoch}) for epoch in range(1, 6)]
"""
SHARED = (
    PROGRAM.replace('"mechanism": "replicated",', "}").partition('            "mesh"')[0]
    + "\n\n"
    + (PROGRAM[PROGRAM.index("def surrogate") :])
)


class Anything(Replicated):
    """Accepts any mesh: nothing is trained here."""

    def check(self, execution: ExecutionSettings, mesh: Mesh) -> None:
        pass


@pytest.fixture
def mechanisms(monkeypatch: pytest.MonkeyPatch) -> None:
    """All names are known, whatever is installed."""
    for word in ("zero", "sharded", "tensor", "pipeline", "deepspeed"):
        monkeypatch.setitem(registry.MECHANISMS, word, Anything())  # type: ignore[index]


def studied(program: Program, out: Path, **changes: Any) -> list[Record]:
    surrogate = load(program).surrogate
    assert surrogate is not None
    simulate(StudyRequest(program, out, **{"sampler": "random", "workers": 4, **changes}), SurrogateModel(surrogate))
    return [entry.record for entry in read(out / "journal.jsonl")]


def test_what_cannot_run_is_infeasible_with_its_reason_and_never_started(program: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = studied(program(PROGRAM), out, trials=16)
    meshes = {r.trial: r.execution["mesh"] for r in told if isinstance(r, TrialStarted)}
    ended = {r.trial: r for r in told if isinstance(r, TrialFinished)}
    assert set(meshes.values()) == {"data=1", "data=2", "shard=2", "data=2,pipeline=2"}
    assert meshes.keys() == ended.keys()
    for trial, mesh in meshes.items():
        if mesh.startswith("data") and "pipeline" not in mesh:
            assert (ended[trial].state, ended[trial].run is None) == ("complete", False)
        else:
            assert (ended[trial].state, ended[trial].run, ended[trial].seconds) == ("infeasible", None, 0.0)
            axis = "shard" if "shard" in mesh else "pipeline"
            assert ended[trial].reason.startswith(f"refused: workers along {axis} need a mechanism")
    study = Study.load(out)
    front = study.front()
    assert {trial.execution["mesh"] for trial in front} <= {"data=1", "data=2"}
    story = gather_study(read(out / "journal.jsonl"))
    assert story is not None
    shown = front_table(story, [trial.number for trial in front])
    cells = [row[shown.header.index("mechanism")] for row in shown.rows]
    assert cells == [f"replicated, {t.execution['mesh']}" for t in sorted(front, key=lambda t: t.values["error"])]
    assert all("refused" in row[-1] for row in failed_trials_table(story).rows)
    assert "execution.mesh" in to_csv(study).splitlines()[0]
    assert "--mesh" in study.pick().command


def test_a_space_of_which_nothing_can_run_is_refused(program: Any, tmp_path: Path) -> None:
    hopeless = program(
        PROGRAM.replace('["data=1", "data=2", "shard=2", "data=2,pipeline=2"]', '["shard=2", "shard=4"]')
    )
    with pytest.raises(UserError, match="workers along shard"):
        examined(StudyRequest(hopeless, tmp_path / "out", trials=2, workers=4))
    wide = program(PROGRAM.replace('"data=2,pipeline=2"', '"data=8"'))
    with pytest.raises(UserError, match="from 1 to the study's 4"):
        examined(StudyRequest(wide, tmp_path / "out", trials=2, workers=4))
    for mesh, expected in (("wide=2", "axes of a mesh"), (3, "must be a text")):
        wrong = program(PROGRAM.replace('"data=2,pipeline=2"', repr(mesh)))
        with pytest.raises(UserError, match=expected):
            examined(StudyRequest(wrong, tmp_path / "out", trials=2, workers=4))
    assert not (tmp_path / "out").exists()


def examined(asked: StudyRequest) -> None:
    check(replace(asked, simulated=True))


def chosen(base: ExecutionSettings, **own: Any) -> ExecutionSettings:
    """A trial's means, where the space has set ``own``."""
    values = {**system_defaults(base, own), **own}
    assert values["policy"] == NO_POLICY
    return settings(values, {}, base, capacity=8)[1]


def test_what_a_space_leaves_out_follows_from_what_it_sets(mechanisms: None) -> None:
    assert chosen(ExecutionSettings(), mesh="data=2,shard=2").mechanism == "zero"
    assert chosen(ExecutionSettings(), mesh="data=2,shard=2").workers == 4
    assert chosen(ExecutionSettings(mechanism="sharded"), mesh="shard=2").mechanism == "sharded"
    assert chosen(ExecutionSettings(mechanism="sharded"), mesh="tensor=2").mechanism == "tensor"
    tensor = ExecutionSettings(mesh=Mesh(tensor=2), virtual_tensor=8)
    assert chosen(tensor, mesh="tensor=4").virtual_tensor == 8
    assert chosen(tensor, mesh="data=2").virtual_tensor == 8
    assert chosen(tensor, mechanism="zero", mesh="shard=2").virtual_tensor == 1
    assert chosen(ExecutionSettings(), mechanism="tensor", mesh="tensor=2").virtual_tensor == 4
    piped = ExecutionSettings(mesh=Mesh(pipeline=2), schedule="gpipe")
    assert chosen(piped, mesh="pipeline=4").schedule == "gpipe"
    assert chosen(piped, mechanism="zero", mesh="shard=4").schedule == "1f1b"
    assert chosen(ExecutionSettings(mechanism="zero", copies=2), mechanism="replicated").copies is None
    assert chosen(ExecutionSettings(), mechanism="deepspeed", zero_stage=3).zero_stage == 3
    assert chosen(ExecutionSettings(mechanism="zero", offload=True), mechanism="sharded").offload
    foreign = chosen(ExecutionSettings(mechanism="zero", copies=2, offload=True), mechanism="deepspeed", mode="fast")
    assert (foreign.copies, foreign.offload) == (None, False)
    assert chosen(ExecutionSettings(mechanism="deepspeed", zero_stage=1), mechanism="horovod").zero_stage is None
    assert chosen(ExecutionSettings(mesh=Mesh(data=4))).first_mesh == Mesh(data=4)
    assert chosen(ExecutionSettings(mesh=Mesh(data=4)), workers=2).first_mesh == Mesh(data=2)


def test_a_space_asks_for_what_a_mechanism_knows(mechanisms: None) -> None:
    asked = {
        "mechanisms": ["zero", "tensor + zero", "pipeline", "deepspeed", "replicated"],
        "meshes": ["data=4", "shard=4", "data=2,tensor=2", "pipeline=4"],
        "micro_batches": [None, 8],
        "copies": [1, 2],
        "virtual_tensor": [4, 8],
        "schedules": ["1f1b", "gpipe"],
        "zero_stages": [1, 3],
    }

    def found(**params: Any) -> dict[str, Any]:
        return suggest_execution(FixedTrial({"micro_batch": 8, **params}), **asked)

    assert found(mechanism="replicated") == {"mechanism": "replicated", "mesh": "data=4", "micro_batch": 8}
    zero = {"mechanism": "zero", "mesh of zero": "shard=4", "copies": 2}
    assert found(**zero) == {"mechanism": "zero", "mesh": "shard=4", "micro_batch": 8, "copies": 2}
    both = {"mechanism": "tensor+zero", "mesh of tensor+zero": "data=2,tensor=2", "copies": 1, "virtual_tensor": 8}
    assert set(found(**both)) == {"mechanism", "mesh", "micro_batch", "copies", "virtual_tensor"}
    pipe = {"mechanism": "pipeline", "mesh of pipeline": "pipeline=4", "copies": 1, "schedule": "gpipe"}
    assert found(**pipe)["schedule"] == "gpipe"
    deep = {"mechanism": "deepspeed", "mesh of deepspeed": "shard=4", "zero_stage": 3}
    assert set(found(**deep)) == {"mechanism", "mesh", "micro_batch", "zero_stage"}
    assert suggest_execution(FixedTrial({"mesh": "shard=4"}), meshes=["data=4", "shard=4"]) == {"mesh": "shard=4"}


def test_a_space_asks_how_gradients_travel_where_they_may_be_rounded() -> None:
    asked = {"modes": ["exact", "fast"], "compressions": ["none", "int8"]}
    fast = suggest_execution(FixedTrial({"mode": "fast", "compress": "int8"}), **asked)
    assert chosen(ExecutionSettings(), **fast).compress == "int8"
    assert suggest_execution(FixedTrial({"mode": "exact"}), **asked) == {"mode": "exact"}
    assert chosen(ExecutionSettings(mode="fast", compress="int8")).compress == "int8"
    assert chosen(ExecutionSettings(mode="fast", compress="int8"), compress="none").compress is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compressions": ["zip"]}, "one of none, bf16"),
        ({"meshes": ["data=2"], "workers": (1, 2)}, "give workers or meshes"),
        ({"meshes": ["shard=2"], "mechanisms": ["replicated"]}, "fit one of the meshes"),
        ({"meshes": ["wide=2"]}, "axes of a mesh"),
        ({"meshes": ["data=2", "data=2"]}, "without repetitions"),
        ({"mechanisms": ["zero+sharded"]}, "a mechanism has one of replicated, zero and sharded"),
        ({"mechanisms": ["magic"]}, "mechanism must be known"),
    ],
)
def test_a_choice_of_means_is_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        suggest_execution(FixedTrial({"workers": 1, "mesh": "data=2"}), **options)


def test_only_whole_replicas_are_dealt_out(program: Any, tmp_path: Path, mechanisms: None) -> None:
    execution = ExecutionSettings(mode="fast", mesh=Mesh(tensor=2), num_slots=8)
    shared = {"execution": execution, "workers": 9, "trial_workers": (2, 8), "trials": 10, "stopping": "asha"}
    told = studied(program(SHARED), tmp_path / "out", **shared)
    begun = [r.execution for r in told if isinstance(r, TrialStarted)]
    moved = [r.after for r in told if isinstance(r, TrialReallocated)]
    assert {execution["workers"] for execution in begun} | set(moved) <= {2, 4, 6, 8}
    assert moved
    assert all(Mesh.parse(execution["mesh"]) == Mesh(data=execution["workers"] // 2, tensor=2) for execution in begun)
    for low, high in ((1, 4), (2, 5)):
        with pytest.raises(UserError, match="whole replicas of 2 workers"):
            examined(
                StudyRequest(
                    program(SHARED),
                    tmp_path / "no",
                    trials=2,
                    workers=8,
                    execution=execution,
                    trial_workers=(low, high),
                )
            )


def test_a_command_names_the_mesh_and_what_goes_with_it() -> None:
    execution = ExecutionSettings(
        mesh=Mesh(data=2, tensor=2), mechanism="tensor+zero", copies=1, virtual_tensor=8
    ).to_json()
    command = run_command("mine.py", {}, execution)
    assert "--mesh data=2,tensor=2 --mechanism tensor+zero --copies 1 --virtual-tensor 8" in command
    assert "--workers" not in command
    assert "--mechanism zero --offload" in run_command(
        "mine.py", {}, ExecutionSettings(mechanism="zero", offload=True).to_json()
    )
    assert "--mechanism" not in run_command("mine.py", {}, ExecutionSettings(workers=2).to_json())


def test_a_trial_without_enough_memory_is_infeasible_with_the_bytes_it_wanted(
    program: Any, tmp_path: Path, cluster: LocalCluster
) -> None:
    """The kernel refuses, as on a machine that has no more; the other worker of the trial does not wait for ever."""
    execution = ExecutionSettings(mesh=Mesh(shard=2), num_slots=2)
    objectives = {"loss": "min"}
    asked = StudyRequest(
        program(GREEDY),
        tmp_path / "out",
        objectives=objectives,
        sampler="grid",
        trials=2,
        workers=2,
        execution=execution,
    )
    tune(asked, cluster=cluster)
    told = [entry.record for entry in read(tmp_path / "out" / "journal.jsonl")]
    widths = {r.trial: r.config["width"] for r in told if isinstance(r, TrialStarted)}
    ended = {widths[r.trial]: r for r in told if isinstance(r, TrialFinished)}
    assert ended[8].state == "complete"
    assert ended[1 << 22].state == "infeasible"
    assert "wanted 1 GiB more (1,073,741,824 bytes)" in ended[1 << 22].reason


GREEDY = """
import resource
import torch

config = {"width": 8}

def space(trial):
    return {"width": trial.suggest_categorical("width", [8, 1 << 22])}

def train(session):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), resource.RLIM_INFINITY))
    width = session.config["width"]
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.Linear(width, 1))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.ones(8, 64))
    for _ in session.epochs(1):
        for (x,) in session.batches(data, batch_size=8):
            loss = model(x).square().mean()
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        session.report(loss=float(loss.detach()))
"""
