"""A study in words: what it says is what the journal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.studies import SETTINGS, Telling, stopping_study

from elastune.core.journal.records import TrialPaused
from elastune.report.explain import Explanation, explain
from elastune.tuning.study.results import Study


def explained(journal: Telling) -> dict[str, tuple[str, ...]]:
    return {part.title: part.lines for part in explain(Study.of(Path("out"), journal.entries)).parts}


def front_of(*values: tuple[float, float], lr: float = 0.01) -> Telling:
    journal = Telling()
    for number, (accuracy, seconds) in enumerate(values):
        journal.start(number, lr=lr).wait(60).complete(number, accuracy, seconds)
    return journal


def test_a_whole_study_in_words() -> None:
    result = stopping_study(40)
    text = explain(Study.of(Path("out"), result.entries))
    assert isinstance(text, Explanation)
    parts = explained(result)
    assert list(parts) == [
        "The front",
        "Which trial to take",
        "How sure the pick is",
        "What decides each objective",
        "What was stopped early",
        "What failed",
        "Where the time went",
        "What to try next",
    ]
    assert all(line in str(text) for lines in parts.values() for line in lines)
    assert any(line.startswith("accuracy: lr ") for line in parts["What decides each objective"])
    assert "diverged: loss is NaN at step 12" in parts["What failed"][1]
    assert "rank 3 of 4 at epoch 1" in " ".join(parts["What was stopped early"])
    assert "While trials ran, their workers changed 1 time." in parts["Where the time went"]


def test_the_front_says_what_a_step_costs() -> None:
    parts = explained(front_of((0.9, 10.0), (0.95, 30.0), (0.8, 40.0), (0.951, 90.0)))
    lines = parts["The front"]
    assert lines[0] == "No trial beats these 3 in everything: accuracy from 0.9 to 0.951; seconds from 10 s to 1.5 min."
    pick, command, other, again = parts["Which trial to take"]
    assert pick.startswith("The pick is trial 1 (0.95, 30 s): the fastest within 1% of the best accuracy.")
    assert pick.endswith("It was there after 2.0 min, everything before it counted.")
    assert other == "Or trial 3 (0.951, 1.5 min): the best accuracy."
    assert command.startswith("elastune run examples/digits.py --workers 1")
    assert again == command, "these trials have the same settings"
    assert lines[1:] == (
        "accuracy 0.9 -> 0.95 (trial 0 -> 1): seconds +20 s (worse).",
        "accuracy 0.95 -> 0.951 (trial 1 -> 3): seconds +1.0 min (worse).",
    )


def test_one_objective_and_no_result() -> None:
    journal = Telling({**SETTINGS, "objectives": {"accuracy": "max"}})
    journal.start(0, lr=0.1).wait(1).fail(0, "exception: no")
    assert explained(journal)["The front"] == ("No trial has a result yet.",)
    assert explained(journal)["What failed"] == ("1 trial of 1 gave no result.", "trial 0: exception: no")
    journal.start(1, lr=0.1).wait(9).complete(1, 0.75, 9.0)
    (line,) = explained(journal)["The front"]
    assert line == "The best accuracy is 0.75, by trial 1. It was there after 10 s, everything before it counted."


def test_a_long_front_is_told_in_a_few_steps() -> None:
    lines = explained(front_of(*((0.5 + 0.01 * i, 10.0 + i) for i in range(30))))["The front"]
    assert len(lines) == 1 + 6
    assert lines[1].startswith("accuracy 0.5 ->")
    assert "-> 0.79 " in lines[-1]


def test_it_is_sure_only_where_seeds_repeat() -> None:
    result = front_of((0.9, 10.0), (0.95, 30.0))
    assert explained(result)["How sure the pick is"][0].startswith("Unknown: each configuration was trained once")

    def repeated(spread: float) -> tuple[str, ...]:
        again = Telling()
        for number, (lr, accuracy, seconds) in enumerate([(0.1, 0.90, 10.0), (0.2, 0.95, 30.0), (0.3, 0.96, 99.0)]):
            for seed in range(3):
                value = accuracy + spread * (seed - 1)
                again.start(10 * number + seed, seed=seed, lr=lr).wait(1)
                again.complete(10 * number + seed, value, seconds + abs(seed - 1))
        return explained(again)["How sure the pick is"]

    (line,) = repeated(0.02)
    assert "varies by 0.02 (standard deviation, 6 degrees of freedom)" in line
    assert "no different from trials" in line
    (line,) = repeated(0.0001)
    assert "1e-4" in line
    assert "21" not in line.split("no different from")[-1], "trial 21 is 0.01 better: a hundred deviations"


def test_what_the_study_cut_off_was_not_stopped_by_the_search() -> None:
    journal = Telling().start(0, lr=0.1).wait(5).pause(0, 1, 5.0, "rank 9 of 9").start(1, lr=0.1)
    journal.wait(5).pause(1, 3, 5.0, "a budget of 10 s", cut_off=True).finish("a budget of 10 s")
    assert explained(journal)["What was stopped early"] == (
        "1 trial paused after epoch 1 and did not go on; each can be resumed.",
        "trial 0: rank 9 of 9",
        "1 trial ran when the study ended (1); --resume goes on with them.",
    )


def test_who_waited_for_idle_workers_is_told_apart() -> None:
    journal = Telling().start(0, lr=0.1).wait(5).tell(TrialPaused(0, 1, 5.0, 5.0, "held back", cut_off=True, held=True))
    assert explained(journal.finish("a budget of 10 s"))["What was stopped early"] == (
        "1 trial waited for idle workers when the study ended (0); --resume goes on with them.",
    )


def test_worker_time_adds_up() -> None:
    journal = Telling({**SETTINGS, "workers": 2}).start(0, lr=0.1).start(1, lr=0.1).wait(30).fail(1, "diverged", 30.0)
    journal.wait(30).complete(0, 0.9, 60.0).start(2, lr=0.1).wait(40).pause(2, 1, 40.0, "rank 2 of 2").finish()
    line, end = explained(journal)["Where the time went"]
    assert end == "The study ended: 40 trials."
    assert line == (
        "1.7 min on 2 workers: 30% trials on the final front, 20% trials that were stopped early or paused, "
        "15% trials that failed or broke a constraint, 35% waiting."
    )


def test_a_bound_that_the_front_sits_on_is_named() -> None:
    lines = explained(front_of(*((0.5 + 0.1 * i, 10.0 + i) for i in range(5)), lr=0.95))["What to try next"]
    assert lines == ("5 of the best 5 trials sit at the upper bound 1 of lr: try larger values, if it may have them.",)
    lines = explained(front_of(*((0.5 + 0.1 * i, 10.0 + i) for i in range(5)), lr=0.01))["What to try next"]
    assert lines == ("The front lies within the space: no bound of it limits the front.",)


def test_a_choice_that_all_of_the_best_made_is_named() -> None:
    journal = Telling()
    for number in range(6):
        journal.start(number, optimizer="adam", lr=0.01).wait(1).complete(number, 0.9 + 0.01 * number, 5.0 + number)
    lines = explained(journal)["What to try next"]
    assert lines == ("All of the best 6 trials have optimizer=adam: other choices can go.",)


def test_reasons_that_differ_in_numbers_alone_are_one() -> None:
    journal = Telling()
    for number in range(4):
        journal.start(number, lr=0.1).wait(1).fail(number, f"diverged: loss is NaN at step {number}")
    journal.start(4, lr=0.1).wait(1).fail(4, "exception: no")
    assert explained(journal)["What failed"] == (
        "5 trials of 5 gave no result.",
        "4 trials, such as trial 0: diverged: loss is NaN at step 0",
        "trial 4: exception: no",
    )


@pytest.mark.parametrize("reason", ["x" * 5000, "two\nlines\tand 'quotes' <b>", ""])
def test_odd_reasons_stay_one_line(reason: str) -> None:
    journal = Telling().start(0, lr=0.1).wait(1).fail(0, reason)
    for line in explained(journal)["What failed"]:
        assert "\n" not in line
        assert len(line) < 300
