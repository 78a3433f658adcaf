"""Spot and on-demand workers together: when on-demand ones are bought, and when they are given back."""

from dataclasses import replace

import pytest

from elastune.adapt.policies.library.spot import JobProgress, SpotChoice, SpotRules, choose
from elastune.core.errors import UserError

RULES = SpotRules(deadline_s=1000.0, most=10, patience=0.0, changeover_s=10.0, look_s=0.0)
NOW = JobProgress(
    now_s=0.0, work_s=5000.0, done_s=0.0, offered=10, on_demand=0, spot_price=1.0, on_demand_price=3.0
)  # five workers do it in time


def test_ahead_of_the_line_spot_workers_do_it_alone() -> None:
    assert choose(replace(NOW, now_s=500.0, done_s=3000.0, offered=2), RULES) == SpotChoice(2, 0)
    assert choose(replace(NOW, now_s=500.0, done_s=3000.0, offered=12), RULES) == SpotChoice(10, 0)


def test_behind_it_on_demand_workers_fill_up_to_the_pace() -> None:
    behind = replace(NOW, now_s=480.0, done_s=2000.0, offered=2)  # 3000 in 500 s, with 20 s in reserve
    assert choose(behind, RULES) == SpotChoice(2, 4)
    assert choose(replace(behind, offered=8), RULES) == SpotChoice(8, 0)


def test_patience_waits_as_long_as_most_workers_can_make_up() -> None:
    behind = replace(NOW, now_s=480.0, done_s=500.0, offered=2)  # 9 workers from now on
    assert choose(behind, replace(RULES, patience=1.0)) == SpotChoice(2, 0)
    assert choose(behind, replace(RULES, patience=0.5)) == SpotChoice(2, 7)
    assert choose(replace(behind, done_s=-1.0), replace(RULES, patience=1.0)) == SpotChoice(2, 8)


def test_who_has_on_demand_workers_keeps_them_until_two_changeovers_ahead() -> None:
    just = replace(NOW, now_s=480.0, done_s=2510.0, offered=2)  # 2490 in 500 s: 4.98
    assert choose(just, RULES) == SpotChoice(2, 0)
    assert choose(replace(just, on_demand=3), RULES) == SpotChoice(2, 3)
    assert choose(replace(just, on_demand=3, done_s=2610.0), RULES) == SpotChoice(2, 0)


def test_too_late_takes_all_that_there_may_be() -> None:
    assert choose(replace(NOW, now_s=1200.0, done_s=4000.0, offered=3), RULES) == SpotChoice(3, 7)


def test_spot_workers_that_cost_more_than_on_demand_ones_are_left() -> None:
    dear = replace(NOW, spot_price=3.5, now_s=480.0, done_s=2000.0)
    assert choose(dear, RULES) == SpotChoice(0, 6)
    assert choose(replace(NOW, spot_price=3.5, done_s=1000.0), RULES) == SpotChoice(0, 0)


def test_spot_workers_that_add_too_little_are_left() -> None:
    def amdahl(n: int) -> float:
        return 1 / (0.1 + 0.9 / n) if n else 0.0

    easy = replace(NOW, work_s=1000.0, done_s=500.0)
    assert choose(easy, RULES, amdahl) == SpotChoice(7, 0)  # the eighth adds .33 for 1; on demand, 1 costs 3
    assert choose(replace(easy, spot_price=0.1), RULES, amdahl) == SpotChoice(10, 0)


def test_a_budget_bounds_what_is_bought() -> None:
    behind = replace(NOW, now_s=480.0, done_s=2000.0, offered=2, spent=1.0)
    enough, short = (replace(RULES, budget=1.0 + 3000 / 3600 + more) for more in (0.01, -0.01))
    assert choose(behind, enough) == SpotChoice(2, 4)
    assert choose(behind, short) == SpotChoice(2, 0)
    assert choose(replace(behind, spent=enough.budget), enough) == SpotChoice(0, 0)


@pytest.mark.parametrize(
    "wrong", [{"deadline_s": 0.0}, {"deadline_s": float("inf")}, {"most": 0}, {"budget": 0.0}, {"patience": 1.5}]
)
def test_bounds_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        replace(RULES, **wrong)  # type: ignore[arg-type]
