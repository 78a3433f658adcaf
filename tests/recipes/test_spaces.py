"""Ready parts of a space ask for what applies only, and whatever they return can be built and trained."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import FixedTrial

import elastune
from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.recipes import spaces as choices
from elastune.recipes.settings import FAMILIES, SCHEDULERS
from elastune.train.program.load import merge
from elastune.train.program.space import enumerate_all, probe, redraw
from elastune.tuning.study.trial_results import settings as trial_settings

EPOCHS = 8
GROUPS = {"head": r"^head\."}
CONFIG: dict[str, Any] = {
    **elastune.optimizer_defaults(GROUPS),
    **elastune.scheduler_defaults(),
    **elastune.network_defaults(),
    **elastune.batch_defaults(),
    "momentum": 0.9,  # a program's own wish must not get in the way of a trial that takes Adam
    "gamma": 0.5,
}


def space(trial: Any) -> dict[str, Any]:
    return {
        **choices.suggest_optimizer(trial, groups=GROUPS),
        **choices.suggest_scheduler(trial, epochs=EPOCHS, warmup=(0, 3), warmup_start=(0.01, 1.0)),
        **choices.suggest_network(trial, layers=(0, 3), width=(1, 8)),
        **choices.suggest_batch(trial, sizes=(4, 8), base_batch=4, lr_rules=("none", "linear", "sqrt")),
        **elastune.suggest_execution(
            trial, workers=(1, 4), modes=("exact", "fast"), mechanisms=("replicated",), policies=("none", "gns:lr=sqrt")
        ),
    }


def trained(config: dict[str, Any]) -> list[float]:
    """The learning rates of a few real steps by ``config``."""
    torch.manual_seed(0)
    net = elastune.make_network(config, 6, 2)
    optimizer = elastune.make_optimizer(config, net, GROUPS)
    scheduler = elastune.make_scheduler(config, optimizer, epochs=EPOCHS)
    rates = []
    for _ in range(EPOCHS):
        rates.append(float(optimizer.param_groups[-1]["lr"]))
        optimizer.zero_grad()
        loss = net(torch.randn(config["batch_size"], 6)).square().mean()
        loss.backward()
        optimizer.step()
        elastune.step_scheduler(scheduler, loss.item())
    return rates


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_whatever_is_sampled_can_be_built_and_trained(seed: int) -> None:
    (sample,) = probe(space, 1, seed)
    config, execution, adapt = trial_settings(sample.values, CONFIG, ExecutionSettings(), capacity=4)
    rates = trained(config)
    group = config["lr_factor_head"] * config["lr"]
    factor = {"none": 1, "linear": config["batch_size"] / 4, "sqrt": math.sqrt(config["batch_size"] / 4)}
    start = config["warmup_start"] if config["warmup"] else 1.0
    assert rates[0] == pytest.approx(group * factor[config["lr_rule"]] * start)
    assert all(0 <= rate < math.inf for rate in rates)
    assert (execution.workers, execution.mode) == (sample.params["workers"], sample.params["mode"])
    assert adapt.policies == (() if sample.params["policy"] == "none" else ("gns:lr=sqrt",))


def test_the_front_door_gives_them() -> None:
    for name in ("optimizer", "scheduler", "network", "batch"):
        assert getattr(elastune, f"suggest_{name}") is getattr(choices, f"suggest_{name}")
    assert {name for name in elastune.__all__ if getattr(elastune, name) is None} == set()


def test_every_setting_is_returned_and_only_what_applies_is_asked() -> None:
    seen = set()
    for sample in probe(space, 400, seed=1):
        asked, values = set(sample.params), sample.values
        seen.add((values["optimizer"], values["scheduler"], values["lr_family"]))
        assert set(CONFIG) <= set(values)
        assert ("momentum" in asked) == (values["momentum"] is not None) == (values["optimizer"] == "sgd")
        assert ("beta1" in asked) == ("beta2" in asked) == (values["betas"] is not None)
        assert (values["betas"] is None) == (values["optimizer"] == "sgd")
        assert {name for name in asked if name.startswith("width_")} == {
            f"width_{i}" for i in range(len(values["widths"]))
        }
        wanted = set(SCHEDULERS[values["scheduler"]])
        if values["lr_family"]:
            wanted |= set(FAMILIES[values["scheduler"]][values["lr_family"]])
        own = set(elastune.scheduler_defaults()) - {"scheduler", "warmup", "warmup_start"}
        assert {name for name in own if values[name] is not None} == wanted
        assert ("n_milestones" in asked) == (values["scheduler"] == "multistep")
        if values["milestones"]:
            assert values["milestones"] == sorted(set(values["milestones"]))
            assert values["milestones"][-1] < EPOCHS - 3
        assert (values["base_batch"] is None) == (values["lr_rule"] == "none")
    families = {("lambda", f) for f in FAMILIES["lambda"]} | {("multiplicative", f) for f in FAMILIES["multiplicative"]}
    schedules = families | {(kind, None) for kind in set(SCHEDULERS) - set(FAMILIES)}
    assert {(scheduler, family) for _, scheduler, family in seen} == schedules
    assert {optimizer for optimizer, *_ in seen} == {"sgd", "adam", "adamw"}


def test_a_trial_is_told_what_was_asked_for() -> None:
    params = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.001, "beta1": 0.85, "beta2": 0.95, "lr_factor_a": 2.0}
    assert choices.suggest_optimizer(FixedTrial(params), groups=["a"]) == {
        "optimizer": "adamw",
        "lr": 0.01,
        "momentum": None,
        "betas": [0.85, 0.95],
        "weight_decay": 0.001,
        "lr_factor_a": 2.0,
    }
    asked = {"scheduler": "multistep", "n_milestones": 3, "milestone_0": 6, "milestone_1": 2, "milestone_2": 6}
    result = choices.suggest_scheduler(FixedTrial({**asked, "gamma": 0.2}), epochs=EPOCHS)
    assert (result["milestones"], result["gamma"], result["warmup"]) == ([2, 6], 0.2, 0)


def test_each_optimizer_may_have_a_range_of_its_own() -> None:
    def ranges(trial: Any) -> dict[str, Any]:
        return choices.suggest_optimizer(trial, kinds=("sgd", "adam"), lr={"sgd": (0.1, 1.0), "adam": (1e-5, 1e-3)})

    for sample in probe(ranges, 40, seed=0):
        kind = sample.values["optimizer"]
        assert sample.params[f"{kind}_lr"] == sample.values["lr"]
        assert (0.1 <= sample.values["lr"] <= 1.0) == (kind == "sgd")


def test_rates_are_asked_for_on_a_log_scale_where_they_can_be() -> None:
    (sample,) = probe(lambda trial: choices.suggest_optimizer(trial, kinds=["adam"], weight_decay=(0.0, 0.1)), 1, 0)
    logs = {name: distribution.log for name, distribution in sample.distributions.items()}  # type: ignore[attr-defined]
    assert logs == {"lr": True, "weight_decay": False, "beta1": False, "beta2": False}


def test_what_is_fixed_is_not_asked() -> None:
    def fixed(trial: Any) -> dict[str, Any]:
        return {
            **choices.suggest_optimizer(trial, kinds=["sgd"], lr=0.3, momentum=0.9, weight_decay=0),
            **choices.suggest_scheduler(trial, epochs=5, kinds=["step"], step_size=2, gamma=0.5),
            **choices.suggest_network(trial, layers=2, width=8, activations=["tanh"], dropout=0.0),
            **choices.suggest_batch(trial, sizes=[16]),
        }

    (only,) = enumerate_all(fixed, 10) or []
    assert only.params == {}
    assert only.values["widths"] == [8, 8]
    config = merge({**elastune.optimizer_defaults(), **elastune.scheduler_defaults(), **CONFIG}, only.values)
    assert (config["lr"], config["momentum"], config["step_size"], config["batch_size"]) == (0.3, 0.9, 2, 16)


def test_means_that_are_left_out_stay_the_studys() -> None:
    assert elastune.suggest_execution(FixedTrial({})) == {}
    result = elastune.suggest_execution(FixedTrial({"workers": 3}), workers=(2, 4), mechanisms=["replicated"])
    assert result == {"workers": 3, "mechanism": "replicated"}


def test_a_batch_may_be_that_of_each_worker():
    trial = FixedTrial({"workers": 3, "batch_per_worker": 16})
    execution = elastune.suggest_execution(trial, workers=(1, 4))
    result = choices.suggest_batch(
        trial, per_worker=(8, 16), workers=execution["workers"], base_batch=8, lr_rules=["linear"]
    )
    assert result == {"batch_size": 48, "lr_rule": "linear", "base_batch": 8}
    assert choices.suggest_batch(FixedTrial({}), per_worker=[8], workers=2)["batch_size"] == 16
    assert choices.suggest_batch(FixedTrial({"batch_size": 256}))["batch_size"] == 256


OPTIMIZER = choices.suggest_optimizer
NETWORK = choices.suggest_network
BATCH = choices.suggest_batch
MEANS = elastune.suggest_execution


def scheduler(trial: Any, **options: Any) -> dict[str, Any]:
    return choices.suggest_scheduler(trial, **{"epochs": EPOCHS, **options})


@pytest.mark.parametrize(
    ("suggest", "options", "words"),
    [
        (BATCH, {"sizes": [8], "per_worker": [8], "workers": 2}, "as a whole or for each worker"),
        (BATCH, {"per_worker": [8]}, "how many there are"),
        (BATCH, {"sizes": [8], "workers": 2}, "does not hang on workers"),
        (BATCH, {"per_worker": [0], "workers": 2}, "batch_size must be"),
        (BATCH, {"per_worker": [8], "workers": 0}, "workers must be"),
        (OPTIMIZER, {"kinds": []}, "choices of optimizer"),
        (OPTIMIZER, {"kinds": "sgd"}, "choices of optimizer"),
        (OPTIMIZER, {"kinds": ["sgd", "sgd"]}, "without repetitions"),
        (OPTIMIZER, {"kinds": ["sgd", "lion"]}, "optimizer must be known"),
        (OPTIMIZER, {"lr": (0.1, 0.01)}, "must not end below"),
        (OPTIMIZER, {"lr": (0.0, 0.1)}, "lr must be a number above 0"),
        (OPTIMIZER, {"lr": (0.1,)}, r"\(low, high\)"),
        (OPTIMIZER, {"lr": {"adam": (1e-4, 1e-2)}, "kinds": ["sgd"]}, "add 'sgd'"),
        (OPTIMIZER, {"lr": {"sgd": 0.1, "adam": (1, 0.1)}, "kinds": ["sgd"]}, "must not end below"),
        (OPTIMIZER, {"momentum": (0.5, 1.0), "kinds": ["adam"]}, "momentum must be"),
        (OPTIMIZER, {"beta2": (0.9, 1.0), "kinds": ["sgd"]}, "beta2 must be"),
        (OPTIMIZER, {"beta1": (-0.1, 0.9)}, "beta1 must be"),
        (OPTIMIZER, {"weight_decay": (-1, 0)}, "weight_decay must be"),
        (OPTIMIZER, {"lr_factor": (2, 1)}, "lr_factor must not end below"),
        (scheduler, {"epochs": 0}, "must be a whole number"),
        (scheduler, {"kinds": ["one_cycle"]}, "scheduler must be known"),
        (scheduler, {"kinds": ["multistep"], "milestones": 8}, "room for 7 milestones"),
        (scheduler, {"kinds": ["multistep"], "epochs": 1}, "room for 0 milestones"),
        (scheduler, {"kinds": ["multistep"], "milestones": 0}, "milestone must be"),
        (scheduler, {"kinds": ["lambda"], "families": {"lambda": ["geometric"]}}, "lambda_family must be known"),
        (scheduler, {"families": {"step": []}}, "a scheduler with families must be known"),
        (scheduler, {"kinds": ["cosine"], "gamma": (0.5, 2.0)}, "gamma must be"),
        (scheduler, {"kinds": ["cosine"], "step_size": (1, 2.5)}, "step_size must be"),
        (scheduler, {"kinds": ["cosine"], "decay": (1, 0)}, "decay must not end below"),
        (scheduler, {"kinds": ["cosine"], "power": (0, 1)}, "power must be"),
        (scheduler, {"kinds": ["cosine"], "plateau_factor": (0.1, 1.0)}, "plateau_factor must be"),
        (scheduler, {"kinds": ["cosine"], "plateau_patience": (-1, 3)}, "plateau_patience must be"),
        (scheduler, {"kinds": ["step"], "final_factor": (0, 2)}, "final_factor must be"),
        (scheduler, {"kinds": ["step"], "warmup": (0, 8)}, "shorter than the 8 epochs"),
        (scheduler, {"kinds": ["plateau"], "warmup": (3, 2)}, "warmup must not end below"),
        (scheduler, {"kinds": ["step"], "warmup_start": (0, 1)}, "warmup_start must be"),
        (NETWORK, {"layers": (3, 1)}, "layers must not end below"),
        (NETWORK, {"layers": 0, "width": (0, 8)}, "width must be"),
        (NETWORK, {"activations": ["step"]}, "activation must be known"),
        (NETWORK, {"dropout": (0, 1)}, "dropout must be"),
        (BATCH, {"sizes": [0, 8]}, "batch_size must be"),
        (BATCH, {"sizes": []}, "choices of batch_size"),
        (BATCH, {"lr_rules": ["linear"]}, "base_batch must be"),
        (BATCH, {"lr_rules": ["cubic"], "base_batch": 8}, "lr_rule must be known"),
        (MEANS, {"workers": (0, 4)}, "workers must be"),
        (MEANS, {"modes": ["quick"]}, "mode must be known"),
        (MEANS, {"mechanisms": ["smoke"]}, "mechanism must be known"),
        (MEANS, {"policies": ["gns:"]}, "a policy is written"),
    ],
)
def test_a_range_is_checked(suggest: Any, options: dict[str, Any], words: str) -> None:
    trial = optuna.create_study().ask()
    with pytest.raises(UserError, match=words):
        suggest(trial, **options)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_a_changed_sample_can_be_built_too(seed: int, keep: float) -> None:
    """As evolution and population-based training change them: conditional parameters appear and vanish."""
    (sample,) = probe(space, 1, seed)
    changed = redraw(space, sample, keep, np.random.default_rng(seed))
    config, *_ = trial_settings(changed.values, CONFIG, ExecutionSettings(), capacity=4)
    assert len(trained(config)) == EPOCHS


@pytest.mark.parametrize("sampler", [optuna.samplers.TPESampler(seed=1), optuna.samplers.NSGAIISampler(seed=1)])
def test_samplers_that_learn_can_use_the_space(sampler: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler)
    for _ in range(60):
        trial = study.ask()
        config, *_ = trial_settings(space(trial), CONFIG, ExecutionSettings(), capacity=4)
        study.tell(trial, trained(config)[-1])
    assert len({str(t.params) for t in study.trials}) > 40
