"""The Gaussian process: Optuna's over warped inputs, and a proposal that follows from what was told alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from optuna._gp.acqf import BaseAcquisitionFunc, qLogEHVI
from optuna._gp.gp import ConditionalGPRegressor, GPRegressor, fit_kernel_params
from optuna._gp.prior import DEFAULT_MINIMUM_NOISE_VAR, default_log_prior
from optuna.samplers import GPSampler, RandomSampler
from tests.soaked import soaked

from elastune.core.journal.records import TrialFinished
from elastune.tuning.search.constraint import parse_constraints
from elastune.tuning.search.gaussian import (
    ACQUISITIONS,
    FIRST,
    SPREAD,
    STABLE,
    STARTS,
    GaussianSampler,
    Warp,
    WarpedProcess,
    fit,
    fits,
    forget,
    posterior_loss,
)
from elastune.tuning.search.history import quiet
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.suggester import Suggester

TWO = parse_objectives({"error": "min", "seconds": "min"})
NONE, ONE_NAMED = (False, False, False), (False, True, False)


def told(n: int, seed: int = 0, named: bool = False) -> tuple[Any, Any]:
    """Points (n, 3) of the unit cube, and standardised values (n,)."""
    rng = np.random.default_rng(seed)
    points = rng.random((n, 3))
    if named:
        points[:, 1] = rng.integers(0, 3, n)
    values = np.sin(4 * points[:, 0]) + points[:, 1] ** 2 + 0.05 * rng.standard_normal(n)
    return points, (values - values.mean()) / values.std()


def by_autograd(points: Any, values: Any, categorical: tuple[bool, ...], raw: Any) -> tuple[float, Any]:
    """The same loss from Optuna's process and priors at warped points, and its gradient by autograd."""
    d = len(categorical)
    logs = torch.from_numpy(raw).requires_grad_(True)
    warp = Warp(logs[d + 2 : 2 * d + 2].exp(), logs[2 * d + 2 :].exp(), torch.tensor(categorical))
    noise = logs[d + 1].exp() + DEFAULT_MINIMUM_NOISE_VAR
    arrays = (warp.categorical, warp(torch.from_numpy(points)), torch.from_numpy(values))
    process = GPRegressor(*arrays, logs[:d].exp(), logs[d].exp(), noise)
    loss = -process.marginal_log_likelihood() - default_log_prior(process)
    loss = loss + (logs[d + 2 :] ** 2).sum() / (2 * SPREAD**2)
    loss.backward()
    assert logs.grad is not None
    return loss.item(), logs.grad.numpy()


@pytest.mark.parametrize("categorical", [NONE, ONE_NAMED])
def test_the_closed_form_is_optunas_posterior_at_warped_points(categorical: tuple[bool, ...]) -> None:
    points, values = told(30, named=any(categorical))
    arrays = torch.from_numpy(points), torch.from_numpy(values)
    ours = posterior_loss(*arrays, categorical, DEFAULT_MINIMUM_NOISE_VAR)
    bent = np.array([0.7, -1.0, 0.2, 0.5, -4.0, 0.4, -0.3, 0.2, -0.6, 0.1, 0.5])
    for raw in (np.zeros(11), bent):
        loss, gradient = ours(raw)
        expected, expected_gradient = by_autograd(points, values, categorical, raw)
        assert loss == pytest.approx(expected, rel=1e-9)
        assert gradient == pytest.approx(expected_gradient, rel=1e-9, abs=1e-11)
        torch.set_default_dtype(torch.bfloat16)  # as a user's program may
        try:
            assert np.array_equal(ours(raw)[1], gradient)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("n", [20, 2 * FIRST + 4])
def test_a_fit_is_at_least_as_likely_as_optunas_which_does_not_warp(n: int) -> None:
    points, values = told(n)
    ours = fit(points, values, np.array(NONE), DEFAULT_MINIMUM_NOISE_VAR)
    assert ours is not None
    theirs = fit_kernel_params(points, values, np.array(NONE), default_log_prior, DEFAULT_MINIMUM_NOISE_VAR, False)
    loss = posterior_loss(torch.from_numpy(points), torch.from_numpy(values), NONE, DEFAULT_MINIMUM_NOISE_VAR)

    def at(process: GPRegressor, bends: list[float]) -> float:
        lengths, scale, noise = process.inverse_squared_lengthscales, process.kernel_scale, process.noise_var
        whole = [*lengths.tolist(), float(scale), float(noise) - DEFAULT_MINIMUM_NOISE_VAR, *bends]
        return loss(np.log(whole))[0]

    assert at(ours, [*ours.warp.a.tolist(), *ours.warp.b.tolist()]) < at(theirs, [1.0] * 6) + 0.05


def test_a_process_that_does_not_bend_is_optunas() -> None:
    points, values = (torch.from_numpy(array) for array in told(20, named=True))
    named, lengths = torch.tensor(ONE_NAMED), torch.tensor([3.0, 0.5, 0.1], dtype=torch.float64)
    straight = Warp(torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), named)
    ours = WarpedProcess(points, values, lengths, 1.2, 0.01, straight)
    theirs = GPRegressor(named, points, values, lengths, *(torch.tensor(x, dtype=torch.float64) for x in (1.2, 0.01)))
    theirs._cache_matrix()
    new = torch.from_numpy(told(7, seed=1, named=True)[0])
    for mine, other in zip(ours.posterior(new, joint=True), theirs.posterior(new, joint=True), strict=True):
        assert mine.numpy() == pytest.approx(other.numpy(), abs=1e-4)  # the cube shrinks by EDGE


def test_a_process_that_bends_is_optunas_at_warped_points() -> None:
    """Whatever it is asked for: alone, together, beside running trials, after more was told; and so are slopes."""
    named = torch.tensor(ONE_NAMED)
    logs = torch.tensor([[-0.8, 0.0, 0.5], [0.4, 0.0, -0.6]], dtype=torch.float64)
    warp = Warp(*logs.exp(), named)
    points, values = (torch.from_numpy(array) for array in told(20, named=True))
    running, new = (torch.from_numpy(told(n, seed=n, named=True)[0]) for n in (3, 7))
    new[:2, 0] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    lengths = torch.tensor([3.0, 0.5, 0.1], dtype=torch.float64)
    ours = WarpedProcess(points, values, lengths, 1.2, 0.01, warp)
    numbers = (torch.tensor(x, dtype=torch.float64) for x in (1.2, 0.01))
    theirs = GPRegressor(named, warp(points), values, lengths, *numbers)
    theirs._cache_matrix()

    def same(mine: Any, other: Any) -> None:
        assert mine.detach().numpy() == pytest.approx(other.detach().numpy(), rel=1e-9, abs=1e-12)

    for joint in (False, True):
        for mine, other in zip(ours.posterior(new, joint), theirs.posterior(warp(new), joint), strict=True):
            same(mine, other)
    beside = ConditionalGPRegressor(ours, running, 32, 0, 1e-12)
    theirs_beside = ConditionalGPRegressor(theirs, warp(running), 32, 0, 1e-12)
    same(beside.sample_joint_posterior(new), theirs_beside.sample_joint_posterior(warp(new)))

    at = new.clone().requires_grad_(True)
    mean, spread = ours.posterior(at)
    (mean + spread).sum().backward()
    assert at.grad is not None
    for row in range(len(new)):
        for column in (0, 2):
            step = torch.zeros_like(new)
            step[row, column] = 1e-9 if row < 2 and column == 0 else 1e-6
            up, down = (sum(each.sum() for each in ours.posterior(new + way * step)) for way in (1, -1))
            by_difference = float(up - down) / (2 * float(step[row, column]))
            assert float(at.grad[row, column]) == pytest.approx(by_difference, rel=1e-3, abs=1e-5)
    assert bool((at.grad[:2, 0] != 0).all()), "the ends can be left again"

    same(ours._cov_Y_Y_chol, theirs._cov_Y_Y_chol)
    for process, others in ((ours, running), (theirs, warp(running))):
        process.append_running_data(others, torch.zeros(3, dtype=torch.float64))
    for mine, other in zip(ours.posterior(new), theirs.posterior(warp(new)), strict=True):
        same(mine, other)


def test_what_happens_at_one_end_of_a_parameter_is_modelled_there() -> None:
    """Values that change a hundred times as fast near 0: a process that warps foretells them, Optuna's does not."""
    rng = np.random.default_rng(0)

    def value(x: Any) -> Any:
        return np.log(x + 0.003)

    at, new = rng.random((24, 1)), np.linspace(0.001, 0.999, 200)[:, None]
    values = (value(at) - value(at).mean()) / value(at).std()
    expected = (value(new) - value(at).mean())[:, 0] / value(at).std()
    ours = fit(at, values[:, 0], np.array([False]), DEFAULT_MINIMUM_NOISE_VAR)
    theirs = fit_kernel_params(
        at, values[:, 0], np.array([False]), default_log_prior, DEFAULT_MINIMUM_NOISE_VAR, deterministic_objective=False
    )
    assert ours is not None
    assert float(ours.warp.a) < 1.0
    missed = [
        float(np.sqrt(np.mean((process.posterior(torch.from_numpy(new))[0].numpy() - expected) ** 2)))
        for process in (ours, theirs)
    ]
    assert missed[0] < 0.5 * missed[1], missed


def test_a_warp_rises_within_the_cube_and_leaves_categories() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = (torch.from_numpy(np.exp(rng.normal(size=2))) for _ in range(2))
        x = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None].repeat(1, 2).requires_grad_(True)
        warped = Warp(a, b, torch.tensor([False, True]))(x)
        assert torch.equal(warped[:, 1], x[:, 1])
        assert bool((warped[1:, 0] > warped[:-1, 0]).all())
        assert bool(((warped[:, 0] >= 0) & (warped[:, 0] <= 1)).all())
        warped.sum().backward()
        assert x.grad is not None
        assert bool((x.grad.isfinite() & (x.grad > 0)).all())


def space(trial: Any) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        "width": trial.suggest_int("width", 1, 64),
        "layers": trial.suggest_int("layers", 1, 4),
        "kind": trial.suggest_categorical("kind", ["a", "b", "c"]),
    }


def search(known: int, *, seed: int = 0, constraints: Any = ()) -> Suggester:
    """A search that was told ``known`` trials."""
    suggester = Suggester(space, TWO, parse_constraints(constraints), sampler="gp", seed=seed)
    for _ in range(known):
        suggestion = suggester.ask()
        assert suggestion is not None
        values = {"error": abs(math.log10(suggestion.params["lr"]) + 2), "seconds": float(suggestion.params["width"])}
        suggester.tell(suggestion.number, TrialFinished(suggestion.number, "complete", values=values, metrics=values))
    return suggester


def ask(suggester: Suggester) -> dict[str, Any]:
    suggestion = suggester.ask()
    assert suggestion is not None
    return suggestion.params


@pytest.mark.parametrize("constraints", [("seconds <= 20",), *soaked(((),))])
def test_what_is_remembered_changes_no_proposal(constraints: tuple[str, ...]) -> None:
    first = search(14, constraints=constraints)
    batch = [ask(first) for _ in range(3)]
    forget()
    other = search(14, constraints=constraints)
    forget()
    assert [ask(other) for _ in range(3)] == batch
    assert len({repr(params) for params in batch}) == 3, "running trials are reckoned with"


def test_proposals_for_many_free_workers_share_one_fit() -> None:
    forget()
    suggester = search(14)
    ask(suggester)
    made = fits()
    for _ in range(3):
        ask(suggester)
    assert fits() == made > 0


def test_it_searches_as_well_as_optunas_own() -> None:
    """On what can be seen by eye: the best of 24 is near the optimum of a smooth error, with either."""
    best = []
    for make in (GaussianSampler, lambda seed: GPSampler(seed=seed, warn_independent_sampling=False)):
        with quiet():
            study = optuna.create_study(sampler=make(1))
            study.optimize(lambda t: (math.log10(space(t)["lr"]) + 2) ** 2 + (t.params["width"] / 64 - 0.5) ** 2, 24)
        best.append(study.best_value)
    assert best[0] < 0.02, best


def test_cores_do_not_show_in_a_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is computed by one thread: sums that several share may round by their number."""
    threads = set()
    evaluated = BaseAcquisitionFunc.eval_acqf_no_grad

    def seen(acqf: Any, *arguments: Any) -> Any:
        threads.add(torch.get_num_threads())
        return evaluated(acqf, *arguments)

    monkeypatch.setattr(BaseAcquisitionFunc, "eval_acqf_no_grad", seen)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        ask(search(12))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert threads == {1}


def test_running_trials_that_cannot_be_told_apart_cost_no_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []

    class Singular(qLogEHVI):
        def __init__(self, *, stabilizing_noise: float = 1e-12, **given: Any) -> None:
            made.append(stabilizing_noise)
            if stabilizing_noise < 1e-9:
                torch.linalg.cholesky(torch.zeros(2, 2))
            super().__init__(stabilizing_noise=stabilizing_noise, **given)

    monkeypatch.setitem(ACQUISITIONS, (True, False, True), Singular)
    suggester = search(12)
    assert ask(suggester) != ask(suggester)
    assert made == [1e-12, STABLE]


def maximised(kind: type[GPSampler], several: bool, broken: str, running: int) -> tuple[BaseAcquisitionFunc, Any]:
    """What a sampler of ``kind`` maximises after 14 trials, and the trials that it would begin at."""
    seen: list[Any] = []

    class Seen(kind):  # type: ignore[misc, valid-type]
        def _optimize_acqf(self, acqf: BaseAcquisitionFunc, best_params: Any) -> Any:
            seen.extend((acqf, best_params))
            return super()._optimize_acqf(acqf, best_params)

    with quiet():
        study = optuna.create_study(directions=["minimize"] * (1 + several), sampler=RandomSampler(seed=0))
        for number in range(14):
            trial = study.ask()
            values = [space(trial)["lr"], float(trial.params["width"])]
            if broken != "no constraint":
                trial.set_constraint("c", -1.0 if broken == "some" and number % 2 else values[0])
            study.tell(trial, values[: 1 + several])
        for _ in range(running):
            space(study.ask())
        study.sampler = Seen(seed=3) if kind is GaussianSampler else Seen(seed=3, warn_independent_sampling=False)
        study.sampler._n_local_search = STARTS
        space(study.ask())
    acquisition, best = seen
    return acquisition, best


@pytest.mark.sampled(3)
@pytest.mark.parametrize("running", [0, 2])
@pytest.mark.parametrize("broken", ["no constraint", "some", "all"])
@pytest.mark.parametrize("several", [False, True])
def test_what_is_maximised_is_what_optuna_maximises(
    several: bool, broken: str, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processes that do not warp: the same function of the same trials, and the same points to begin at."""
    monkeypatch.setattr("elastune.tuning.search.gaussian.fit", lambda *arguments: None)
    monkeypatch.setattr("elastune.tuning.search.gaussian.FANTASIES", 128)  # Optuna's
    ours, begun = maximised(GaussianSampler, several, broken, running)
    theirs, expected = maximised(GPSampler, several, broken, running)
    points = ours.search_space.sample_normalized_params(64, rng=np.random.RandomState(0))
    assert type(ours) is type(theirs)
    assert ours.eval_acqf_no_grad(points) == pytest.approx(theirs.eval_acqf_no_grad(points), rel=1e-9)
    assert (begun is None) == (expected is None)
    assert begun is None or np.array_equal(begun, expected)


def test_a_covariance_that_cannot_be_factored_is_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(process: GPRegressor) -> None:
        torch.linalg.cholesky(torch.zeros(2, 2))

    monkeypatch.setattr(WarpedProcess, "_cache_matrix", broken)
    assert fit(*told(20), np.array(NONE), DEFAULT_MINIMUM_NOISE_VAR) is None
    assert ask(search(12))


def test_nothing_is_tried_twice_while_there_is_something_new() -> None:
    """With an optimum in a corner of a small space, where a process soon wants nothing else."""

    def small(trial: Any) -> dict[str, Any]:
        return {"depth": trial.suggest_int("depth", 1, 4), "rate": trial.suggest_float("rate", 0.0, 1.0)}

    suggester = Suggester(small, TWO, sampler="gp", seed=0)
    seen = []
    for number in range(30):
        seen.append(ask(suggester))
        far = 4 - seen[-1]["depth"] + seen[-1]["rate"]
        values = {"error": far, "seconds": far**2}
        suggester.tell(number, TrialFinished(number, "complete", values=values, metrics=values))
    assert {"depth": 4, "rate": 0.0} in seen
    assert len({repr(each) for each in seen}) == 30


def test_a_small_space_is_tried_to_its_end() -> None:
    def finite(trial: Any) -> dict[str, Any]:
        return {"depth": trial.suggest_int("depth", 1, 5), "kind": trial.suggest_categorical("kind", ["a", "b", "c"])}

    suggester = Suggester(finite, TWO, sampler="gp", seed=0)
    seen = []
    for number in range(28):
        seen.append(ask(suggester))
        values = {"error": 5.0 - seen[-1]["depth"], "seconds": 0.1}
        suggester.tell(number, TrialFinished(number, "complete", values=values, metrics=values))
    drawn = {repr(each) for each in seen[:10]}
    assert len({repr(each) for each in seen[: 10 + 15 - len(drawn)]}) == 15
