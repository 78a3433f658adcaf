"""A study whose controller is killed again and again loses no finished trial and repeats none."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

from elastune.core.journal.files import read
from elastune.core.journal.records import ProposalAsked, Record, StudyFinished, TrialFinished, TrialStarted
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.search.suggester import SearchReplay, Suggester
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune
from elastune.tuning.study.validate import check

TRIALS = 14


def request(program: Program, out: Path, resume: bool) -> StudyRequest:
    return StudyRequest(
        program,
        out,
        objectives={"loss": "min", "seconds": "min"},
        sampler="genetic:demes=1,population=3",
        trials=TRIALS,
        workers=2,
        config={"pause_s": 0.004},
        resume=resume,
    )


def records(out: Path) -> list[Record]:
    journal = out / "journal.jsonl"
    return [entry.record for entry in read(journal)] if journal.exists() else []


def finished(out: Path) -> list[TrialFinished]:
    return [record for record in records(out) if isinstance(record, TrialFinished)]


def proposed_again(asked: StudyRequest) -> tuple[dict[int, object], dict[int, object]]:
    """What each trial tried, and what a search proposes that knows the journal up to where it was asked, no more."""
    told = records(asked.out)
    tried = {record.trial: record.params for record in told if isinstance(record, TrialStarted)}
    plan, again = check(asked, None), dict[int, object]()
    for at, record in enumerate(told):
        if isinstance(record, ProposalAsked) and record.trial in tried:
            objectives = plan.pricing.objectives
            suggester = Suggester(plan.space, objectives, plan.pricing.learnt, sampler=asked.sampler, seed=asked.seed)
            recall = SearchReplay(suggester, told[: at + 1], "open")
            found = [recall.observe(each) for each in told[: at + 1]][-1]
            again[record.trial] = found.params if found is not None else None
    return tried, again


def test_kills_at_any_moment(cluster: LocalCluster, tmp_path: Path, tiny: Program, controller, until, all_gone) -> None:
    out, rng, kept = tmp_path / "out", random.Random(3), list[TrialFinished]()
    for attempt in range(2):
        goal = len(kept) + rng.randint(2, 4)
        running = controller(lambda resume=attempt > 0: tune(request(tiny, out, resume)))
        until(lambda goal=goal: len(finished(out)) >= goal)
        time.sleep(rng.uniform(0.0, 0.08))
        family = running.family()
        running.signal(signal.SIGKILL)
        assert running.end() == -9
        all_gone(family)
        now = finished(out)
        assert now[: len(kept)] == kept
        kept = now
    study = tune(request(tiny, out, True), cluster=cluster)

    everything = finished(out)
    assert everything[: len(kept)] == kept
    assert [trial.number for trial in study.trials] == [record.trial for record in everything]
    assert max(Counter(record.trial for record in everything).values()) == 1
    assert len(everything) == TRIALS
    assert all(record.state == "complete" for record in everything)
    started = [record.trial for record in records(out) if isinstance(record, TrialStarted)]
    assert max(Counter(started).values()) == 1, "a number was given out twice"
    assert set(started) >= {record.trial for record in everything}
    tried, again = proposed_again(request(tiny, out, True))
    assert again == tried, "proposals follow from the journal alone, whenever the controller died"
    assert isinstance(records(out)[-1], StudyFinished)
    assert cluster.free == cluster.capacity
    again = tune(request(tiny, out, True), cluster=cluster)
    assert again.trials == study.trials


def test_an_interrupted_study_ends_at_once_and_goes_on(
    cluster: LocalCluster, tmp_path: Path, tiny: Program, controller, until, all_gone
) -> None:
    out = tmp_path / "out"
    running = controller(lambda: tune(request(tiny, out, False)))
    until(lambda: len(finished(out)) >= 2)
    family = running.family()
    running.signal(signal.SIGINT)
    assert running.end() == 0
    all_gone(family)
    end = records(out)[-1]
    assert isinstance(end, StudyFinished)
    assert end.reason == "interrupted"
    assert len(tune(request(tiny, out, True), cluster=cluster).complete) == TRIALS
