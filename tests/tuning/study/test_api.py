"""``import elastune`` in a user's own script, alone and as one of a launcher's workers."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.forked import ForkedProcess, run_script

import elastune
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.settings import RunSettings
from elastune.train.session import Session
from elastune.tuning.study.settings import StudySettings

SCRIPT = """
import json
import sys

import torch
from torch.utils.data import TensorDataset

import elastune


def train(session):
    model = torch.nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=session.config["lr"]))
    if sys.argv[-1] == "wrong" and session.rank == 1:
        session.backward(torch.ones(()))
    for _ in session.epochs(2):
        for (x,) in session.batches(TensorDataset(torch.arange(60.0).view(20, 3) / 60), batch_size=6):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        session.report(norm=model.weight.norm() if hasattr(model, "weight") else 0.0)


def space(trial):
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


if __name__ == "__main__":
    found = elastune.run(train, {"lr": 0.1}, workers=2, out=sys.argv[1])
    if sys.argv[1] == "alone":
        asked = {"objectives": {"norm": "min"}, "trials": 3, "sampler": "random"}
        study = elastune.tune(train, space, out=sys.argv[1] + "-study", **asked)
        print(json.dumps([found.sha256, found.workers, len(study.complete), study.pick().trial.config]))
"""


OUTLIVED = """
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import elastune


def train(session):
    model = torch.nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=session.config["lr"]))
    for _ in session.epochs(2):
        for (x,) in session.batches(TensorDataset(torch.arange(60.0).view(20, 3) / 60), batch_size=10):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            with Path("taken").open("a") as taken:
                print(os.getpid(), session.step, file=taken, flush=True)
            while not Path("go").exists():
                time.sleep(0.02)
        session.report(norm=model.weight.norm())


def space(trial):
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


if __name__ == "__main__":
    asked = {"objectives": {"norm": "min"}, "trials": 1, "sampler": "random", "resume": "again" in sys.argv}
    study = elastune.tune(train, space, out=Path.cwd().joinpath("there").as_uri(), grace_s=120.0, **asked)
    print(len(study.complete))
"""


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}


@pytest.mark.soak
def test_a_script_and_the_workers_of_a_launcher_reach_the_same(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)

    def start(name: str, *arguments: str, **env: str) -> ForkedProcess:
        with (tmp_path / name).open("wb") as said:
            return run_script(script, *arguments, out=said, err=said, **env)

    def launched(*arguments: str) -> list[ForkedProcess]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [start(f"rank{rank}", *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in (0, 1)]

    alone = subprocess.run(
        [sys.executable, str(script), "alone"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert alone.returncode == 0, alone.stderr
    sha256, workers, trials, config = json.loads(alone.stdout.splitlines()[-1])
    assert (workers, trials, list(config)) == (2, 3, ["lr"])

    for rank, process in enumerate(launched("launched")):
        assert process.wait(90) == 0, (tmp_path / f"rank{rank}").read_text()
    journal = (tmp_path / "launched" / "journal.jsonl").read_text().splitlines()
    end = json.loads(journal[-1])
    assert (end["kind"], end["workers"], end["sha256"]) == ("run_finished", 2, sha256)

    pair = launched("failing", "wrong")
    assert [process.wait(90) for process in pair] == [1, 1], "both raise JobFailed"
    told = (tmp_path / "rank1").read_text()
    assert "worker 1, user_error: session.backward belongs once into each training batch" in told
    assert "JobFailed: session.backward belongs once into each training batch" in told


def trains_nothing(session: Session) -> None:
    session.report(size=session.size)


def test_workers_and_other_means_go_together(cluster: LocalCluster, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"workers": 2},
        {"execution": ExecutionSettings(workers=2, mode="fast")},
        {"execution": ExecutionSettings(mode="fast"), "workers": 3},
    ]
    found = [
        elastune.run(trains_nothing, out=tmp_path / str(i), cluster=cluster, **each) for i, each in enumerate(asked)
    ]
    assert [run.workers for run in found] == [1, 2, 2, 3]
    assert [run.metrics["size"] for run in found] == [1, 2, 2, 3]
    execution = [
        json.loads((tmp_path / str(i) / "journal.jsonl").read_text().splitlines()[0])["execution"] for i in range(4)
    ]
    assert [(m["mode"], m["num_slots"]) for m in execution] == [("exact", 1), ("exact", 2), ("fast", 2), ("fast", 3)]


def trains_without_words(session: Session) -> None:
    model = torch.nn.Linear(3, 1)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_that_its_mechanism_does_not_take_starts_no_worker(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tensor divides layers that it knows"):
        elastune.run(
            trains_without_words, out=tmp_path / "run", execution=ExecutionSettings(mesh=Mesh(tensor=2), num_slots=4)
        )
    assert not (tmp_path / "run").exists()


def test_what_a_run_has_cost_is_told_where_a_price_is(cluster: LocalCluster, tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("time,kind,price\n0,any,6\n")
    asked: list[dict[str, Any]] = [{}, {"price_per_worker_hour": 2.0}, {"prices": prices}]
    found = [
        elastune.run(trains_nothing, out=tmp_path / str(i), cluster=cluster, **a).money for i, a in enumerate(asked)
    ]
    none, constant, table = found
    assert none is None
    assert constant is not None
    assert table is not None
    assert constant.worker_hours > 0
    assert (constant.cost, table.cost) == pytest.approx((2 * constant.worker_hours, 6 * table.worker_hours))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"price_per_worker_hour": 0.0}, "a price of a worker-hour must be above 0"),
        ({"price_per_worker_hour": math.nan}, "a price of a worker-hour must be above 0"),
        ({"price_per_worker_hour": 2.0, "prices": "prices.csv"}, "one price or a file of prices says"),
        ({"prices": "nowhere.csv"}, "a trace must be a readable text file"),
    ],
)
def test_prices_that_no_cost_can_be_made_of(asked: dict[str, Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "prices.csv").write_text("time,kind,price\n0,any,1\n")
    here = {name: tmp_path / value if name == "prices" else value for name, value in asked.items()}
    with pytest.raises(UserError, match=told):
        elastune.run(trains_nothing, out=tmp_path / "run", **here)
    with pytest.raises(UserError, match=told):
        elastune.tune(trains_nothing, lambda trial: {}, objectives={"cost": "min"}, trials=1, out=tmp_path, **here)
    assert not (tmp_path / "run").exists()


def test_functions_that_no_worker_could_import_are_refused() -> None:
    def inner(session: object) -> None: ...

    for function in (inner, lambda session: None, print, Path):
        with pytest.raises(UserError, match="able to import"):
            elastune.run(function)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="got the file a/mine.py.: 'from mine import train', and give that"):
        elastune.run("a/mine.py")  # type: ignore[arg-type]


def test_a_launcher_needs_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="one folder"):
        elastune.run(test_a_launcher_needs_one_folder)


@pytest.mark.parametrize("grace_s", [-1.0, math.nan, math.inf, 1e9])
def test_a_grace_is_a_time(grace_s: float, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="grace_s must be from 0 to a year"):
        elastune.run(trains_nothing, grace_s=grace_s, out=tmp_path)


def test_workers_do_not_outlive_the_owner_of_an_open_cluster(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LocalCluster"):
        elastune.run(trains_nothing, grace_s=5.0, out=tmp_path, cluster=cluster)


@pytest.mark.soak
def test_trials_outlive_a_script_whose_results_go_to_a_url(tmp_path: Path) -> None:
    script, taken, there = tmp_path / "mine.py", tmp_path / "taken", tmp_path / "there"
    script.write_text(OUTLIVED)
    said = tmp_path / "said"
    with said.open("wb") as file:
        first = run_script(script, out=file, err=file)
    try:
        deadline = time.monotonic() + 90
        while not taken.exists():
            assert time.monotonic() < deadline
            assert first.poll() is None, said.read_text()
            time.sleep(0.05)
    finally:
        first.kill()
        first.wait()
    (tmp_path / "go").touch()
    with said.open("wb") as file:
        again = run_script(script, "again", out=file, err=file).wait(90)
    assert (again, said.read_text().split()[-1]) == (0, "1"), said.read_text()
    steps = [line.split() for line in taken.read_text().splitlines()]
    assert (len({process for process, _ in steps}), len(steps)) == (1, 4)
    kinds = [json.loads(line)["kind"] for line in (there / "journal.jsonl").read_text().splitlines()]
    assert kinds.count("trial_adopted") == 1


OWN_WORDS = """
import argparse

import torch
from torch.utils.data import TensorDataset

import elastune

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()


def train(session):
    model = torch.nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=args.lr))
    for _ in session.epochs(2):
        for (x,) in session.batches(TensorDataset(torch.arange(60.0).view(20, 3) / 60), batch_size=6):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        session.report(lr=args.lr)


if __name__ == "__main__":
    print(elastune.run(train, out="out", resume=args.resume, max_steps=None if args.resume else 2).metrics)
"""


def test_a_scripts_own_resume_goes_on_and_other_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_WORDS)

    def said(*words: str) -> str:
        with (tmp_path / "said").open("wb") as file:
            run_script(tmp_path / "mine.py", *words, out=file, err=file).wait()
        return (tmp_path / "said").read_text()

    assert "'lr': 0.2" in said("--lr", "0.2")
    other = said("--lr", "0.3", "--resume")
    assert "a run resumes with the setting lr it was begun with (got 0.3, begun with 0.2): start the script" in other
    assert "'lr': 0.2" in said("--lr", "0.2", "--resume")


def nothing(session: Session) -> None: ...


def test_what_an_execution_leaves_open_is_decided_as_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastune.tuning.study import api

    recorded = ExecutionSettings(num_slots=6)
    monkeypatch.setattr(api, "execution_at_start", lambda folder: recorded)
    monkeypatch.setattr(api, "journaled_slots", lambda folder: recorded.num_slots)

    def spec(execution: ExecutionSettings | None, **settings: Any) -> ExecutionSettings:
        asked = RunSettings(execution=execution, **settings)
        return api._spec(asked, Program(tmp_path / "mine.py"), tmp_path, None).execution

    def trial(execution: ExecutionSettings | None, **settings: Any) -> ExecutionSettings:
        return api._trial_execution(StudySettings(execution=execution, **settings), tmp_path)

    half, two = ExecutionSettings(micro_batch=2), ExecutionSettings(num_slots=2)
    assert "num_slots" not in half.chosen
    assert two.chosen["num_slots"] == 2
    assert spec(ExecutionSettings(mode="fast"), workers=(1, 4)).num_slots == 4
    assert [spec(each, workers=(1, 4)).num_slots for each in (None, half, two)] == [4, 4, 2]
    assert [spec(each, resume=True).num_slots for each in (None, half, two)] == [6, 6, 2]
    assert spec(half, sync="local:learners=3,every=2").num_slots == 3
    assert spec(ExecutionSettings(workers=2)).workers == spec(ExecutionSettings(workers=2)).num_slots == 2
    assert spec(ExecutionSettings(mesh=Mesh(tensor=2))).workers == 2
    assert [trial(each, trial_workers=(1, 4)).num_slots for each in (None, half, two)] == [4, 4, 2]
    assert trial(half, trial_workers=(2, 4)).workers == 2
    assert [trial(each, resume=True).num_slots for each in (half, two)] == [6, 2]
    assert trial(None).mode == "fast"


def test_a_run_in_python_proves_its_first_step_unless_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastune.tuning.study import api

    proves: list[bool] = []

    def run_job(spec: RunSpec, **_: Any) -> None:
        proves.append(spec.proves)
        raise UserError("the test knows enough", 0, "end")

    monkeypatch.setattr(api, "run_job", run_job)
    for number, unchecked in enumerate((False, True)):
        with pytest.raises(UserError, match="knows enough"):
            elastune.run(nothing, workers=2, unchecked=unchecked, out=tmp_path / str(number))
    assert proves == [True, False]
