"""The one fold of trial records: what it says after each entry, and that views of it need nothing else."""

from __future__ import annotations

from tests.support.studies import SETTINGS, Telling, stopping_study

from elastune.core.journal.folds import TrialTable, fold
from elastune.core.journal.records import Adopted, StudyStarted, TrialAdopted


def test_a_life_from_its_start_to_its_end() -> None:
    journal = Telling().wait(5).start(3, lr=0.1, workers=2).wait(10).report(3, 1, 10.0, workers=1.5, accuracy=0.5)
    journal.report(3, 1, 10.0, workers=1.5, loss=2.0).wait(1).pause(3, 1, 11.0, "not among the best", cut_off=True)
    table = fold(journal.entries)
    life = table.trials[3]
    assert (life.state, life.epoch, life.epochs, life.epochs_done) == ("paused", 1, 4, 1)
    assert life.metrics == {"accuracy": 0.5, "loss": 2.0}, "all reports after an epoch count together"
    assert (life.seconds, life.worker_seconds, life.average, life.first_workers) == (11.0, 11.0, 1.5, 2)
    assert [workers for _, workers in life.reports] == [2, 2]
    assert (list(table.cut_off), table.of("paused"), list(table.ended)) == ([3], [3], [])

    journal.wait(4).resume(3, 1).wait(20).resize(3, 1, 3).report(3, 4, 30.0, accuracy=0.9)
    journal.complete(3, 0.9, 31.0, worker_seconds=50.0)
    table = fold(journal.entries)
    life = table.trials[3]
    assert (life.state, life.seconds, life.worker_seconds, life.workers) == ("over", 31.0, 50.0, 3)
    assert life.metrics == {"accuracy": 0.9}
    assert life.last_start_at - life.started_at == 15.0
    assert (list(table.cut_off), table.of("paused"), list(table.ended)) == ([], [], [3])
    assert (table.seconds, life.last_s) == (40.0, 40.0)


def test_a_trial_that_is_started_again_forgets_what_it_did() -> None:
    journal = Telling().start(0, lr=0.1).wait(2).report(0, 2, 2.0).fail(0, "lost").start(1, lr=0.1).start(0, lr=0.2)
    table = fold(journal.entries)
    assert (table.trials[0].reports, table.trials[0].finished, table.trials[0].state) == ((), None, "running")
    assert (list(table.trials), list(table.ended)) == ([0, 1], [])


def test_what_was_never_started_is_left_out() -> None:
    assert fold(Telling().complete(7, 0.9, 1.0).pause(8, 1, 1.0).entries).trials == {}


def test_entry_by_entry_the_table_is_that_of_the_whole() -> None:
    entries = stopping_study(30).entries
    table = TrialTable()
    for count, entry in enumerate(entries, 1):
        table.observe(entry)
        if count % 17 == 0:
            whole = fold(entries[:count])
            assert (table.trials, table.spans, table.seconds) == (whole.trials, whole.spans, whole.seconds)


def test_spans_tell_who_had_how_many_workers_when() -> None:
    journal = Telling().start(0, lr=0.1, workers=2).wait(10).pause(0, 1, 10.0, "rank 3 of 4")
    journal.wait(5).resume(0, 1).wait(10).resize(0, 1, 3, "trial 7 ended").wait(10).complete(0, 0.9, 30.0)
    journal.start(1, lr=0.1).wait(7).start(2, lr=0.1).tell(StudyStarted(dict(SETTINGS), resumed=True))
    journal.wait(3).start(1, lr=0.1).wait(4)
    journal.fail(2, "never started again")
    shown = [
        (s.trial, s.begin_s, s.end_s, s.workers, s.began_as, s.ended, s.reason) for s in fold(journal.entries).spans
    ]
    assert shown == [
        (0, 0.0, 10.0, 2, "started", "paused", "rank 3 of 4"),
        (0, 15.0, 25.0, 1, "resumed", "regrouped", "trial 7 ended"),
        (0, 25.0, 35.0, 3, "regrouped", "complete", ""),
        (1, 35.0, 42.0, 1, "started", "lost", ""),
        (2, 42.0, 42.0, 1, "started", "lost", ""),
        (1, 45.0, 49.0, 1, "started", "running", ""),
    ]
    assert fold(journal.entries).spans[2].worker_seconds == 30.0


def test_regrouping_to_the_same_number_is_one_spell() -> None:
    journal = Telling().start(0, lr=0.1, workers=2).wait(10).resize(0, 2, 2).wait(10).complete(0, 0.9, 20.0)
    assert [span.end_s for span in fold(journal.entries).spans] == [20.0]


def test_an_adopted_trial_is_the_same_life_and_a_new_span() -> None:
    journal = Telling().start(0, lr=0.1, workers=2).start(1, lr=0.1).wait(10).report(0, 1, 10.0, accuracy=0.5).wait(100)
    journal.tell(StudyStarted(dict(SETTINGS), resumed=True)).wait(1).tell(TrialAdopted(0, Adopted([0], 12, 0.3, [1])))
    journal.pause(1, 0, 10.0, cut_off=True).wait(5).complete(0, 0.9, 116.0)
    table = fold(journal.entries)
    life = table.trials[0]
    assert (life.state, len(life.reports), life.last_start_at, life.workers) == ("over", 1, life.started_at, 1)
    shown = [(s.trial, s.begin_s, s.end_s, s.workers, s.began_as, s.ended) for s in table.spans]
    assert shown == [
        (0, 0.0, 10.0, 2, "started", "lost"),
        (1, 0.0, 10.0, 1, "started", "lost"),
        (0, 11.0, 16.0, 1, "adopted", "complete"),
    ]
