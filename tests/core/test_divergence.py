"""When a loss has exploded: spikes, noise and losses around zero are no divergence."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.divergence import (
    BOUND,
    WINDOW,
    Divergence,
    LossTrack,
    follow,
    follow_reports,
    limit,
    parse_divergence,
)
from elastune.core.errors import UserError


def judged(losses: Iterable[float], factor: float | None = 10.0) -> tuple[int, str]:
    """The step at which losses are found to have diverged, and why; (0, "") where they have not."""
    track = LossTrack()
    for step, loss in enumerate(losses, 1):
        track, why = follow(track, loss, factor)
        track = LossTrack.from_json(json.loads(json.dumps(track.to_json())))  # as a checkpoint keeps it
        if why:
            return step, why
    return 0, ""


def test_a_loss_that_explodes_and_stays_finite_has_diverged() -> None:
    step, why = judged([2.3 - 0.01 * i for i in range(50)] + [2.3 * 3.0**i for i in range(40)])
    assert 50 < step <= 50 + WINDOW + 3
    assert "times that at the start (2.26)" in why
    assert "the best was 1.86" in why


def test_what_explodes_at_once_is_no_yardstick_of_its_own() -> None:
    step, why = judged([2.3, 40.0, *[1.3e15] * 30])
    assert step == WINDOW
    assert "the best was 2.3" in why


@pytest.mark.parametrize(
    "losses",
    [
        [0.1] * 20 + [1.0] + [0.1] * 40,
        [0.1] * 20 + [1e12] * (WINDOW // 2 - 1) + [0.1] * 40,
        [2.3] * 10 + [1e-6] * 50 + [1e-3] * 50,
        [2.3] * 10 + [0.01] * 50 + [2.3] * 50,
        [1e10, 9e9, 8e9] * 20,
        [0.0] * 100,
        [0.0] * 20 + [3.0] * 20,
    ],
    ids=[
        "a spike",
        "a high spike of some steps",
        "worse than the best",
        "all lost",
        "a large scale",
        "zeros",
        "from 0",
    ],
)
def test_what_may_happen_in_a_training_that_ends_well_is_no_divergence(losses: list[float]) -> None:
    assert judged(losses) == (0, "")


def test_losses_that_may_be_negative_are_judged_by_their_distance_from_zero() -> None:
    policy_gradient = [0.01, -0.02, 0.03, -0.5, 0.9, 3.0, -7.0, 20.0, 50.0, 40.0] * 5
    assert judged(policy_gradient) == (0, "")
    log_density = [-5.0 - i for i in range(200)]
    assert judged(log_density) == (0, "")
    for exploded in (1e15, -1e15):
        assert judged([*log_density, *[exploded] * WINDOW])[1].endswith(f"beyond {9 * BOUND:.4g} from 0")


@given(st.lists(st.floats(0.5, 4.9), min_size=1, max_size=60), st.floats(1e-6, 1e6))
def test_noise_within_the_factor_is_none_whatever_the_scale(noise: list[float], scale: float) -> None:
    assert judged([scale * x for x in noise]) == (0, "")


def test_off_judges_nothing_finite() -> None:
    assert judged([2.3, *[1e30] * 100], None) == (0, "")
    tracks, wrong = follow_reports({}, {"loss": math.nan}, Divergence(None))
    assert wrong == "loss is nan"
    assert tracks == {}


def test_reported_metrics_are_judged_where_they_should_go_down() -> None:
    rule, tracks, result = Divergence(10.0, ("loss",)), dict[str, LossTrack](), list[str]()
    for loss in [0.5, 0.4, 60.0, 0.3, 0.3, 50.0, 60.0]:
        tracks, wrong = follow_reports(tracks, {"loss": loss, "flops": 1e12 * loss}, rule)
        result.append(wrong)
    assert result[:-1] == [""] * 6
    assert result[-1].startswith("loss is 60, its median over 3 is 50, 100 times that at the start (0.5)")


def test_the_divergence_policy_shares_the_limit() -> None:
    assert limit(2.0, 3.0) == 6.0
    assert limit(-1.0, 3.0) == 1.0
    assert limit(0.0, 3.0, spread=0.5) == 1.0


@pytest.mark.parametrize("text", ["", "1", "0.5", "-3", "nan", "inf", "ten"])
def test_factors_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="a factor above 1"):
        parse_divergence(text)


def test_factors() -> None:
    assert (parse_divergence("off"), parse_divergence("25")) == (None, 25.0)
