"""The controller of a study is killed and its trials train on; the next one takes them over where they are."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.clusters import request_of
from tests.support.forked import elastune

from elastune.core.journal.files import read
from elastune.core.journal.records import Record, TrialAdopted, TrialFinished, TrialPaused, TrialReported, TrialStarted
from elastune.core.run import ExecutionSettings, Program
from elastune.report.page import write_report
from elastune.runtime.clusters import elastic_cluster
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

PROGRAM = Program(Path(__file__).parent / "programs" / "noting.py")
TRIALS, EPOCHS, STEPS = 3, 4, 40
FIRST, SECOND = 12, 25  # steps at which trials wait
LIMIT_S = 200.0


def request(out: Path, **changes: object) -> StudyRequest:
    execution = ExecutionSettings(mode="exact", num_slots=4)
    return StudyRequest(PROGRAM, out, sampler="random", trials=TRIALS, workers=2, execution=execution, **changes)  # type: ignore[arg-type]


def results(out: Path) -> dict[int, str]:
    """The weights of each trial that is complete."""
    values = [r for r in records(out) if isinstance(r, TrialFinished) and r.state == "complete" and r.run is not None]
    assert len({record.trial for record in values}) == len(values)
    return {record.trial: record.run.sha256 for record in values if record.run is not None}


def records(out: Path) -> list[Record]:
    journal = out / "journal.jsonl"
    return [entry.record for entry in read(journal)] if journal.exists() else []


def of(kind: type, out: Path) -> list[int]:
    """The trials that the records of ``kind`` are about."""
    return [record.trial for record in records(out) if isinstance(record, kind)]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    tune(request(out), cluster=cluster)
    result = results(out)
    assert len(set(result.values())) == TRIALS
    return result


class Notes:
    """What the trials of a study write down, and the gates at which they wait."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.first, self.second = folder / "notes", folder / "first", folder / "second"
        self.folder.mkdir()

    @property
    def config(self) -> dict[str, object]:
        return {"notes": str(self.folder), "gates": [f"{FIRST} {self.first}", f"{SECOND} {self.second}"]}

    @property
    def taken(self) -> list[list[tuple[int, int]]]:
        """Of each trial, which process has taken which step, in order."""
        values = []
        for path in self.folder.iterdir():
            lines = [line.split() for line in path.read_text().splitlines()]
            values.append([(int(process), int(step)) for process, step in lines])
        return values

    def at(self, step: int, trials: int) -> bool:
        """Whether so many trials have come to ``step``."""
        return sum((steps[-1][1] if steps else 0) >= step for steps in self.taken) >= trials


def untouched(notes: Notes) -> int:
    """How many trials were trained by one process, step by step."""
    whole = [list(range(STEPS))]
    return sum(
        len({process for process, _ in steps}) == 1 and [[step for _, step in steps]] == whole for steps in notes.taken
    )


@pytest.mark.timeout(600)
def test_on_this_machine(tmp_path: Path, undisturbed: dict[int, str], until, all_gone) -> None:
    """By the command line. Both trials that run go on, the third one begins later."""
    out, notes = tmp_path / "out", Notes(tmp_path)
    sets = [word for name, value in notes.config.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    asked = [
        "--trials",
        str(TRIALS),
        "--workers",
        "2",
        "--mode",
        "exact",
        "--slots",
        "4",
        "--sampler",
        "random",
        "--json",
    ]
    words = ["tune", str(PROGRAM.path), *sets, *asked, "--grace", "120s", "--out", str(out)]
    with (tmp_path / "said").open("wb") as said:
        first = elastune(*words, out=said, err=said)
        try:
            until(lambda: notes.at(FIRST, 2), LIMIT_S)
        finally:
            first.kill()
            first.wait()
        processes = {process for steps in notes.taken for process, _ in steps}
        notes.first.touch()
        until(lambda: notes.at(SECOND, 2), LIMIT_S)  # nobody controls them
        second = elastune(*words, "--resume", out=said, err=said)
        try:
            until(lambda: len(of(TrialAdopted, out)) == 2 or second.poll() is not None, LIMIT_S)
            assert second.poll() is None, (tmp_path / "said").read_text()
            notes.second.touch()
            assert second.wait(LIMIT_S) == 0, (tmp_path / "said").read_text()
        finally:
            second.kill()
            second.wait()
    assert results(out) == undisturbed
    assert untouched(notes) == TRIALS
    assert (of(TrialStarted, out), of(TrialAdopted, out), of(TrialPaused, out)) == ([0, 1, 2], [0, 1], [])
    values = [(r.trial, r.report.epoch) for r in records(out) if isinstance(r, TrialReported)]
    assert sorted(values) == [(trial, epoch) for trial in range(TRIALS) for epoch in range(1, EPOCHS + 1)]
    assert write_report(out).exists()
    all_gone(processes)
    assert not list(out.glob(".agent*"))


@pytest.mark.timeout(600)
def test_on_a_host_where_one_trial_ends_and_one_is_lost_meanwhile(
    tmp_path: Path, undisturbed: dict[int, str], controller: Callable, until, all_gone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that has ended is told so; the lost one goes on from its newest checkpoint."""
    from tests.faults.test_adoption import port

    at, token, out, notes = port(), tmp_path / "token", tmp_path / "out", Notes(tmp_path)
    monkeypatch.setattr(elastic_cluster, "NOBODY_S", LIMIT_S)  # of the lost one its agent tells
    cluster = f"hosts:{at},token_file={token}"

    def study(resume: bool) -> object:
        plain_request = request(out, config=notes.config, grace_s=120.0, resume=resume)
        return tune(plain_request, cluster=request_of(cluster))

    first = controller(lambda: study(False))
    until(token.exists)
    join = ["--join", f"127.0.0.1:{at}", "--token-file", str(token), "--workers", "2"]
    with (tmp_path / "agent").open("wb") as said:
        agent = elastune("agent", *join, out=said, err=said)
    try:
        until(lambda: notes.at(FIRST, 2), LIMIT_S)
        first.signal(signal.SIGKILL)
        first.end()
        lost = next(steps[0][0] for steps in notes.taken if steps)
        os.kill(lost, signal.SIGKILL)
        all_gone([lost])
        notes.first.touch()
        notes.second.touch()
        until(lambda: notes.at(STEPS - 1, 1), LIMIT_S)
        second = controller(lambda: study(True))
        assert second.end(LIMIT_S) == 0
        assert agent.wait(LIMIT_S) == 0
    finally:
        agent.kill()
        agent.wait()
    assert results(out) == undisturbed
    assert untouched(notes) == TRIALS - 1
    assert (of(TrialStarted, out), len(of(TrialAdopted, out))) == ([0, 1, 2], 1)
    (paused,) = [record for record in records(out) if isinstance(record, TrialPaused)]
    assert (paused.cut_off, {paused.trial, *of(TrialAdopted, out)}) == (True, {0, 1})
    (again,) = [steps for steps in notes.taken if len({process for process, _ in steps}) == 2]
    begun = next(step for process, step in again if process != lost)
    assert begun == FIRST // 10 * 10  # the newest checkpoint is that of an epoch's end
