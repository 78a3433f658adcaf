"""When the default sampler leaves the Gaussian process: by what it takes, held against what trials take."""

from __future__ import annotations

from typing import Any

import pytest

from elastune.core.journal.records import ProposalAsked, Record, TrialFinished, TrialPaused, TrialResumed, TrialStarted
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.registry import GP_TRIALS, gp_s, resolve
from elastune.tuning.search.suggester import SearchReplay, Suggester, Suggestion

TWO = parse_objectives({"accuracy": "max", "seconds": "min"})
RUNNING, PAUSED = 8, 60


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True)}


def ended(number: int, seconds: float) -> TrialFinished:
    return TrialFinished(number, "complete", {"accuracy": 0.5, "seconds": 1.0}, {}, {}, seconds)


def test_gp_lasts_as_long_as_it_pays() -> None:
    assert resolve("auto", TWO, [], trained=GP_TRIALS - 1) == "gp"
    assert resolve("auto", TWO, [], trained=GP_TRIALS) == "tpe"
    assert resolve("auto", TWO, [], every_s=gp_s(0)) == "gp"
    assert resolve("auto", TWO, [], every_s=0.9 * gp_s(0)) == "tpe"
    assert resolve("gp", TWO, [], every_s=0.0) == "gp", "what is asked for by name stays"
    assert gp_s(1000) > 10 * gp_s(10)


@pytest.mark.parametrize(("seconds", "sampler"), [(60.0, "gp"), (0.01, "tpe")])
def test_what_proposals_take_is_held_against_what_trials_take(seconds: float, sampler: str) -> None:
    suggester = Suggester(space, TWO)
    suggester.tell(asked(suggester).number, ended(0, seconds))
    assert asked(suggester).sampler == sampler


def asked(suggester: Suggester) -> Suggestion:
    found = suggester.ask()
    assert found is not None
    return found


SECONDS = 10.0 * gp_s(1)  # enough for the 8 that run, not for the 60 paused ones beside them


def test_paused_trials_want_no_proposals() -> None:
    suggester = Suggester(space, TWO)
    for _ in range(1 + PAUSED + RUNNING):
        asked(suggester)
    suggester.tell(0, ended(0, SECONDS))
    paused = range(1, 1 + PAUSED)
    suggester.expect({}, paused)
    assert asked(suggester).sampler == "gp"
    suggester.expect({}, list(paused)[2:])  # two have been resumed, one has been proposed
    assert asked(suggester).sampler == "tpe"


def test_a_resumed_study_knows_who_was_paused() -> None:
    """By decision: what a dead controller has cut off goes on before all others, so it counts as running."""
    records: list[Record] = []
    for number in range(1 + PAUSED + RUNNING):
        records += [ProposalAsked(number), TrialStarted(number, {"lr": 0.1}, {}, 0, params={"lr": 0.1})]
    records += [TrialPaused(number, 1, 1.0, 1.0) for number in range(1, 1 + PAUSED)]
    records += [ended(0, SECONDS)]
    resumed: list[Record] = [TrialResumed(1, 1), TrialResumed(2, 1)]
    last = PAUSED + RUNNING  # one that runs

    def proposed(told: list[Record]) -> str:
        recall = SearchReplay(Suggester(space, TWO), [*records, *told], "open")
        for record in [*records, *told]:
            recall.observe(record)
        found = recall.observe(ProposalAsked(1 + PAUSED + RUNNING))
        assert found is not None
        return found.sampler

    assert proposed([]) == "gp"
    assert proposed(resumed) == "tpe"
    assert proposed([TrialPaused(last, 1, 1.0, 1.0), TrialResumed(1, 1)]) == "gp"
    assert proposed([*resumed, TrialPaused(last, 1, 1.0, 1.0, cut_off=True)]) == "tpe"
