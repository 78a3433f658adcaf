"""What a run that has ended tells of its own pace."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import Entry, Record, Regrouped, Reported, RunFinished, RunStarted
from elastune.tuning.simulate.market import job_of_run, recorded_run


def started(workers: int, resumed: int | None = None) -> RunStarted:
    execution = {"workers": workers, "mechanism": "replicated", "mesh": None}
    return RunStarted("f.py", {"lr": 0.1}, 0, execution, resumed_step=resumed)


def said(step: int, seconds: float) -> Reported:
    return Reported(step // 100, step, step * 10, seconds, {})


def changed(step: int, *members: int) -> Regrouped:
    return Regrouped(1, list(members), planned=True, step=step, pause_s=0.1, discarded=0)


def finished(step: int, seconds: float) -> RunFinished:
    return RunFinished("", 1, step, step * 10, seconds, {})


def entries(*results: Record) -> list[Entry]:
    return [Entry(1.7e9 + at, record) for at, record in enumerate(results)]


def test_steps_are_timed_between_reports_by_the_workers_that_they_had() -> None:
    run = recorded_run(
        entries(
            started(4),
            said(100, 10.0),
            said(200, 21.0),
            changed(250, 0, 1),
            said(300, 40.0),  # on both: tells nothing
            said(400, 60.0),
            changed(400, 0, 1, 5, 6),
            finished(500, 69.0),
        ),
        "here",
    )
    assert run.steps == 500
    assert run.step_s == {2: pytest.approx(0.20), 4: pytest.approx(30 / 300)}
    assert run.seconds(8, lambda config, known, wanted: known / wanted) == pytest.approx(500 * 0.1 / 2)
    assert run.seconds(3, lambda config, known, wanted: known / wanted) == pytest.approx(500 * 0.2 * 2 / 3)
    assert run.seconds(1, lambda config, known, wanted: known / wanted) == pytest.approx(500 * 0.2 * 2)


def test_what_was_lost_with_a_controller_is_not_in_it() -> None:
    run = recorded_run(
        entries(started(2), said(100, 10.0), said(200, 90.0), started(1, 100), said(200, 30.0), finished(250, 40.0)),
        "here",
    )
    assert (run.steps, run.step_s) == (250, {1: pytest.approx(30 / 150), 2: pytest.approx(0.1)})


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([], "must have trained and ended"),
        ([started(2), said(100, 10.0)], "must have trained and ended"),
        ([started(2), finished(100, 10.0), started(2, 100)], "must have trained and ended"),
        ([started(2), changed(50, 0), finished(100, 10.0)], "some steps on unchanged workers"),
    ],
)
def test_a_run_that_tells_nothing_is_refused(records: list[Record], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        recorded_run(entries(*records), "here")


def test_a_run_is_work_for_a_market(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal.jsonl") as journal:
        for record in (started(4), said(100, 10.0), finished(200, 20.0)):
            journal.write(record)
    job, source = job_of_run(tmp_path, 8, "linear")
    assert job.work_s == pytest.approx(80.0)
    assert [job.speed(n) for n in (0, 1, 4, 8)] == pytest.approx([0.0, 1.0, 4.0, 8.0])
    assert "200 steps" in source
    assert "100 ms on 4 workers" in source
    slower, _ = job_of_run(tmp_path, 8, "amdahl:0.5")
    assert slower.speed(8) < 2
