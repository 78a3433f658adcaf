import math

import numpy as np
import pytest

from elastune.tuning.search.halving import FEWEST, Curve, Extrapolator, ridge


def curve(limit, rate, speed=2.0, until=27, epochs=27):
    """An error that falls to ``limit`` with a power law, and a time that is linear after a start of 5 seconds."""
    result = Curve(epochs)
    for epoch in range(1, until + 1):
        result.add(epoch, (limit + rate * epoch**-0.7, 5.0 + speed * epoch))
    return result


def learnt(count, seed=0):
    rng = np.random.default_rng(seed)
    extrapolator = Extrapolator([False, True])
    for _ in range(count):
        whole = curve(rng.uniform(0.05, 0.3), rng.uniform(0.2, 0.6), rng.uniform(0.5, 4))
        extrapolator.finish(whole, whole.values[-1])
    return extrapolator


def test_with_few_finished_trials_the_last_value_stands_and_time_goes_on_as_it_did():
    forecast = learnt(FEWEST - 1).forecast(curve(0.1, 0.5, until=3))
    assert forecast.values == pytest.approx((0.1 + 0.5 * 3**-0.7, 9 * 11.0))
    assert forecast.low is None
    assert forecast.high is None


def test_finished_trials_teach_how_curves_go_on():
    open_trial = curve(0.1, 0.5, until=6)
    end = curve(0.1, 0.5).values[-1]
    naive = learnt(0).forecast(open_trial)
    taught = learnt(40).forecast(open_trial)
    for objective in range(2):
        assert abs(taught.values[objective] - end[objective]) < 0.3 * abs(naive.values[objective] - end[objective])


def test_about_two_of_three_ends_are_between_low_and_high():
    extrapolator, rng = learnt(60), np.random.default_rng(7)
    inside = []
    for _ in range(200):
        limit, rate, speed = rng.uniform(0.05, 0.3), rng.uniform(0.2, 0.6), rng.uniform(0.5, 4)
        forecast = extrapolator.forecast(curve(limit, rate, speed, until=6))
        end = curve(limit, rate, speed).values[-1]
        inside += [low <= value <= high for low, value, high in zip(forecast.low, end, forecast.high, strict=True)]
    assert 0.55 < np.mean(inside) < 0.95


def test_trials_of_another_length_teach_by_their_part():
    extrapolator = Extrapolator([True])
    for epochs in (10, 20, 30, 40, 50):
        whole = Curve(epochs)
        for epoch in range(1, epochs + 1):
            whole.add(epoch, (3.0 * epoch,))
        extrapolator.finish(whole, (3.0 * epochs,))
    short = Curve(80)
    short.add(8, (24.0,))
    assert extrapolator.forecast(short).values[0] == pytest.approx(240.0)


def test_a_cost_of_nothing_stays_nothing():
    extrapolator = Extrapolator([True])
    for _ in range(FEWEST):
        whole = Curve(4)
        for epoch in range(1, 5):
            whole.add(epoch, (0.0,))
        extrapolator.finish(whole, (0.0,))
    free = Curve(4)
    free.add(1, (0.0,))
    forecast = extrapolator.forecast(free)
    assert forecast.values[0] == pytest.approx(0.0, abs=1e-9)
    assert all(map(math.isfinite, forecast.low + forecast.high))


def test_a_report_that_comes_again_takes_the_place_of_the_old():
    again = Curve(10)
    for epoch, value in ((1, 0.9), (2, 0.8), (3, 0.7), (2, 0.6)):
        again.add(epoch, (value,))
    assert again.passes == [1, 2]
    assert again.at(0.2, 0) == 0.6
    assert again.at(1.0, 0) == 0.6


def test_trials_without_valid_ends_teach_nothing():
    extrapolator = Extrapolator([False])
    extrapolator.finish(Curve(3), (1.0,))
    bad = Curve(3)
    bad.add(1, (1.0,))
    extrapolator.finish(bad, (math.nan,))
    assert extrapolator.learnt == 0


def test_ridge_is_least_squares_with_much_data_and_knows_its_noise():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((400, 2))
    targets = 3 + features @ [2.0, -1.0] + 0.1 * rng.standard_normal(400)
    prediction, error = ridge(features, targets, np.array([1.0, 1.0]))
    assert prediction == pytest.approx(4.0, abs=0.05)
    assert error == pytest.approx(0.1, rel=0.15)


def forecast_of_a_loss(shown):
    """Of losses that fall by some factor, down to anything between 1e-3 and 10, each ``shown`` in some way."""

    def loss(log_limit, fall, until=27):
        forecasts = Curve(27)
        for epoch in range(1, until + 1):
            forecasts.add(epoch, (shown(10.0**log_limit * fall ** (1 - epoch / 27)),))
        return forecasts

    extrapolator, rng = Extrapolator([False]), np.random.default_rng(3)
    for _ in range(30):
        whole = loss(rng.uniform(-3, 1), rng.uniform(1.5, 6))
        extrapolator.finish(whole, whole.values[-1])
    forecasts = extrapolator.forecast(loss(-2.5, 3.0, until=2))
    return [forecasts.values[0], forecasts.low[0], forecasts.high[0]]


def test_what_samplers_see_as_a_logarithm_is_forecast_as_one():
    """A loss and its logarithm are forecast alike; below zero there is no logarithm to see it on."""
    told_logs = forecast_of_a_loss(math.log)
    assert np.log(forecast_of_a_loss(float)) == pytest.approx(told_logs)
    shifted = np.array(forecast_of_a_loss(lambda loss: loss - 0.1)) + 0.1
    assert np.log(np.maximum(shifted, 1e-9)) != pytest.approx(told_logs, rel=1e-2)
