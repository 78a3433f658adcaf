"""What a study's journal tells of its trials' speeds and lengths."""

from __future__ import annotations

import pytest
from tests.support.studies import Telling

from elastune.core.journal.records import (
    Regrouped,
    Reported,
    TrialProgressed,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
)
from elastune.tuning.study.throughput import BatchTable
from elastune.tuning.study.trial_progress import TrialProgress


def heard(told: Telling, courses: TrialProgress | None = None) -> TrialProgress:
    courses = courses or TrialProgress()
    for entry in told.entries:
        courses.observe(entry)
    return courses


def points(courses: TrialProgress, trial: int) -> dict[int, float]:
    return dict(courses.speeds.of(trial).points)


def test_the_first_report_tells_a_speed_of_whoever_had_the_same_workers_all_the_time() -> None:
    courses = heard(Telling().start(0, workers=2).wait(5.0).report(0, 1, 4.0))
    assert points(courses, 0)[2] == pytest.approx(10 / 4.0)
    assert courses.length_s(0) == pytest.approx(4 * 4.0 * 2)
    changed = Telling().start(0, workers=2).resize(0, 2, 4).wait(5.0).report(0, 1, 4.0)
    assert not heard(changed).speeds.measured(0)
    assert heard(changed).length_s(0) == pytest.approx(4 * 4.0 * 4), "as if it had had four all the time"


def test_speeds_are_measured_between_changes_only() -> None:
    told = Telling().start(0, workers=1).wait(10.0).report(0, 1, 10.0).wait(10.0).report(0, 2, 20.0)
    told.tell(TrialReallocated(0, 1, 2)).wait(3.0).report(0, 3, 23.0)  # on one worker still: says nothing of two
    told.tell(TrialRegrouped(0, Regrouped(2, [0, 1], True, 30, 0.5, 0)))
    told.wait(1.0).tell(TrialProgressed(0, 32)).wait(2.0).tell(TrialProgressed(0, 36))
    courses = heard(told)
    assert dict(courses.speeds._rates(0)) == pytest.approx({1: 1.0, 2: 2.0})
    assert list(courses.pauses_s) == [0.5]
    assert courses.unmeasured == [0]


def test_replicas_count_as_one() -> None:
    courses = heard(Telling().start(0, workers=4).wait(1.0).report(0, 1, 2.0), TrialProgress(replica=2))
    assert points(courses, 0)[2] == pytest.approx(5.0)


def test_who_is_in_its_first_epoch_takes_at_least_so_long() -> None:
    courses = heard(told := Telling().start(0, workers=2).start(1, workers=1).wait(3.0).report(1, 1, 3.0))
    known, running = courses.lengths(4, told.now)
    assert (known.trial, known.at_least, known.seconds) == (1, False, pytest.approx(12.0))
    assert (running.trial, running.at_least, running.seconds) == (0, True, pytest.approx(24.0))
    heard(Telling(at=told.now).pause(0, 0, 3.0), courses)
    assert [one.trial for one in courses.lengths(4, told.now)] == [1], "who runs no more tells nothing"


def test_told_again_it_knows_the_same() -> None:
    told = Telling()
    for trial, batch in enumerate((64, 128, 1024, 64)):
        told.start(trial, workers=1)
        for epoch, (workers, seconds) in enumerate(((1, 10.0), (1, 20.0), (2, 26.0), (2, 32.0)), 1):
            if epoch == 3:
                told.resize(trial, 1, 2)
            report = Reported(epoch, 10 * epoch, batch * 10 * epoch, seconds, {}, epochs=4)
            told.wait(6.0).tell(TrialReported(trial, report, workers))
    whole, again = heard(told, TrialProgress(BatchTable())), TrialProgress(BatchTable())
    for entry in told.entries:
        again.observe(entry)
        for trial in again.progress:
            again.speeds.of(trial)  # whoever asks meanwhile changes nothing
    for trial in range(4):
        assert again.speeds.of(trial) == whole.speeds.of(trial)
        assert again.length_s(trial) == whole.length_s(trial)
