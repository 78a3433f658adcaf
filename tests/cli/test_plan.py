"""``elastune plan`` from the command line."""

from __future__ import annotations

import html
import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.cli.documented import documented, unlike
from tests.cli.torchless import torchless

from elastune.cli.commands.plan import plan
from elastune.core.formatting import number
from elastune.core.plan.cluster_plan import CROWDING, RANDOM_SEARCH_FACTOR
from elastune.core.run import Program
from elastune.train.rehearsal import ProgramSize, rehearse_apart
from elastune.tuning.cluster_plan.find_plan import PLACEHOLDER


@pytest.fixture
def kept(finished_plan: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a plan, which stands in the one where the program is."""
    monkeypatch.chdir(finished_plan.parent)
    return finished_plan


def test_every_field_of_a_plan_is_documented(kept: Path) -> None:
    assert unlike(json.loads((kept / "said.json").read_text()), documented(plan)) == []


def test_a_plan_of_a_program_as_json(kept: Path) -> None:
    found = json.loads((kept / "said.json").read_text())
    assert found["kind"] == "plan"
    best = found["plans"][0]
    assert 1 <= best["workers"] <= 4
    assert best["interval_s"][0] <= best["seconds"] <= best["interval_s"][1]
    assert best["command"].startswith("elastune run linear.py --mode fast ")
    assert best["most_parameters"] > found["size"]["parameter_bytes"]
    assert set(found["reasons"]) == {"width", "data", "shard", "tensor", "pipeline"}
    assert set(found["gains"]) <= set(found["reasons"])
    assert found["size"]["batch_size"] == 16
    assert found["probed"]["data=1, 16 samples a pass"] > 0
    assert found["memory"].startswith("fits: ")
    assert found["worker_bytes"] == 2**30 - found["beside_bytes"], "what a process takes is no room for the program"
    assert len(found["measured"]) == 2
    for row in found["measured"]:
        assert row["failed"] == ""
        assert row["step_error"] == pytest.approx(row["step_s"] / row["measured_step_s"] - 1)
        assert row["memory_error"] == pytest.approx(row["memory_bytes"] / row["measured_memory_bytes"] - 1)
        low, high = row["step_interval_s"]
        assert row["within"] == (low <= row["measured_step_s"] <= high)
    assert (kept / "probe-1" / "journal.jsonl").exists()


def test_a_plan_that_was_kept_is_reported_and_explained(kept: Path, command_here: Any) -> None:
    found = json.loads((kept / "said.json").read_text())
    told = json.loads(command_here("report", "out", "--json").out)
    assert {name: told[name] for name in found} == found
    page = (kept / "report.html").read_text()
    for words in ("linear.py on 4 nodes of 1 worker", "Predicted, then measured", found["plans"][0]["search_command"]):
        assert html.escape(words) in page
    said = command_here("explain", "out").out
    assert "trainings at once x " in said
    assert "the next doubling of workers" in said
    best, own = found["plans"][0], found["size"]["batch_size"]
    times = number(best["batch"] / own, 3)
    assert f"batch: {best['batch']:,} samples in each training, {times} x the program's own" in said
    assert f"each with the program's own batch, would have {own * best['workers']:,}" in said
    assert "how many at once, mesh, batch and samples of a pass were found" in said
    assert " in the program; " in said
    assert "What such a split brings" in page
    assert said.count(" interval, ") == 2
    assert command_here("plan", "linear.py", "--nodes", 1, "--out", "out").err.count("must not be there yet") == 1


@pytest.mark.parametrize("command", ["report", "explain"])
def test_a_plan_is_read_without_torch(kept: Path, command: str) -> None:
    done = torchless(kept.parent, command, "out")
    assert done.returncode == 0, done.stderr


def test_the_commands_of_a_plan_run(kept: Path, command_here: Any) -> None:
    best = json.loads((kept / "said.json").read_text())["plans"][0]
    assert all(best[name].endswith(f" {PLACEHOLDER}") for name in ("command", "search_command"))
    here = (best[name].removesuffix(f" {PLACEHOLDER}") for name in ("command", "search_command"))
    one, all_of_it = map(shlex.split, here)
    assert command_here(*one[1:], "--out", "one").code == 0
    assert all_of_it[all_of_it.index("--workers") + 1] == str(best["workers"])
    told = int(all_of_it[all_of_it.index("--trials") + 1])
    assert told == math.ceil(8 * min(1 + CROWDING[False][0] * (best["width"] - 1), RANDOM_SEARCH_FACTOR))
    all_of_it[all_of_it.index("--trials") + 1] = "2"
    assert command_here(*all_of_it[1:], "--out", "two", "--epochs", "1").code == 0


def test_a_run_s_step_stands_beside_what_the_plan_predicts(kept: Path, command_here: Any) -> None:
    run = next(path.parent for path in sorted(kept.glob("probe-*/journal.jsonl")))
    told = json.loads(command_here("explain", run, "--plan", "out", "--json").out)
    (part,) = (each for each in told["parts"] if each["title"] == "Predicted and measured time")
    assert part["lines"][0].startswith("replicated, data=1, fast, batch 16: a step was measured at ")
    assert "(modelled): error " in part["lines"][0]
    assert "names the folder of a plan" in command_here("explain", run, "--plan", run).err


def test_a_study_that_is_begun_with_a_plan_explains_what_it_said(kept: Path, command_here: Any) -> None:
    study = ("tune", "linear.py", "--workers", 2, "--trials", 1, "--epochs", 1, "--plan", "out")
    assert "--trial-workers" in command_here(*study, "--out", "alone").err
    assert command_here(*study, "--trial-workers", "1:2", "--out", "shared").code == 0
    told = json.loads(command_here("explain", "shared", "--json").out)
    (part,) = (each for each in told["parts"] if each["title"] == "Predicted and measured time")
    assert part["lines"][0].startswith("At most ")
    assert "(modelled)" in part["lines"][0]
    assert any("the plan's model says" in line for line in part["lines"][1:])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes", 0), "--nodes"),
        (("--nodes", 70_000), "65,536"),
        (("--nodes", 1, "--gpus-per-node", 0), "--gpus-per-node"),
        (("--nodes", 1, "--memory", "much"), "--memory"),
        (("--nodes", 1, "--link", "fast"), "--link"),
        (("--nodes", 1, "--deadline", "soon"), "--deadline"),
        (("--nodes", 1, "--top", 0), "--top"),
        (("--nodes", 1, "--runs", 0), "--runs"),
        (("--nodes", 1, "--crowding", "nan"), "--crowding"),
        (("--nodes", 1, "--noise-scale", "-1"), "--noise-scale"),
        (("--nodes", 1, "--price", 0), "price"),
        (("--nodes", 1, "--variation", "-1"), "variation"),
        (("--nodes", 1, "--stopping", "pbt"), "early stopping"),
        (("--nodes", 1, "--mesh", "data=0"), "mesh"),
        (("--nodes", 1, "--measure", 101), "can be measured"),
        (("--nodes", 1, "--from", "nowhere"), "must have journals"),
    ],
)
def test_wrong_input_is_one_line(elastune: Any, options: tuple[object, ...], words: str) -> None:
    told = elastune("plan", "linear.py", *options)
    assert told.code == 2
    assert words in told.err
    assert told.err.count("\n") == 1


def test_a_mesh_that_does_not_divide_the_cluster_is_refused_before_anything_runs(elastune: Any, large: str) -> None:
    told = elastune("plan", large, "--nodes", 32, "--mesh", "data=3")
    assert told.code == 2
    assert "a mesh must divide the workers of the cluster (got data=3: 3 of 32 workers)" in told.err


def test_a_program_that_fails_tells_its_own_error_once(elastune: Any, here: Any) -> None:
    (here / "broken.py").write_text("def train(session):\n    raise RuntimeError('no such thing')\n")
    told = elastune("plan", "broken.py", "--nodes", 1)
    assert told.code == 2
    assert told.err.count("no such thing") == 1


LARGE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

config = {"batch_size": 8}

def train(session):
    data = TensorDataset(torch.zeros(64, 8), torch.zeros(64, 8))
    wide = [nn.Linear(100_000, 100_000) for _ in range(12)]  # 447 GiB of parameters
    model = nn.Sequential(nn.Linear(8, 100_000), *wide, nn.Linear(100_000, 8))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(1):
        for x, y in session.batches(data, batch_size=session.config["batch_size"]):
            session.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        session.report(done=1.0)
"""


@pytest.fixture(scope="module")
def size(tmp_path_factory: pytest.TempPathFactory) -> ProgramSize:
    """Its rehearsal, which takes no memory."""
    path = tmp_path_factory.mktemp("large") / "large.py"
    path.write_text(LARGE)
    return rehearse_apart(Program(path), {})


@pytest.fixture
def large(here: Any, monkeypatch: pytest.MonkeyPatch, size: ProgramSize) -> str:
    """A program that no machine holds that tests run on; a run of it would be an error of the planner."""

    def nothing(*asked: object, **also: object) -> None:
        raise AssertionError("something was launched")

    monkeypatch.setattr("elastune.tuning.cluster_plan.find_plan.rehearse_apart", lambda *asked: size)
    monkeypatch.setattr("elastune.tuning.cluster_plan.probes.run_job", nothing)
    monkeypatch.setattr("elastune.tuning.cluster_plan.probes.LocalCluster", nothing)
    (here / "large.py").write_text(LARGE)
    return "large.py"


def test_memory_is_answered_before_anything_is_launched(elastune: Any, large: str) -> None:
    told = elastune("plan", large, "--nodes", 32, "--memory", "1100GiB", "--json")
    assert told.code == 0, told.err
    found = json.loads(told.out)
    assert found["memory"] == "does not fit: 2.22 TiB of 1.07 TiB a worker; 'sharded' on 7 would"
    assert found["unmeasured"].startswith("does not fit: 2.22 TiB of ")
    assert found["unmeasured"].endswith(" this machine")
    assert found["probed"] == {}
    assert all(plan["memory_bytes"] <= 1100 * 2**30 for plan in found["plans"])
    said = elastune("plan", large, "--nodes", 32, "--memory", "1100GiB").out
    assert "nothing was run here: does not fit: 2.22 TiB of " in said
    assert "1.07 TiB a worker; 'sharded' on 7 would" in said


def test_what_no_split_holds_is_refused_before_anything_is_launched(elastune: Any, large: str) -> None:
    told = elastune("plan", large, "--nodes", 2, "--memory", "24GiB")
    assert told.code == 2
    assert "of 24 GiB a worker" in told.err
    assert elastune("plan", large, "--nodes", 2).code == 2, "this machine's memory counts where none is told"


def test_what_has_no_room_here_is_not_measured(elastune: Any, large: str) -> None:
    told = elastune("plan", large, "--nodes", 32, "--memory", "1100GiB", "--measure", 1)
    assert told.code == 2
    assert "plans are measured where this machine holds the program" in told.err


def test_a_process_s_own_memory_is_no_room_for_the_program(elastune: Any) -> None:
    told = elastune("plan", "linear.py", "--nodes", 1, "--calibrate", "1s", "--noise-scale", 1, "--memory", "2MiB")
    assert told.code == 2
    assert "its process takes" in told.err


def test_a_program_that_fails_in_its_probe_tells_its_own_error_once(elastune: Any, here: Any) -> None:
    """Its rehearsal ends with the first step, so that only a run meets what comes later."""
    text = (here / "linear.py").read_text()
    broken = text.replace("            optimizer.zero_grad()\n", "            raise RuntimeError('no such thing')\n")
    (here / "broken.py").write_text(broken)
    told = elastune("plan", "broken.py", "--nodes", 1, "--calibrate", "1s")
    assert told.code == 2
    assert told.err.count("elastune: ") == 1
    assert told.err.count("RuntimeError: no such thing") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cluster", "hosts:7070", "--token-file", "token", "--measure", 1), "runs on a cluster need a folder"),
        (("--cluster", "hosts:7070", "--token-file", "token", "--probe"), "runs on a cluster need a folder"),
        (("--cluster", "hosts:7070"), "a cluster of agents needs a secret"),
        (("--cluster", "moon"), "--cluster must be"),
        (("--probe", "--out", "out", "--memory", "1GiB"), "--probe runs on a node of the cluster"),
        (("--cluster", "hosts:7070", "--token-file", "token", "--probe", "--out", "out"), "add --memory, or --device"),
        (("--device", "h1000"), "use one of h200, h100, "),
        (("--device", "cpu"), "the memory of a worker on one core of a CPU must be given"),
        (("--device", "h100", "--measure", 1), "add --cluster, or leave --measure out"),
        (("--copies", 0), "use --copies 1 or 2"),
    ],
)
def test_what_a_plan_cannot_be_made_of_is_one_line(elastune: Any, options: tuple[object, ...], words: str) -> None:
    told = elastune("plan", "linear.py", "--nodes", 1, *options)
    assert told.code == 2
    assert words in told.err
    assert told.err.count("\n") == 1
