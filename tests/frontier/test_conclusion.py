"""The pick and the one conclusion: what is said agrees with itself, and with what was shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastune.frontier.advice import Advice, noise_scale_hint
from elastune.frontier.conclusion import pick_row
from elastune.frontier.criteria import FrontierCriteria
from elastune.journal.records import FrontierRow
from elastune.search.space.objective import Objective, parse_objectives
from elastune.testing.frontiers import FREE, MODEL, TARGETED, cell

AXES = parse_objectives({"accuracy": "max", "seconds": "min", "cost": "min"})


def modelled(workers: int, seconds: float, factor: float | None = 1.25, **changes: Any) -> FrontierRow:
    more = {"seconds": seconds, "seconds_label": "modelled", "seconds_factor": factor, **changes}
    return cell("tuned", workers, 0.95, **more)


def test_the_pick_is_the_fastest_that_is_shown_to_reach_the_target() -> None:
    rows = [cell(seconds=8.0), cell("tuned", 2, seconds=3.0), cell("tuned", 4, seconds=1.0, verdict="not shown")]
    assert pick_row(AXES, rows, TARGETED) == (1, None)


def test_a_tie_by_the_model_prefers_fewer_workers() -> None:
    rows = [cell(seconds=8.0), modelled(4, 2.2), modelled(8, 2.0)]
    assert pick_row(AXES, rows, TARGETED) == (1, 2), "2.2 is within 1.25 of 2.0"
    rows = [cell(seconds=8.0), modelled(4, 2.6), modelled(8, 2.0)]
    assert pick_row(AXES, rows, TARGETED) == (2, None)
    unchecked = [cell(seconds=8.0), modelled(4, 2.6, None), modelled(8, 2.0, None)]
    assert pick_row(AXES, unchecked, TARGETED) == (0, 2), "nothing shows that it is faster"
    measured = [cell("tuned", 2, seconds=2.1), cell("tuned", 4, seconds=2.0)]
    assert pick_row(AXES, measured, TARGETED) == (1, None), "measured is measured"


def test_where_nothing_is_shown_the_nearest_is_told_as_such() -> None:
    rows = [cell(quality=0.5, verdict="falls"), cell("tuned", 2, 0.905, verdict="not shown"), cell("tuned", 4, 0.9)]
    rows[2] = replace(rows[2], verdict="not shown")
    assert pick_row(AXES, rows, TARGETED) == (1, None)
    said = Advice(TARGETED, (1, 2, 4), tuple(rows), 1).answer()
    assert said.startswith("No settings are shown to reach the target 0.9: nearest are 2 workers with tuned settings")
    assert pick_row(AXES, rows[:1], TARGETED) == (None, None)
    assert "search longer" in Advice(TARGETED, (1,), tuple(rows[:1]), None).answer()


def said(rows: list[FrontierRow], by: FrontierCriteria = TARGETED, counts: tuple[int, ...] = (1, 2, 4)) -> str:
    chosen, faster = pick_row(AXES, rows, by)
    return Advice(by, counts, tuple(rows), chosen, faster).answer()


def test_the_answer_names_one_count_and_how_far_the_naive_rule_goes() -> None:
    rows = [cell(), cell(workers=2, quality=0.89, verdict="not shown"), cell(workers=4, quality=0.7, verdict="falls")]
    answer = said([*rows, modelled(4, 2.0, quality_label="emulated")])
    assert answer == (
        "Use 4 workers with tuned settings (batch 40, lr 0.1): accuracy 0.950 (0.940 to 0.960), emulated, reaches the "
        "target 0.9, and training takes 2 s (modelled, ×÷ 1.25), 4 times (3.2 to 5 within the model's error) as fast "
        "as 1 worker with the program's own settings. The naive rule (batch and lr x workers) reaches it up to 1 "
        "worker (0.900 (0.890 to 0.910) on 1); on 2 workers it is not shown to: 0.890 (0.880 to 0.900), on 4 workers "
        "it falls to 0.700 (0.690 to 0.710)."
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [cell(), cell(workers=2), cell(workers=4)],
            "(batch and lr x workers) reaches it up to 4 workers",
        ),
        ([cell(), cell(workers=2)], "on 4 workers it diverges"),
        ([cell(verdict="falls")], "does not help: on 1 worker it falls to"),
        ([cell(workers=2)], "own settings diverged at 1 worker"),
        ([cell()], "Use 1 worker with its own settings (batch 10, lr 0.1)"),
    ],
)
def test_answers(rows: list[FrontierRow], words: str) -> None:
    assert words in said(rows)


def test_a_loss_rises() -> None:
    by = replace(FREE, quality=Objective("loss", "min", low=0.0))
    answer = Advice(by, (1, 2), (cell(quality=0.2), cell(workers=2, quality=0.5, verdict="falls")), 0).answer()
    assert "on 2 workers it rises to 0.500" in answer
    assert "falls" not in answer


def test_the_reasons_say_what_was_tested() -> None:
    compared = cell("tuned", 2, loss=0.002, loss_bound=0.006, margin=0.01, pairs=3)
    found = Advice(FREE, (1, 2), (cell(), compared), 1).reasons()
    assert found[0].weight == "decides"
    assert found[0].text == (
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
    assert "a factor of 1.25 either way" in times.text
    assert tie.text == "8 workers would be 1.1 times as fast by the step-time model, within its error: fewer are taken"
    unchecked = replace(TARGETED, times=replace(TARGETED.times, errors={}))
    assert "could not be checked" in Advice(unchecked, (1, 4), (cell(), modelled(4, 2.2, None)), 1).reasons()[1].text
    assert "by an unchecked model" in Advice(unchecked, (1, 4), (cell(), modelled(4, 2.2, None)), 1).answer()


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
