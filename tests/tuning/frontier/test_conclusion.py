"""The pick and the one conclusion: what is said agrees with itself, and with what was shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.frontiers import FREE, MODEL, TARGETED, cell

from elastune.core.journal.records import FrontierRow
from elastune.tuning.frontier.answer import Advice, PickedRow, answer_of, noise_scale_hint, pick_row
from elastune.tuning.frontier.criteria import FrontierCriteria
from elastune.tuning.search.objective import Objective


def modelled(workers: int, seconds: float, factor: float | None = 1.25, **changes: Any) -> FrontierRow:
    more = {"seconds": seconds, "seconds_label": "modelled", "seconds_factor": factor, **changes}
    return cell("tuned", workers, 0.95, **more)


def test_the_pick_is_shown_to_reach_the_target_and_its_workers_pay() -> None:
    rows = [cell(seconds=8.0), cell("tuned", 2, seconds=3.0), cell("tuned", 4, seconds=1.0, verdict="not shown")]
    assert pick_row(rows, TARGETED) == PickedRow(1)
    dear = [cell(seconds=8.0), cell("tuned", 2, seconds=6.0, cost=1.4), cell("tuned", 4, seconds=4.0, cost=2.1)]
    assert pick_row(dear, TARGETED) == PickedRow(0), "1.33 times as fast for 1.4 times the cost, 2 times for 2.1"
    worth = [cell(seconds=8.0), cell("tuned", 4, seconds=3.9, cost=1.95)]
    assert pick_row(worth, TARGETED) == PickedRow(1), "2.05 times as fast for 1.95 times the cost"


def test_without_a_target_the_pick_is_among_the_most_accurate_that_hold() -> None:
    """A knee once took a training that was slower, for no gain."""
    rows = [cell(quality=0.920, seconds=1.0), cell("tuned", 1, 0.920, seconds=2.1)]
    assert pick_row(rows, FREE) == PickedRow(0)
    better = [cell(quality=0.920, seconds=1.0), cell("tuned", 1, 0.950, seconds=2.1)]
    assert pick_row(better, FREE) == PickedRow(1), "worse by more than the margin is no equal"


def test_a_tie_by_the_model_prefers_fewer_workers() -> None:
    rows = [cell(seconds=8.0), modelled(4, 2.2), modelled(8, 2.0)]
    assert pick_row(rows, TARGETED) == PickedRow(1, 2), "2.2 is within 1.25 of 2.0"
    rows = [cell(seconds=8.0), modelled(4, 2.6), modelled(8, 2.0)]
    assert pick_row(rows, TARGETED) == PickedRow(2)
    unchecked = [cell(seconds=8.0), modelled(4, 2.6, None), modelled(8, 2.0, None)]
    assert pick_row(unchecked, TARGETED) == PickedRow(0, 2), "nothing shows that it is faster"
    measured = [cell("tuned", 2, seconds=2.1), cell("tuned", 4, seconds=2.0)]
    assert pick_row(measured, TARGETED) == PickedRow(1), "measured is measured"


def test_where_nothing_is_shown_the_nearest_is_told_as_such() -> None:
    rows = [cell(quality=0.5, verdict="falls"), cell("tuned", 2, 0.905, verdict="not shown"), cell("tuned", 4, 0.9)]
    rows[2] = replace(rows[2], verdict="not shown")
    assert pick_row(rows, TARGETED) == PickedRow(1)
    assert said(rows) == (
        "No settings are shown to reach 0.9: nearest are tuned settings on 2 workers, accuracy 0.905 (0.895 to 0.915)."
    )
    assert pick_row(rows[:1], TARGETED) == PickedRow(None)
    assert said(rows[:1]) == "No settings were found that may reach 0.9; search longer."


def said(rows: list[FrontierRow], by: FrontierCriteria = TARGETED, counts: tuple[int, ...] = (1, 2, 4)) -> str:
    return answer_of(rows, by, counts).sentence


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([cell(), cell(workers=2), cell(workers=4)], "(batch and lr x workers) reaches it up to 4 workers"),
        ([cell(), cell(workers=2)], "on 4 workers it diverges"),
        ([cell(verdict="falls")], "does not help: on 1 worker it falls to"),
        ([cell(workers=2)], ""),
        (
            [cell(), cell(workers=2, quality=0.89, verdict="not shown"), cell(workers=4, quality=0.7, verdict="falls")],
            "The naive rule (batch and lr x workers) reaches it up to 1 worker (0.900 (0.890 to 0.910) on 1); on 2 "
            "workers it is not shown to: 0.890 (0.880 to 0.900), on 4 workers it falls to 0.700 (0.690 to 0.710).",
        ),
    ],
)
def test_the_answer_says_how_far_the_naive_rule_goes(rows: list[FrontierRow], words: str) -> None:
    result = answer_of(rows, TARGETED, (1, 2, 4)).naive_rule
    assert words in result
    assert bool(words) is bool(result)


def test_a_loss_rises() -> None:
    by = replace(FREE, quality=Objective("loss", "min", low=0.0))
    result = Advice(by, (1, 2), (cell(quality=0.2), cell(workers=2, quality=0.5, verdict="falls")), 0).naive_rule()
    assert "on 2 workers it rises to 0.500" in result
    assert "falls" not in result


def test_the_reasons_say_what_was_tested() -> None:
    compared = cell("tuned", 2, loss=0.002, loss_bound=0.006, margin=0.01, pairs=3)
    result = Advice(FREE, (1, 2), (cell(), compared), 1).reasons()
    assert result[0].weight == "decides"
    assert result[0].text == (
        "accuracy against 1 worker with the program's own settings, paired by 3 seeds, on the same test samples: 0.002 "
        "worse on average, worse by at most 0.006 (one-sided t-test at 95 %), below the margin of 0.01"
    )
    few = Advice(FREE, (1, 2), (cell(), cell("tuned", 2, verdict="not shown", pairs=1)), 1).reasons()
    assert "not shown, 1 seed in common, where at least 2 are needed" in few[0].text
    (test, *_) = Advice(TARGETED, (1,), (cell(test_samples=400),), 0).reasons()
    assert test.text == (
        "accuracy: the 95 % interval, 0.890 to 0.910, of 3 seeds and the error of 400 test samples, lies at or above "
        "0.9"
    )
    (untold, *_) = Advice(TARGETED, (1,), (cell(),), 0).reasons()
    assert "evaluated_on of session.report" in untold.text


def test_the_models_own_error_stands_beside_its_times() -> None:
    _, times, tie = Advice(TARGETED, (1, 4, 8), (cell(), modelled(4, 2.2), modelled(8, 2.0)), 1, 2).reasons()
    assert "predicted / measured was 0.8 on 1 cell that could be measured" in times.text
    assert "wrong by a factor of 1.25" in times.text
    assert tie.text == "8 workers would be 1.1 times as fast by the step-time model, within its error: fewer are taken"
    unchecked = replace(TARGETED, times=replace(TARGETED.times, errors={}))
    assert "could not be checked" in Advice(unchecked, (1, 4), (cell(), modelled(4, 2.2, None)), 1).reasons()[1].text


def test_the_noise_scale_is_a_hint_that_trainings_outweigh() -> None:
    """It once stood beside "hold up to 16 workers" and said "no more than 1 worker"."""
    chosen = cell("tuned", 16, noise_scale=13.8, noise_scale_error=1.1)
    *_, hint = Advice(TARGETED, (1, 16), (cell(), chosen), 1).reasons()
    assert hint.weight == "hint"
    assert hint.text.startswith("gradient noise scale 14 ± 1.1 at the end of training")
    assert hint.text.endswith("was trained and tested above, which outweighs this estimate")
    within = noise_scale_hint(cell(noise_scale=412.3, noise_scale_error=29.6), MODEL)
    assert "is work for 41 workers" in within
    assert within.endswith("the pick's batch of 10 is within it")
    assert "work for" not in noise_scale_hint(cell(noise_scale=400.0), replace(MODEL, per_sample_s=0.0))
    assert noise_scale_hint(cell(), MODEL) == ""
