"""``--dry-run``: all checks, what would be started, and nothing else; and the commands of plans, each dry-run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from elastune.train.rehearsal import ProgramSize
from elastune.tuning.cluster_plan.find_plan import PLACEHOLDER

Command = Callable[..., Any]
# Of a chain of eight layers, of which tensor divides three quarters.
SIZE = ProgramSize(
    6400, 64, 2, 6e8, 4e5, 5e5, 0.0, 400_000_000, 400_000_000, 800_000_000, 8, 0.75, fake=True, whole_flops=3e8
)
SMALL = ProgramSize(6400, 64, 2, 1.7e5, 2e3, 2e3, 0.0, 110_800, 110_800, 221_600, 1, 1.0, fake=True)


@pytest.fixture
def nothing_starts() -> Iterator[None]:
    """Patched by a patch of its own: ``monkeypatch`` ends after ``elastune``, and would bring its cluster back."""

    def refuse(*asked: object, **also: object) -> None:
        raise AssertionError("something was started")

    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "runtime.job.run.LocalCluster",
            "tuning.study.run.LocalCluster",
            "tuning.frontier.find_frontier.LocalCluster",
            "runtime.clusters.hosts.HostsKind.open",
        ):
            patch.setattr(f"elastune.{name}", refuse)
        yield


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, elastune: Command, nothing_starts: None) -> Command:
    """``elastune plan`` of a program whose rehearsal is known; models are not examined in processes of their own."""
    monkeypatch.setattr("elastune.tuning.cluster_plan.find_plan.rehearse_apart", lambda *asked: SIZE)
    monkeypatch.setattr("elastune.runtime.job.preflight.examined_meanwhile", lambda spec: nullcontext())
    monkeypatch.setattr("elastune.runtime.placement.devices", lambda: ("cuda:0",))
    monkeypatch.setattr("elastune.runtime.clusters.slurm_commands.need", lambda *names: None)

    def plan(*options: object) -> Any:
        result = elastune("plan", "linear.py", *options, "--json")
        assert result.code == 0, result.err
        return json.loads(result.out)

    return plan


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("run", "linear.py", "--workers", "2", "--mode", "fast"),
            "2 workers (data=2, replicated, fast mode, 2 slots)",
        ),
        (("tune", "linear.py", "--trials", "4", "--workers", "2"), "4 trials"),
        (("frontier", "linear.py", "--quality", "loss", "--workers", "1,2"), "1 (data=1), 2 (data=2); exact mode"),
    ],
)
def test_a_dry_run_says_what_would_be_started_and_leaves_nothing(
    elastune: Command, here: Path, nothing_starts: None, words: tuple[str, ...], message: str
) -> None:
    before = sorted(here.rglob("*"))
    result = elastune(*words, "--dry-run")
    assert result.code == 0, result.err
    assert result.out.startswith(f"dry run of elastune {words[0]}: all checks passed, nothing was started or written\n")
    assert message in result.out
    assert "16 samples a step" in result.out
    assert "this machine, device cpu" in result.out
    assert sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts) == before
    one = json.loads(elastune(*words, "--dry-run", "--json", "--out", "there").out)
    assert (one["kind"], one["command"], one["batch_size"], one["out"]) == ("dry_run", words[0], 16, "there")
    assert not (here / "there").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "linear.py", "--set", "rate=1"), "a setting must be one of the program's config"),
        (("run", "linear.py", "--policy", "nosuch"), "nosuch"),
        (("tune", "linear.py"), "a study needs a budget"),
        (("tune", "linear.py", "--trials", "1", "--set", "lr=0.5"), "a setting is either set or searched"),
        (("frontier", "linear.py", "--quality", "grace"), "the quality must be one of the program's objectives"),
    ],
)
def test_a_dry_run_refuses_what_the_command_refuses(
    elastune: Command, nothing_starts: None, words: tuple[str, ...], message: str
) -> None:
    result = elastune(*words, "--dry-run")
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_cluster_may_have_devices_that_this_machine_lacks(elastune: Command, nothing_starts: None) -> None:
    words = ("--workers", "2", "--device", "cuda", "--dry-run")
    assert "the device must be one that this machine has" in elastune("run", "linear.py", *words).err
    result = elastune("run", "linear.py", *words, "--cluster", "hosts:7070", "--token-file", "token")
    assert result.code == 0, result.err
    assert "--cluster hosts:7070, device cuda" in result.out
    assert not Path("token").exists()


def test_a_divided_run_says_what_its_copies_hold(planned: Command, elastune: Command) -> None:
    data = json.loads(elastune("run", "linear.py", "--mesh", "shard=2", "--dry-run", "--json").out)
    assert "has 2 holders (the default)" in data["copies_note"]
    assert "(dividing saves no memory). With --copies 1: 100% and 50%" in data["copies_note"]


@pytest.mark.parametrize(
    "options",
    [
        ("--nodes", 1, "--gpus-per-node", 4, "--device", "t4", "--mesh", "tensor=2", "--copies", 2),
        ("--nodes", 2, "--gpus-per-node", 4, "--device", "a100", "--cluster", "slurm:nodes=2,partition=gpu"),
        ("--nodes", 4, "--device", "l4", "--mesh", "shard=2,pipeline=2", "--cluster", "hosts:7070,token_file=t"),
        ("--nodes", 4, "--device", "cpu", "--memory", "8GiB", "--sampler", "random", "--stopping", "asha"),
        ("--nodes", 4, "--device", "v100", "--mesh", "shard=4", "--set", "lr=0.5", "--noise-scale", 1000),
    ],
)
def test_every_command_of_a_plan_runs_as_printed(planned: Command, elastune: Command, options: Any) -> None:
    result = planned(*options, "--top", 2)
    cluster = options[options.index("--cluster") + 1] if "--cluster" in options else ""
    where = f"--cluster {cluster}" if cluster else PLACEHOLDER if options[1] > 1 else ""
    for plan in result["plans"]:
        for name, kind in (("command", "run"), ("search_command", "tune")):
            words = shlex.split(plan[name])
            assert words[:2] == ["elastune", kind]
            assert plan[name].endswith(where)
            output = elastune(*words[1:], "--dry-run", "--json")
            assert output.code == 0, (plan[name], output.err)
            dry = json.loads(output.out)
            assert (dry["command"], dry["mesh"]) == (kind, plan["mesh"])
            assert dry["cluster"] == (cluster or ("hosts:7070" if where else "local"))
            assert dry["device"] == ("cpu" if "cpu" in options else "cuda")
            assert dry["batch_size"] in (plan["batch"], 16)  # the rehearsed program has 64, the file 16
            if kind == "tune":
                assert dry["study_workers"] == plan["workers"]


def test_the_plan_says_which_cluster_and_why_so_many_trials(planned: Command, elastune: Command) -> None:
    options = ("--nodes", 16, "--gpus-per-node", 8, "--device", "h100")
    result = planned(*options)
    why, where = result["command_notes"]
    trials = shlex.split(result["plans"][0]["search_command"])
    many = int(trials[trials.index("--trials") + 1])
    assert why.startswith(f"--trials {many:,}: --runs 128 counts trainings one after another.")
    assert f"With {result['plans'][0]['width']} at once" in why
    assert f"a placeholder: {PLACEHOLDER}" in where
    assert "on each of the 16 nodes elastune agent --join" in where
    said = elastune("plan", "linear.py", *options).out
    assert f"its search: {result['plans'][0]['search_command']}\n  --trials " in said
    one = planned("--nodes", 1, "--device", "h100", "--runs", 1)
    assert one["command_notes"] == []
    named = planned(*options, "--cluster", "slurm:nodes=16", "--runs", 1, "--mesh", "data=1")
    assert named["command_notes"] == []


NO_SPACE = "def train(session):\n    raise RuntimeError\n"


def test_no_search_is_printed_for_what_cannot_be_searched(planned: Command, here: Path) -> None:
    text = (here / "linear.py").read_text()
    (here / "linear.py").write_text(NO_SPACE)
    result = planned("--nodes", 1, "--device", "h100")
    assert [plan["search_command"] for plan in result["plans"]] == [None] * len(result["plans"])
    assert "def space(trial): return" in result["command_notes"][0]
    assert "objectives = " in result["command_notes"][0]
    assert {plan["batch"] for plan in result["plans"]} == {64}, "no command can set another batch"
    assert "--set" not in "".join(plan["command"] for plan in result["plans"])
    (here / "linear.py").write_text(text.replace('objectives = {"loss": "min", "seconds": "min"}', ""))
    result = planned("--nodes", 1, "--device", "h100")
    assert result["plans"][0]["search_command"] is None
    assert "--objective accuracy:max" in result["command_notes"][0]


def test_a_device_s_data_sheet_stands_for_this_machine(planned: Command, elastune: Command) -> None:
    words = ("plan", "linear.py", "--nodes", 8, "--gpus-per-node", 8, "--device")
    assert (
        "nothing was run: assumed: NVIDIA H100 SXM, 67 TFLOP/s in float32, 3.35 TB/s, 80 GB (NVIDIA"
        in elastune(*words, "H100").out
    )
    fast, slow = (planned(*words[2:], name, "--mesh", "data=8") for name in ("h100", "t4"))
    assert fast["worker_bytes"] == 80e9
    assert slow["worker_bytes"] == 16e9
    assert fast["probed"] == {}
    assert slow["plans"][0]["step_s"] > 2 * fast["plans"][0]["step_s"]


def test_a_model_that_is_too_small_is_said_first(
    planned: Command, elastune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("plan", "linear.py", "--nodes", 8, "--gpus-per-node", 8, "--device", "h100")
    assert "too small" not in elastune(*words, "--link", "400Gbit/s").out
    slow = elastune(*words, "--link", "1Gbit/s").out
    assert slow.startswith("the links are too slow for one training on 64 workers (modelled): 1e8 parameters")
    monkeypatch.setattr("elastune.tuning.cluster_plan.find_plan.rehearse_apart", lambda *asked: SMALL)
    first = elastune(*words).out.partition("\n")[0]
    assert first.startswith("too small for one training on 64 workers (modelled): 27700 parameters, batch 64. In each ")
    assert " a worker would compute for " in first
    assert " for the sum of gradients (1.26 ms of it latency); no more than 1 worker is of use" in first


def test_memory_counts_copies_and_the_serial_share_is_told(planned: Command, elastune: Command) -> None:
    words = ("--nodes", 1, "--gpus-per-node", 2, "--device", "h100", "--mesh", "tensor=2")
    one, two = (planned(*words, "--copies", copies)["plans"][0] for copies in (1, 2))
    assert one["copied_bytes"] == two["memory_bytes"] > 1.2 * one["memory_bytes"]
    assert "--copies 2" in two["command"]
    said = elastune("plan", "linear.py", *words).out
    assert " with --copies 2)" in said
    assert "counted with 1 holder of each part of what is divided (--copies 1 in commands)" in said
    assert "tensor leaves 25% of parameters and 50% of arithmetic whole on each worker (the serial share)" in said
