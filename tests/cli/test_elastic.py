"""Commands about workers that come and go, and about machines that are taken away."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked import ForkedProcess
from tests.support.forked import elastune as start

from elastune.core.journal.files import read
from elastune.core.journal.records import Checkpointed, Regrouped, StepsCompleted, decode_entry, encode_entry

Command = Callable[..., Any]
LIMIT_S = 90.0


@pytest.fixture
def slow(here: Path) -> Path:
    """A program of a minute and more, until there is a file named go."""
    text = (here / "linear.py").read_text().replace('"epochs": 2', '"epochs": 200')
    (here / "slow.py").write_text(text.replace("optimizer.zero_grad()\n", "optimizer.zero_grad()\n" + _NAP, 1))
    return here


_NAP = "            import os, time; os.path.exists('go') or time.sleep(0.05)\n"


@pytest.fixture
def running(slow: Path) -> Iterator[Callable[..., ForkedProcess]]:
    """Starts ``elastune run slow.py``, which writes to result and said, and returns once it has a checkpoint."""
    started: list[ForkedProcess] = []

    def run(*arguments: str) -> ForkedProcess:
        with (slow / "result").open("wb") as result, (slow / "said").open("wb") as said:
            started.append(start("run", "slow.py", "--out", "out", *arguments, out=result, err=said))
        until(lambda: started[-1].poll() is not None or heard(Checkpointed))
        assert started[-1].poll() is None, (slow / "said").read_text()
        return started[-1]

    yield run
    for each in started:
        each.kill()
        each.wait()


def heard(kind: type, journal: Path = Path("out/journal.jsonl")) -> list[Any]:
    return [e.record for e in read(journal) if isinstance(e.record, kind)] if journal.exists() else []


def until(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_running_job_is_resized_from_another_shell(running: Command, elastune: Command, slow: Path) -> None:
    run = running("--workers", "1:2", "--slots", "4")
    first = 2 if "on 2 workers" in elastune("resize", "out", "1").out else 1
    result = elastune("resize", "out", "2", "--json")
    assert result.code == 0, result.err
    assert result.json["taken"] is True
    until(lambda: any(len(record.members) == 2 for record in heard(Regrouped)) or first == 2)
    assert "from 1 to 2 are allowed" in elastune("resize", "out", "5").out
    run.send_signal(signal.SIGINT)
    assert run.wait(LIMIT_S) == 130, (slow / "said").read_text()
    assert "the run must be running" in elastune("resize", "out", "1").line


@pytest.mark.soak
def test_a_running_job_is_reshaped_from_another_shell(running: Command, elastune: Command, slow: Path) -> None:
    how = ("--epochs", "60", "--slots", "4")
    run = running("--mesh", "data=2", "--mechanism", "zero", "--workers", "1:2", "--json", *how)
    result = elastune("reshape", "out", "shard=2", "--json")
    assert result.code == 0, result.err
    assert result.json["detail"] == "from 2 workers to the mesh shard=2"
    until(lambda: any(record.mesh == "shard=2" for record in heard(Regrouped)))
    for mesh, rule in REFUSED.items():
        assert rule in elastune("reshape", "out", mesh).line
    assert elastune("reshape", "out", "data=1").code == 0
    until(lambda: heard(Regrouped)[-1].mesh == "")
    (slow / "go").touch()
    assert run.wait(LIMIT_S) == 0, (slow / "said").read_text()
    assert [(record.mesh, len(record.members)) for record in heard(Regrouped)] == [("shard=2", 2), ("", 1)]
    alone = elastune("run", "linear.py", *how, "--out", "alone", "--json")
    assert json.loads((slow / "result").read_text())["sha256"] == alone.json["sha256"]
    assert "the run must be running" in elastune("reshape", "out", "data=1").line


REFUSED = {
    "tensor=2": "divide along the axes of its mesh: not along tensor",
    "data=3": "this run has from 1 to 2 workers",
    "rows=2": "the axes of a mesh are",
    "data=0": "at least one worker along each axis",
}


def test_a_run_of_one_slot_says_how_to_get_more_workers(here: Path, elastune: Command) -> None:
    asks = "optimizer.step()\n            if session.ends_step: session.resize(3)\n"
    (here / "own.py").write_text((here / "linear.py").read_text().replace("optimizer.step()\n", asks))
    run = elastune("run", "own.py", "--out", "out", "--json")
    assert (run.code, run.json["num_slots"], run.json["workers"]) == (0, 1, 1), run.err
    first = "1 slot, so 1 worker throughout; a run that begins with --workers 1:4 may get more"
    assert run.err.count(first) == 1
    assert run.err.count("asked for 3 workers; this run has 1 throughout: start it with --workers LOW:HIGH") == 1
    refused = elastune("run", "own.py", "--out", "out", "--resume", "--workers", "2").line
    assert "(got 1 slot, 2 workers): use --workers 1, or begin a run with --workers 1:2 or --slots 2" in refused


@pytest.mark.soak
def test_a_policy_reshapes_a_run(here: Path, slow: Path, elastune: Command) -> None:
    (here / "own.py").write_text(_RESHAPER + (slow / "slow.py").read_text())
    how = ("--epochs", "4", "--slots", "4")
    mesh = ("--mesh", "data=2", "--mechanism", "zero", "--workers", "1:2", "--policy", "Reshaper")
    run = elastune("run", "own.py", *mesh, *how, "--out", "out", "--json")
    assert run.code == 0, run.err
    assert [(record.mesh, len(record.members)) for record in heard(Regrouped)] == [("shard=2", 2), ("", 1)]
    assert elastune("run", "linear.py", *how, "--out", "alone", "--json").json["sha256"] == run.json["sha256"]


_RESHAPER = """
import elastune

class Reshaper(elastune.Policy):
    def after_step(self, run):
        if run.step in (3, 8):
            run.reshape("shard=2" if run.step == 3 else "data=1")
"""


def meanwhile(elastune: Command, act: Callable[[], object], *arguments: str) -> Any:
    """What a run of slow.py says in which ``act`` happens after a checkpoint."""

    def later() -> None:
        until(lambda: heard(Checkpointed))
        act()

    with ThreadPoolExecutor(1) as thread:
        acted = thread.submit(later)
        result = elastune("run", "slow.py", "--out", "out", "--json", *arguments)
        acted.result()
    return result


def test_a_notice_ends_a_run_for_another_day(slow: Path, elastune: Command) -> None:
    said = meanwhile(elastune, lambda: (slow / "notice").write_text("60"), "--notice-file", "notice")
    assert said.code == 75, said.err
    assert said.json["stopped"] == "notice"
    assert "go on with --resume --out out" in said.err
    assert heard(Checkpointed)[-1].step == said.json["steps"]


def test_sigusr1_is_a_notice(slow: Path, elastune: Command) -> None:
    said = meanwhile(elastune, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert (said.code, said.json["stopped"]) == (75, "notice"), said.err


def test_chaos_ends_with_its_verdict(elastune: Command, slow: Path) -> None:
    command = ("run", "slow.py", "--epochs", "6", "--workers", "2", "--chaos", "kill@step:8", "--chaos-verify")
    result = elastune(*command, "--out", "out", "--json")
    assert result.code == 0, result.err
    chaos = result.json["chaos"]
    assert chaos["faults"] == {"kill": 1}
    assert (chaos["steps_lost"], chaos["equal"], chaos["ledger"]["exact"]) == (0, True, True)
    assert chaos["undisturbed_sha256"] == result.json["sha256"]
    assert result.json["changes"] >= 1
    report = elastune("report", "out")
    assert "of workers, pauses" in report.out
    page = (slow / "out" / "report.html").read_text()
    assert "Workers over the steps" in page
    assert "Faults injected: 1 x kill" in page


def test_a_ledger_tells_of_a_lost_sample(finished_run: Path, elastune: Command, here: Path) -> None:
    output = elastune("report", finished_run, "--ledger")
    assert output.code == 0, output.err
    assert output.out.splitlines() == [
        "epoch 1: 64/64 seen once",
        "epoch 2: 64/64 seen once",
        "ledger: 128 samples in 8 steps, each seen once",
    ]
    entries = [decode_entry(line) for line in (finished_run / "journal.jsonl").read_bytes().splitlines()]
    forged = [entry for entry in entries if not (isinstance(entry.record, StepsCompleted) and entry.record.epoch == 0)]
    (here / "forged").mkdir()
    (here / "forged" / "journal.jsonl").write_bytes(b"".join(encode_entry(entry) + b"\n" for entry in forged))
    result = elastune("report", "forged", "--ledger", "--json")
    assert result.code == 1
    assert result.json["exact"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "linear.py", "--workers", "x"), "whole number or LOW:HIGH"),
        (("run", "linear.py", "--workers", "3:2"), "LOW first"),
        (("run", "linear.py", "--workers", "0"), "from 1"),
        (("run", "linear.py", "--workers", "1:9", "--slots", "8"), "a slot for every worker"),
        (("run", "linear.py", "--heartbeat", "5"), "--heartbeat must be a duration"),
        (("run", "linear.py", "--chaos", "boom"), "--chaos must be a list"),
        (("run", "linear.py", "--chaos-verify"), "no --chaos"),
        (("run", "linear.py", "--chaos", "kill", "--chaos-verify", "--mode", "fast"), "only exact mode"),
        (("run", "linear.py", "--notice-url", "ftp://x"), "--notice-url must be a web address"),
        (("run", "linear.py", "--notice-seconds", "0"), "--notice-seconds must be above 0"),
        (("resize", "nowhere", "2"), "the run must be running"),
        (("resize", "nowhere", "0"), "workers must be from 1"),
        (
            ("resize", "out", "2", "--cluster", "hosts:7070", "--token-file", "t"),
            "reached by --cluster hosts:HOST:PORT",
        ),
        (("resize", "out", "2", "--cluster", "slurm"), "reached by --cluster hosts:HOST:PORT"),
        (("resize", "out", "2", "--cluster", "hosts:a:7070"), "no --token-file"),
        (("resize", "out", "2", "--token-file", "t"), "--token-file without --cluster"),
        (("reshape", "out", "data=2", "--cluster", "hosts:a:7070", "--token-file", "t"), "No such file"),
        (("reshape", "nowhere", "data=1"), "the run must be running"),
        (("reshape", "nowhere", "data"), "an axis of a mesh has from 1"),
        (("report", "nowhere", "--ledger"), "a journal must exist"),
    ],
)
def test_wrong_input_is_one_line(elastune: Command, arguments: tuple[str, ...], words: str) -> None:
    assert words in elastune(*arguments).line
