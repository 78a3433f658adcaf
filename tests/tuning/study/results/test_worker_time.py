"""Shares of a study's worker-seconds: each second once, and together all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.studies import SETTINGS, Telling, stopping_study

from elastune.core.journal.records import Regrouped, StudyStarted, TrialRegrouped
from elastune.tuning.study.results import FATES, Study, worker_time


def shares(told: Telling) -> dict[str, float]:
    return worker_time(Study.of(Path("out"), told.entries))


def test_each_second_counts_once() -> None:
    journal = Telling({**SETTINGS, "workers": 4}).start(0, lr=0.1).wait(20)
    journal.tell(TrialRegrouped(0, Regrouped(1, [0, 1], True, 9, 2.5, 0))).wait(
        20
    )  # 20 + 2 x 20, of which 2 x 2.5 stood
    journal.complete(0, 0.9, 40.0).start(1, lr=0.1).wait(40).complete(1, 0.5, 50.0)  # worse in both
    journal.start(2, lr=0.1).wait(20).pause(2, 1, 20.0, "rank 3 of 3").finish()
    assert shares(journal) == pytest.approx(
        {
            "front": 55 / 400,
            "complete": 40 / 400,
            "paused": 20 / 400,
            "infeasible": 0.0,
            "unfinished": 0.0,
            "resizing": 5 / 400,
            "waiting": 280 / 400,
        }
    )


def test_they_sum_to_one() -> None:
    result = shares(stopping_study(40))
    assert sum(result.values()) == pytest.approx(1.0)
    assert list(result) == list(FATES)
    assert min(result.values()) >= 0.0
    assert result["resizing"] > 0.0


def test_more_workers_than_it_had_leave_nothing_to_wait() -> None:
    journal = Telling({**SETTINGS, "workers": 1}).start(0, lr=0.1).start(1, lr=0.1).wait(10)
    journal.complete(0, 0.9, 10.0).complete(1, 0.8, 9.0).finish()
    assert shares(journal) == pytest.approx({**dict.fromkeys(FATES, 0.0), "front": 1.0})


def test_a_resumed_study_waited_on_the_workers_that_it_had_then() -> None:
    """10 s on 4, of which one trial had 1; a night without a controller; 30 s on 1, all of them a trial's."""
    journal = Telling({**SETTINGS, "workers": 4}).start(0, lr=0.1).wait(10).complete(0, 0.9, 10.0).finish().wait(30000)
    journal.tell(StudyStarted({**SETTINGS, "workers": 1}, {}, resumed=True)).start(1, lr=0.1)
    journal.wait(30).complete(1, 0.95, 30.0).finish()
    assert shares(journal) == pytest.approx({**dict.fromkeys(FATES, 0.0), "front": 40 / 70, "waiting": 30 / 70})
    study = Study.of(Path("out"), journal.entries)
    assert (study.workers, study.seconds, study.worker_seconds) == pytest.approx((1, 40.0, 70.0))


def test_a_study_that_took_no_time_has_no_shares() -> None:
    assert shares(Telling().finish()) == {}
