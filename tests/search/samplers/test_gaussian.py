"""The faster Gaussian process: Optuna's model and its optimum, a proposal that follows from what was told alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from optuna._gp.acqf import BaseAcquisitionFunc
from optuna._gp.gp import GPRegressor, fit_kernel_params
from optuna._gp.prior import DEFAULT_MINIMUM_NOISE_VAR, default_log_prior
from optuna.samplers import GPSampler

from elastune.journal.records import TrialFinished
from elastune.search.samplers.gaussian import GaussianSampler
from elastune.search.samplers.kernel_fit import FIRST, fit, fits, forget, posterior_loss
from elastune.search.samplers.optuna_study import quiet
from elastune.search.samplers.suggest import Suggester
from elastune.search.space.constraint import parse_constraints
from elastune.search.space.objective import parse_objectives

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


def optunas_loss(points: Any, values: Any, categorical: tuple[bool, ...], raw: Any) -> tuple[float, Any]:
    """What Optuna's own fit minimises, and its gradient by autograd."""
    whole = torch.from_numpy(raw).requires_grad_(True)
    arrays = (torch.tensor(categorical), torch.from_numpy(points), torch.from_numpy(values))
    noise = whole[4].exp() + DEFAULT_MINIMUM_NOISE_VAR
    process = GPRegressor(*arrays, whole[:3].exp(), whole[3].exp(), noise)
    loss = -process.marginal_log_likelihood() - default_log_prior(process)
    loss.backward()
    assert whole.grad is not None
    return loss.item(), whole.grad.numpy()


@pytest.mark.parametrize("categorical", [NONE, ONE_NAMED])
def test_the_closed_form_is_what_optuna_minimises(categorical: tuple[bool, ...]) -> None:
    points, values = told(30, named=any(categorical))
    arrays = torch.from_numpy(points), torch.from_numpy(values)
    ours = posterior_loss(*arrays, categorical, DEFAULT_MINIMUM_NOISE_VAR)
    for raw in (np.zeros(5), np.array([0.7, -1.0, 0.2, 0.5, -4.0])):
        loss, gradient = ours(raw)
        expected, by_autograd = optunas_loss(points, values, categorical, raw)
        assert loss == pytest.approx(expected, rel=1e-9)
        assert gradient == pytest.approx(by_autograd, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("n", [20, 2 * FIRST + 4])
def test_the_kernel_found_is_at_least_as_likely_as_optunas(n: int) -> None:
    points, values = told(n)
    ours = fit(points, values, np.array(NONE), DEFAULT_MINIMUM_NOISE_VAR)
    assert ours is not None
    theirs = fit_kernel_params(points, values, np.array(NONE), default_log_prior, DEFAULT_MINIMUM_NOISE_VAR, False)

    def loss(lengths: Any, scale: float, noise: float) -> float:
        raw = np.log([*lengths, scale, noise - DEFAULT_MINIMUM_NOISE_VAR])
        return optunas_loss(points, values, NONE, raw)[0]

    expected = loss(theirs.inverse_squared_lengthscales.tolist(), float(theirs.kernel_scale), float(theirs.noise_var))
    assert loss(ours.inverse_squared_lengthscales, ours.scale, ours.noise) < expected + 0.05


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
        asked = suggester.ask()
        assert asked is not None
        values = {"error": abs(math.log10(asked.params["lr"]) + 2), "seconds": float(asked.params["width"])}
        suggester.tell(asked.number, TrialFinished(asked.number, "complete", values=values, metrics=values))
    return suggester


def ask(suggester: Suggester) -> dict[str, Any]:
    asked = suggester.ask()
    assert asked is not None
    return asked.params


@pytest.mark.parametrize("constraints", [(), ("seconds <= 20",)])
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


def test_without_optunas_hook_its_own_fit_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastune.search.samplers.gaussian.fit", lambda *arguments: None)
    assert ask(search(12))
