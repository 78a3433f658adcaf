"""The commands on small programs: what lies on stdout, and that every way of starting trains the same."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.cli.documented import documented, unlike
from tests.support.forked import elastune as start

from elastune.cli import main
from elastune.cli.commands.run import _explain, run
from elastune.cli.commands.search import tune
from elastune.cli.results import result_of
from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.records import (
    Measured,
    Reported,
    RunFailed,
    RunFinished,
    StudyStarted,
    SyncChanged,
    TopologyChanged,
)
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.job import interrupts
from elastune.runtime.job.preflight import with_proof

Command = Callable[..., Any]


def said_by(folder: Path) -> dict[str, Any]:
    (line,) = (folder / "said.json").read_text().splitlines()
    data = json.loads(line)
    assert isinstance(data, dict)
    return data


def test_run_prints_one_object(finished_run: Path) -> None:
    result = said_by(finished_run)
    (end,) = (e.record for e in read(finished_run / "journal.jsonl") if isinstance(e.record, RunFinished))
    assert result == {
        "kind": "run",
        "sha256": end.sha256,
        "workers": 1,
        "hosts": 1,
        "steps": 8,
        "samples": 128,
        "seconds": end.seconds,
        "metrics": end.metrics,
        "evaluated_on": {},
        "worker_steps": [asdict(each) for each in end.worker_steps],
        "memory": [asdict(each) for each in end.memory],
        "step_s": end.step_s,
        "wait_s": end.wait_s,
        "stop_why": "",
        "stopped": "complete",
        "changes": 0,
        "median_pause_s": None,
        "longest_pause_s": None,
        "steps_discarded": 0,
        "rounds_short": 0,
        "samples_left_out": 0,
        "sent_bytes": 0.0,
        "mode": "exact",
        "compress": None,
        "mechanism": "replicated",
        "num_slots": 4,
        "sync": "allreduce",
        "sync_changes": [],
        "seed": 4,
        "config": {"lr": 0.2},
        "out": "out",
        "report": "out/report.html",
    }
    assert len(result["sha256"]) == 64


def test_a_run_writes_its_page_with_the_training_loss(finished_run: Path) -> None:
    assert any(
        isinstance(e.record, Measured) and "loss" in e.record.signals for e in read(finished_run / "journal.jsonl")
    )
    page = (finished_run / "report.html").read_text()
    assert "training loss" in page
    assert "linear.py: loss " in page


def test_a_terminal_gets_at_most_100_columns(finished_run: Path, finished_study: Path, elastune: Command) -> None:
    for folder in (finished_run, finished_study):
        lines = elastune("report", folder).out.splitlines()
        assert len(lines) > 4
        assert max(len(line) for line in lines if str(folder.parent) not in line) <= 100
    picked = elastune("report", finished_study, "--pick", "loss=1000").out
    assert f"why     elastune explain {finished_study}" in picked
    assert "batch_size=32" not in picked.partition("train ")[0], "all trials have it"


def test_every_field_of_a_run_is_documented(finished_run: Path) -> None:
    assert unlike(said_by(finished_run), documented(run)) == []


def test_every_field_of_a_run_whose_strategy_changed_is_documented(tmp_path: Path, finished_run: Path) -> None:
    lines = (finished_run / "journal.jsonl").read_text().splitlines(keepends=True)
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        journal.write(SyncChanged(2, "local:learners=4,every=2", "schedule", 1.0))
        journal.write(TopologyChanged(3, "tree", 2, "Mine", 1.0))
    (tmp_path / "journal.jsonl").write_text("".join(lines) + (tmp_path / "journal.jsonl").read_text())
    result = result_of(tmp_path).data
    assert len(result["sync_changes"]) == 2
    assert unlike(result, documented(run)) == []


def test_report_tells_when_a_run_reached_a_target(finished_run: Path, elastune: Command) -> None:
    reports = [e.record for e in read(finished_run / "journal.jsonl") if isinstance(e.record, Reported)]
    losses = [report.metrics["loss"] for report in reports]
    first = next(i for i, loss in enumerate(losses) if loss <= losses[-1] * 1.000001)
    result = elastune("report", str(finished_run), "--target", f"loss <= {losses[-1] * 1.000001}", "--json")
    data = json.loads(result.out)["time_to_target"]
    assert data["seconds"] == reports[first].seconds
    assert data["missed_s"] == (reports[first - 1].seconds if first else 0.0)
    missed = elastune("report", str(finished_run), "--target", "loss < 0")
    assert "target  loss < 0 not reached: short by" in missed.out
    wrong = elastune("report", str(finished_run), "--target", "loss")
    assert wrong.code == 2


def test_report_tells_what_a_run_has_cost(finished_run: Path, elastune: Command, tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("kind,price\nspot,2\non-demand,6\n")
    asked = ("report", str(finished_run), "--prices", str(prices))
    dear, cheap = elastune(*asked, "--json").json["money"], elastune(*asked, "--kind", "spot", "--json").json["money"]
    assert dear["worker_hours"] == cheap["worker_hours"] > 0
    assert dear["cost"] == pytest.approx(6 * dear["worker_hours"])
    assert cheap["cost"] == pytest.approx(2 * dear["worker_hours"])
    assert dear["idle_cost"] == 0, "of this machine nobody has said how much is the run's"
    assert "of workers' time" in elastune(*asked).out
    assert "every kind of host needs a price" in elastune(*asked, "--kind", "gpu").line


def test_interrupted_and_resumed_on_two_workers_it_is_the_same_state(elastune: Command, finished_run: Path) -> None:
    command = ("run", "linear.py", "--set", "lr=0.2", "--seed", "4", "--slots", "4")
    part = elastune(*command, "--json", "--max-steps", "3", "--checkpoint-every", "1", "--price", "7")
    assert part.json["stopped"] == "max_steps"
    assert part.json["money"]["cost"] == pytest.approx(7 * part.json["money"]["worker_hours"])
    assert part.json["money"]["worker_hours"] > part.json["seconds"] / 3600, "starting is paid for, too"
    assert part.json["out"] == "elastune-out/linear-run-1"
    whole = elastune(*command, "--workers", "2", "--out", part.json["out"], "--resume")
    assert whole.code == 0, whole.err
    first, memory, *_, second, third, page = whole.out.splitlines()
    assert "after 8 steps" in first
    assert "on 2 workers (exact)" in first
    assert memory.startswith("memory  parameters ")
    assert said_by(finished_run)["sha256"] in second
    assert "elastune-out/linear-run-1/journal.jsonl" in third
    assert page == "report  elastune-out/linear-run-1/report.html"


@pytest.mark.soak
def test_torchrun_gives_the_same_state(process: Command, finished_run: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = process(
        *("run", "linear.py", "--set", "lr=0.2", "--seed", "4", "--slots", "4", "--json", "--out", "launched"),
        launcher=launcher,
    )
    assert said.code == 0, said.err
    assert said.json["workers"] == 2, "rank 0 alone prints"
    assert said.json["sha256"] == said_by(finished_run)["sha256"]


def test_mpirun_gives_the_same_state(here: Path, finished_run: Path) -> None:
    mpirun = shutil.which("mpirun")
    assert mpirun is not None, "apt-get install openmpi-bin"
    root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    given = ("run", "linear.py", "--set", "lr=0.2", "--seed", "4", "--slots", "4", "--json", "--out", "launched")
    command = [mpirun, *root, "--oversubscribe", "-n", "2", sys.executable, "-m", "elastune", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=here)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["workers"] == 2, "rank 0 alone prints"
    assert data["sha256"] == said_by(finished_run)["sha256"]


def test_a_launcher_needs_out_and_brings_the_workers(elastune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert "no --out" in elastune("run", "linear.py").line
    assert "it started 2" in elastune("run", "linear.py", "--workers", "3", "--out", "x").line


def test_a_run_that_raises_fails_in_one_line(here: Path, elastune: Command) -> None:
    (here / "raises.py").write_text("config = {}\ndef train(session):\n    raise RuntimeError('no luck')\n")
    result = elastune("run", "raises.py", "--out", "failed", "--json")
    assert result.code == 1
    assert result.json["failed"]["reason"] == "exception"
    last = result.err.splitlines()[-1]
    assert "RuntimeError: no luck (raises.py:3)" in last
    assert "failed/logs/worker-0.log" in last
    assert "Traceback" in (here / "failed" / "logs" / "worker-0.log").read_text()
    assert elastune("report", "failed", "--json").json["failed"]["rank"] == 0
    assert "failed: RuntimeError" in elastune("report", "failed").out


def test_tune_prints_one_object(finished_study: Path, elastune: Command, here: Path) -> None:
    result = said_by(finished_study)
    assert result["kind"] == "tune"
    assert result["objectives"] == {"loss": "min"}
    assert result["trials"] == {"complete": 3}
    assert result["reason"] == "3 trials"
    (best,) = result["front"]
    assert (result["pick"], result["choices"]) == (None, []), "none reached what --until asked for"
    picked = elastune("report", finished_study, "--pick", "loss=1000", "--json").json
    assert picked["pick"]["trial"] == best["trial"]
    assert (finished_study.parent / result["report"]).is_file()
    again = elastune("report", finished_study, "--json").json
    assert all(Path(image).is_file() for image in again.pop("images"))
    moved = {"out": str(finished_study), "report": str(finished_study / "report.html")}
    assert again == result | moved, "the journal alone tells all"


def test_every_field_of_a_study_is_documented(finished_study: Path) -> None:
    assert unlike(said_by(finished_study), documented(tune)) == []


def test_tune_hands_its_options_on(finished_study: Path) -> None:
    started = next(e.record for e in read(finished_study / "journal.jsonl") if isinstance(e.record, StudyStarted))
    expected = {
        "objectives": {"loss": "min"},
        "constraints": ["lr <= 0.5"],
        "sampler": "random",
        "trials": 3,
        "budget_s": 300.0,
        "workers": 2,
        "config": {"batch_size": 32},
        "epochs": 1,
        "seed": 7,
        "price_per_worker_hour": 2.5,
        "trial_timeout_s": 60.0,
        "until": ["loss < -1"],
        "patience": 50,
        "target": "loss <= 100",
        "divergence": 20.0,
    }
    assert {name: started.settings[name] for name in expected} == expected


def test_tune_resumes_and_shows_people_the_front(
    finished_study: Path, study_command: tuple[str, ...], here: Path, elastune: Command
) -> None:
    shutil.copytree(finished_study, here / "out")
    result = elastune(*(word if word != "3" else "5" for word in study_command), "--out", "out", "--resume")
    assert result.code == 0, result.err
    assert "ended (5 trials): 5 trials over" in result.err, "those of the first part count too"
    assert "pick    none: a trial must reach loss < -1 to be recommended" in result.out
    assert "train   elastune run linear.py" in elastune("report", "out", "--pick", "loss=1000").out
    assert "report  out/report.html" in result.out
    assert elastune("report", "out", "--json").json["trials"] == {"complete": 5}


def test_frontier_prints_one_object(here: Path, elastune: Command) -> None:
    output = elastune(
        *("frontier", "linear.py", "--workers", "1,2", "--budget", "15s", "--short", "--seeds", "2", "--epochs", "1"),
        *("--json", "--out", "front"),
    )
    assert output.code == 0, output.err
    result = output.json
    assert result["kind"] == "frontier"
    assert result["quality"] == "loss"
    assert {(row["role"], row["workers"]) for row in result["rows"]} >= {("naive", 1), ("naive", 2)}
    outcome = result["answer"]
    assert 3 <= len(outcome["sentence"].split()) <= 20
    assert outcome["command"].startswith("elastune run linear.py")
    assert outcome["this_machine"]["cores"] >= 1
    assert Path(result["report"]).is_file()


def test_ctrl_c_ends_a_run_and_says_how_to_go_on(here: Path) -> None:
    command = ("run", "linear.py", "--epochs", "1000000", "--out", "slow", "--json")
    with (here / "out").open("wb") as out, (here / "err").open("wb") as err:
        running = start(*command, out=out, err=err)
    journal = here / "slow" / "journal.jsonl"
    deadline = time.monotonic() + 60
    while not (journal.exists() and b'"reported"' in journal.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    code, result = running.wait(60), (here / "err").read_text()
    assert code == 130, result
    assert json.loads((here / "out").read_text())["stopped"] == "requested"
    assert "--resume --out slow" in result
    assert "Traceback" not in result


def test_a_second_ctrl_c_is_an_interruption(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = RunFailed("interrupted", "ended by a second interrupt", 0)
    assert _explain(failure, tmp_path) == 130
    assert capsys.readouterr().err == "elastune: ended by a second interrupt; there is no checkpoint yet\n"
    assert _explain(failure, finished_run) == 130
    assert f"go on after step 8 with --resume --out {finished_run}" in capsys.readouterr().err


def test_a_second_sigterm_asks_for_another_try(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_ended_by", [signal.SIGTERM, signal.SIGTERM])
    assert _explain(RunFailed("interrupted", "ended by a second interrupt", 0), finished_run) == 75


@pytest.mark.parametrize("resume", [False, True])
def test_a_first_start_with_resume_proves_its_first_step(tmp_path: Path, resume: bool) -> None:
    execution = ExecutionSettings(num_slots=4)
    spec = RunSpec(Program(tmp_path / "train.py"), tmp_path, execution=execution, resume=resume)
    assert with_proof(spec).proves
    assert not with_proof(spec, unchecked=True).proves


def test_help_shows_a_default_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "[default: 1,2,4,8; beside --mesh none]" in shown


def test_help_comes_at_once(here: Path) -> None:
    heavy = "{'torch', 'optuna', 'numpy', 'pydantic'}"
    code = f"import sys; from elastune.cli import main; main(['--help']); sys.exit(bool({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, "help must not wait for torch or optuna"
    assert "frontier" in done.stdout


def test_a_closed_pipe_is_no_traceback(here: Path) -> None:
    command = f"{sys.executable} -m elastune doctor | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


def test_a_run_of_learners_that_change_how_they_agree(
    tiny: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    agreed = ["--sync", "local:learners=4,every=2", "--sync-schedule", "4=diloco:learners=2,every=2"]
    words = ["run", str(tiny.path), "--max-steps", "8", *agreed, "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert (data["steps"], data["sync"]) == (8, "local:learners=4,every=2")
    assert [(each["step"], each["strategy"]) for each in data["sync_changes"]] == [(4, "diloco:learners=2,every=2")]
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "diloco:learners=2,every=2" in capfd.readouterr().out


def test_a_policy_switches_in_a_run_of_up_to_sixteen_workers(
    tiny: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """To as many learners as that run can have, though nobody has said how many."""
    policy = ["--policy", "sync_by_size:above=1,every=2", "--workers", "2:16"]
    words = ["run", str(tiny.path), "--max-steps", "8", *policy, "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert [each["strategy"] for each in data["sync_changes"]] == ["averaging:learners=16,every=2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sync", "gossips"], "use allreduce or local"),
        (["--sync", "local:learners=3,every=2", "--slots", "4"], "as many slots"),
        (["--sync", "local:learners=2,every=2", "--workers", "1:3"], "a learner for every worker"),
        (["--sync", "local:learners=2,every=2", "--policy", "gns"], "not summed up"),
        (["--sync-schedule", "5=local:every=3; 4=allreduce"], "ascend"),
        (
            ["--sync", "local:learners=4,every=9", "--max-steps", "8"],
            "longer than the run (got local:learners=4,every=9",
        ),
        (
            ["--sync-schedule", "7=local:learners=4,every=2; 8=allreduce", "--max-steps", "8"],
            "must end before the run does (got 8=allreduce, 8 steps)",
        ),
        (["--sync", "gossip:learners=4,every=4,mix=4"], "before their round ends (got gossip, every=4, mix=4)"),
        (["--policy", "sync_by_size:every=1"], "use every=2 or more"),
        (["--policy", "sync_by_size:learners=8", "--workers", "1:16"], "a learner for every worker"),
    ],
)
def test_wrong_strategies_are_refused_before_a_worker_starts(
    tiny: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["run", str(tiny.path), "--out", str(tmp_path / "out"), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert message in line
