from dataclasses import replace

from tests.support.studies import Telling

from elastune.core.journal.records import (
    Entry,
    Reported,
    RunFailed,
    RunStarted,
    StudyStarted,
    TrialFinished,
    TrialStarted,
)
from elastune.report.overviews import front_trials, gather_run, gather_study


def entries(*records):
    return [Entry(float(i), record) for i, record in enumerate(records)]


def report(step):
    return Reported(epoch=0, step=step, samples=step, seconds=float(step), metrics={"loss": 1.0 / step})


def test_a_resumed_run_takes_back_what_it_reported_beyond_its_checkpoint():
    start = RunStarted("a.py", {}, 0, {})
    lost = RunFailed("worker_lost", "gone", rank=1)
    again = replace(start, resumed_step=20)
    run = gather_run(entries(start, report(10), report(20), report(30), lost, again, report(25), report(30)))
    assert [r.step for r in run.reports] == [10, 20, 25, 30]
    assert run.failed is None
    assert run.started.resumed_step == 20


def test_no_run_and_no_study():
    assert gather_run([]) is None
    assert gather_study(entries(RunStarted("a.py", {}, 0, {}))) is None


def test_trials_keep_the_order_they_ended_in():
    records = [StudyStarted({"objectives": {"loss": "min"}})]
    records += [TrialStarted(i, {}, {}, seed=i) for i in range(3)]
    records += [TrialFinished(i, "complete", values={"loss": float(i)}) for i in (2, 0)]
    study = gather_study(entries(*records))
    assert [trial.trial for trial in study.ended] == [2, 0]
    assert [trial.trial for trial in study.trials] == [0, 1, 2]
    assert study.trials[1].finished is None


def test_a_trial_run_again_after_a_crash_forgets_its_first_attempt():
    records = [
        StudyStarted({}),
        TrialStarted(0, {}, {}, seed=0),
        TrialFinished(0, "infeasible", reason="lost"),
        TrialStarted(0, {}, {}, seed=0),
    ]
    study = gather_study(entries(*records))
    assert study.trials[0].finished is None
    assert study.ended == ()


def test_a_resumed_study_is_unfinished_again(study_entries):
    again = Entry(study_entries[-1].at + 1, replace(study_entries[0].record, resumed=True))
    assert gather_study(study_entries).finished is not None
    assert gather_study([*study_entries, again]).finished is None


def test_front_is_what_nothing_else_beats(study_entries):
    study = gather_study(study_entries)
    best = set(front_trials(study))
    values = {t.trial: (t.value("accuracy"), t.value("seconds")) for t in study.trials if t.complete}

    def beaten(a, b):
        return b[0] >= a[0] and b[1] <= a[1] and b != a

    assert best == {n for n, v in values.items() if not any(beaten(v, other) for other in values.values())}
    assert 1 < len(best) < len(values)


def test_values_of_trials_without_a_result_count_for_nothing(study_entries):
    failed = [t for t in gather_study(study_entries).trials if not t.complete]
    assert len(failed) == 5
    assert all(t.value("accuracy") is None for t in failed)


def test_workers_that_changed_are_told_on_average():
    journal = Telling().start(0, workers=2).complete(0, 0.9, 10.0, worker_seconds=20.0)
    journal.start(1, workers=1).resize(1, 1, 4).complete(1, 0.9, 10.0, worker_seconds=27.0)
    study = gather_study(journal.start(2, workers=3).entries)
    assert [trial.workers for trial in study.trials] == ["2", "2.7", "3"]
