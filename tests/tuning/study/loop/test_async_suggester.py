"""Proposals that take their time: what happens meanwhile is heard, and told to the search after them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import TrialFinished, TrialReported, TrialStarted
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.search.objective import Objective
from elastune.tuning.search.suggester import Suggester, Suggestion
from elastune.tuning.study.proposals import Proposals
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune


class Slow:
    """A space that is not answered before it may be."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def __call__(self, trial: Any) -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread():
            self.may.wait(20)
        return {"x": trial.suggest_float("x", 0, 1)}


def patiently(proposals: Proposals) -> Suggestion | None:
    found = proposals.ask({})
    while found is None and proposals.asking:
        found = proposals.ask({})
    return found


@pytest.fixture
def slow():
    space = Slow()
    proposals = Proposals(Suggester(space, [Objective("x", "min")], sampler="tpe", seed=1), inline=False)
    yield space, proposals
    space.may.set()
    proposals.close()


def test_the_search_is_told_after_the_proposal_that_is_on_its_way(slow: tuple[Slow, Proposals]) -> None:
    space, proposals = slow
    space.may.set()
    first = patiently(proposals)
    assert first is not None
    space.may.clear()
    assert proposals.ask({}) is None
    assert proposals.asking
    assert proposals.ready()
    proposals.tell(first.number, TrialFinished(first.number, "complete", {"x": 0.5}))
    proposals.tell(first.number, TrialFinished(first.number, "complete", {"x": 0.5}))
    assert proposals.ask({}) is None, "the first is still on its way"
    space.may.set()
    with pytest.raises(ValueError, match="trial 0 is not open"):  # the second telling: both were heard, in order
        patiently(proposals)


def test_who_chose_itself_waits_for_the_proposal_which_is_not_lost(slow: tuple[Slow, Proposals]) -> None:
    space, proposals = slow
    assert proposals.ask({}) is None
    threading.Timer(0.2, space.may.set).start()
    adopted = proposals.adopt({"x": 0.25})
    assert adopted.values == {"x": 0.25}
    found = proposals.ask({})
    assert found is not None
    assert {found.number, adopted.number} == {0, 1}


def test_errors_of_the_space_are_the_callers() -> None:
    def space(trial: Any) -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no")
        return {"x": trial.suggest_float("x", 0, 1)}

    proposals = Proposals(Suggester(space, [Objective("x", "min")], sampler="random"), inline=False)
    with pytest.raises(UserError, match="no"):
        patiently(proposals)
    assert not proposals.asking
    proposals.close()


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_in_the_background_the_same_is_proposed(sampler: str) -> None:
    def asked(inline: bool) -> list[Suggestion]:
        def space(trial: Any) -> dict[str, Any]:
            return {"x": trial.suggest_int("x", 0, 30)}

        proposals = Proposals(Suggester(space, [Objective("x", "min")], sampler=sampler, seed=4), inline=inline)
        found = []
        while len(found) < 40 and (one := patiently(proposals)) is not None:
            found.append(one)
            proposals.tell(one.number, TrialFinished(one.number, "complete", {"x": float(one.values["x"])}))
        proposals.close()
        return found

    assert asked(inline=True) == asked(inline=False)
    assert len(asked(inline=False)) == (31 if sampler == "grid" else 40)


def test_trials_are_heard_while_the_next_is_thought_of(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    journal = tmp_path / "out" / "journal.jsonl"

    def space(trial: Any) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        if threading.current_thread() is not threading.main_thread() and journal.exists():
            while "trial_started" in journal.read_text() and "trial_reported" not in journal.read_text():
                assert time.monotonic() < deadline, "nobody is heard"
                time.sleep(0.05)
        return {"lr": trial.suggest_float("lr", 0.01, 0.02), "epochs": 3}

    request = StudyRequest(tiny, tmp_path / "out", objectives={"loss": "min"}, sampler="random", trials=2, workers=2)
    tune(request, space=space, cluster=cluster)
    told = [entry.record for entry in read(journal)]
    begun = [k for k, record in enumerate(told) if isinstance(record, TrialStarted)]
    heard = [k for k, record in enumerate(told) if isinstance(record, TrialReported)]
    assert len(begun) == 2
    assert heard[0] < begun[1]
