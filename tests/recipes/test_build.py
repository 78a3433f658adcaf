"""Every value of a configuration is found in what is made of it, or refused; and a resumed run goes on with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.optim import Adam, AdamW, Optimizer, lr_scheduler
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.recipes.build import make_network, make_optimizer, make_scheduler, step_scheduler
from elastune.recipes.settings import (
    ACTIVATIONS,
    FAMILIES,
    OPTIMIZERS,
    RANGES,
    SCHEDULERS,
    batch_defaults,
    network_defaults,
    number,
    optimizer_defaults,
    scheduler_defaults,
)
from elastune.train.checkpoints.tree import from_tree, to_tree
from elastune.train.schedules import scale_rates

EPOCHS = 10
LR = 0.1


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def sgd(lr: float = LR) -> Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def rates(optimizer: Optimizer, scheduler: Any, steps: int = EPOCHS, metrics: Any = None) -> list[float]:
    """The rate of the first group before each step."""
    results = []
    for at in range(steps):
        results.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        step_scheduler(scheduler, metrics[at] if metrics else 1.0)
    return results


# -- optimizer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "made", "option", "value", "key", "held"),
    [
        *((kind, made, "lr", 0.03, "lr", 0.03) for kind, made in (("sgd", torch.optim.SGD), ("adam", Adam))),
        ("adamw", AdamW, "lr", 0.03, "lr", 0.03),
        ("sgd", torch.optim.SGD, "momentum", 0.7, "momentum", 0.7),
        ("sgd", torch.optim.SGD, "weight_decay", 0.02, "weight_decay", 0.02),
        ("adam", Adam, "weight_decay", 0.02, "weight_decay", 0.02),
        ("adamw", AdamW, "weight_decay", 0.0, "weight_decay", 0.0),
        ("adam", Adam, "betas", [0.8, 0.95], "betas", (0.8, 0.95)),
        ("adamw", AdamW, "betas", [0.0, 0.5], "betas", (0.0, 0.5)),
    ],
)
def test_a_value_is_found_in_the_optimizer(kind: str, made: type, option: str, value: Any, key: str, held: Any) -> None:
    optimizer = make_optimizer({**optimizer_defaults(), "optimizer": kind, option: value}, model())
    assert type(optimizer) is made
    assert [group[key] for group in optimizer.param_groups] == [held]


@pytest.mark.parametrize(("kind", "made"), [("sgd", torch.optim.SGD), ("adam", Adam), ("adamw", AdamW)])
def test_what_is_left_out_is_torchs(kind: str, made: Any) -> None:
    assert set(OPTIMIZERS) == {"sgd", "adam", "adamw"}
    ours = make_optimizer({**optimizer_defaults(), "optimizer": kind}, model())
    assert ours.defaults == made(model().parameters(), lr=0.1).defaults


def test_parameter_groups_have_rates_of_their_own() -> None:
    groups = {"head": r"^2\.", "bias": r"bias$"}
    config = {**optimizer_defaults(groups), "lr": 0.2, "lr_factor_head": 0.5, "lr_factor_bias": 3.0}
    net = model()
    net[0].weight.requires_grad_(False)
    results = {group["name"]: group for group in make_optimizer(config, net, groups).param_groups}
    assert {name: group["lr"] for name, group in results.items()} == {"head": 0.1, "bias": pytest.approx(0.6)}
    assert [p.shape for p in results["head"]["params"]] == [(2, 5), (2,)]  # the first that fits, its bias too
    assert [p.shape for p in results["bias"]["params"]] == [(5,)]
    plain = make_optimizer({**config, "lr_factor_head": None}, model(), groups)
    assert [(group["name"], group["lr"]) for group in plain.param_groups] == [
        ("", 0.2),
        ("head", 0.2),
        ("bias", pytest.approx(0.6)),
    ]


@pytest.mark.parametrize(("rule", "lr"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rate_follows_the_batch(rule: str, lr: float) -> None:
    base = None if rule == "none" else 64
    config = {**optimizer_defaults(), **batch_defaults(), "batch_size": 256, "base_batch": base, "lr_rule": rule}
    assert make_optimizer(config, model()).param_groups[0]["lr"] == pytest.approx(lr)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": "lion"}, "use one of sgd, adam, adamw"),
        ({"lr": 0}, "lr must be a number above 0"),
        ({"lr": None}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"lr": True}, "lr must be"),
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\)"),
        ({"betas": [0.9, 0.99]}, "sgd has no use for betas"),
        ({"optimizer": "adam", "momentum": 0.9}, "adam has no use for momentum"),
        ({"optimizer": "adam", "betas": [0.9, 1.0]}, "beta2 must be"),
        ({"optimizer": "adam", "betas": [-0.1, 0.9]}, "beta1 must be"),
        ({"optimizer": "adam", "betas": [0.9]}, "pair"),
        ({"optimizer": "adam", "betas": 0.9}, "pair"),
        ({"weight_decay": -1e-9}, "weight_decay must be"),
        ({"lr_factor_head": 2.0}, "needs its group"),
        ({"base_batch": 32}, "no use for base_batch"),
        ({"lr_rule": "linear", "batch_size": 32}, "base_batch must be"),
        ({"lr_rule": "cubic", "batch_size": 32, "base_batch": 32}, "unknown learning-rate rule"),
    ],
)
def test_an_optimizer_refuses(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_optimizer({**optimizer_defaults(), **change}, model())


@pytest.mark.parametrize(("pattern", "words"), [("^tail", "must name parameters"), ("(", "regular expression")])
def test_a_group_must_name_parameters(pattern: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_optimizer(optimizer_defaults(["head"]), model(), {"head": pattern})


# -- scheduler ---------------------------------------------------------------------------------------------------------

Hand = Callable[[Optimizer], Any]
# What a configuration says, and the same made by hand with torch's own classes.
SCHEDULES: dict[str, tuple[dict[str, Any], Hand]] = {
    "constant": ({}, lambda o: lr_scheduler.LambdaLR(o, lambda t: 1.0)),
    "lambda inverse_time": ({"decay": 0.3}, lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + 0.3 * t))),
    "lambda polynomial": ({"power": 2.0}, lambda o: lr_scheduler.PolynomialLR(o, EPOCHS, 2.0)),
    "lambda step_decay": ({"gamma": 0.5, "step_size": 3}, lambda o: lr_scheduler.StepLR(o, 3, 0.5)),
    "multiplicative geometric": ({"gamma": 0.8}, lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.8)),
    "multiplicative inverse_time": ({"decay": 0.3}, lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + 0.3 * t))),
    "multiplicative step_decay": (
        {"gamma": 0.5, "step_size": 3},
        lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.5 if t in (3, 6, 9) else 1.0),
    ),
    "step": ({"gamma": 0.4, "step_size": 4}, lambda o: lr_scheduler.StepLR(o, 4, 0.4)),
    "multistep": ({"gamma": 0.3, "milestones": [2, 3, 7]}, lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 7], 0.3)),
    "exponential": ({"gamma": 0.9}, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "plateau": (
        {"plateau_factor": 0.5, "plateau_patience": 1},
        lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    ),
    "cosine": ({"final_factor": 0.2}, lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS, LR * 0.2)),
}
METRICS = [3.0, 2.0, 2.0, 2.0, 2.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def schedule(name: str, **changes: Any) -> dict[str, Any]:
    kind, _, family = name.partition(" ")
    return {**scheduler_defaults(), "scheduler": kind, "lr_family": family or None, **SCHEDULES[name][0], **changes}


def test_no_schedule_is_forgotten() -> None:
    every = {f"{kind} {family}" for kind, families in FAMILIES.items() for family in families}
    assert set(SCHEDULES) == every | (set(SCHEDULERS) - set(FAMILIES))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_rates_are_those_of_torch(name: str) -> None:
    ours, by_hand = sgd(), sgd()
    result = rates(ours, make_scheduler(schedule(name), ours, epochs=EPOCHS), metrics=METRICS)
    assert result == pytest.approx(rates(by_hand, SCHEDULES[name][1](by_hand), metrics=METRICS), abs=1e-15)
    assert name == "constant" or len(set(result)) > 1


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [(name, option, 0.123 if isinstance(value, float) else 1 if isinstance(value, int) else [4])
     for name, (options, _) in SCHEDULES.items() for option, value in options.items()],
)  # fmt: skip
def test_each_value_changes_the_rates(name: str, option: str, value: Any) -> None:
    one, other = sgd(), sgd()
    if option == "plateau_patience":
        value = 0
    before = rates(one, make_scheduler(schedule(name), one, epochs=EPOCHS), metrics=METRICS)
    after = rates(other, make_scheduler(schedule(name, **{option: value}), other, epochs=EPOCHS), metrics=METRICS)
    assert before != after


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"plateau"}))
def test_a_warm_up_comes_first(name: str) -> None:
    ours, plain = sgd(), sgd()
    config = schedule(name, warmup=4, warmup_start=0.2)
    result = rates(ours, make_scheduler(config, ours, epochs=EPOCHS + 4), EPOCHS + 4)
    assert result[:4] == pytest.approx([LR * (0.2 + 0.8 * t / 4) for t in range(4)])
    assert result[4:] == pytest.approx(rates(plain, make_scheduler(schedule(name), plain, epochs=EPOCHS)), abs=1e-15)


def test_plateau_waits_for_the_highest_if_told_to() -> None:
    optimizer = sgd()
    scheduler = make_scheduler(schedule("plateau"), optimizer, epochs=EPOCHS, mode="max")
    assert rates(optimizer, scheduler, metrics=[1.0, 2, 3, 4, 5, 6, 7, 8, 9, 9]) == [LR] * EPOCHS


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_schedule_is_saved_as_data_and_goes_on(name: str, warmup: int) -> None:
    """At every step."""
    if name == "plateau":
        warmup = 0  # it takes none
    config = schedule(name, warmup=warmup)
    if config["milestones"]:
        config["milestones"] = [2, 3]
    whole = sgd()
    expected = rates(whole, make_scheduler(config, whole, epochs=EPOCHS), metrics=METRICS)
    for at in range(1, EPOCHS):
        first, second = sgd(), sgd()
        scheduler = make_scheduler(config, first, epochs=EPOCHS)
        begun = rates(first, scheduler, at, METRICS)
        tensors: dict[str, torch.Tensor] = {}
        tree = to_tree([first.state_dict(), scheduler.state_dict()], tensors)
        resumed = make_scheduler(config, second, epochs=EPOCHS)
        saved_optimizer, saved_scheduler = from_tree(tree, tensors)
        second.load_state_dict(saved_optimizer)
        resumed.load_state_dict(saved_scheduler)
        assert begun + rates(second, resumed, EPOCHS - at, METRICS[at:]) == expected


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_schedule_goes_on_in_proportion_when_rates_change(name: str) -> None:
    """Also with groups of different rates: each keeps its part of the other."""
    groups = {"head": r"^2\."}
    config = {**optimizer_defaults(groups), "lr_factor_head": 0.25, **schedule(name)}
    optimizer = make_optimizer(config, model(), groups)
    scheduler = make_scheduler(config, optimizer, epochs=EPOCHS)
    plain = sgd()
    expected = rates(plain, make_scheduler(config, plain, epochs=EPOCHS), metrics=METRICS)
    for at in range(EPOCHS - 1):
        if at == 4:
            scale_rates(optimizer, [scheduler], [3.0, 3.0])
        factor = 3.0 if at >= 4 else 1.0
        results = [group["lr"] for group in optimizer.param_groups]
        assert results == pytest.approx([factor * expected[at], factor * expected[at] / 4], abs=1e-15)
        optimizer.step()
        step_scheduler(scheduler, METRICS[at])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scheduler": "one_cycle"}, "scheduler must be known"),
        ({"scheduler": None}, "scheduler must be known"),
        ({"scheduler": "step"}, "step needs step_size"),
        ({"scheduler": "step", "step_size": 0}, "step_size must be a whole number"),
        ({"scheduler": "step", "step_size": 1.5}, "step_size must be a whole number"),
        ({"scheduler": "step", "step_size": 2, "gamma": 0.0}, "gamma must be"),
        ({"scheduler": "exponential", "gamma": 1.1}, "gamma must be"),
        ({"scheduler": "exponential", "gamma": 0.5, "milestones": [1]}, "exponential has no use for milestones"),
        ({"gamma": 0.5}, "constant has no use for gamma"),
        ({"scheduler": "multistep"}, "multistep needs milestones"),
        ({"scheduler": "multistep", "milestones": []}, "list of epochs"),
        ({"scheduler": "multistep", "milestones": [3, 2]}, "ascend"),
        ({"scheduler": "multistep", "milestones": [2, 2]}, "ascend"),
        ({"scheduler": "multistep", "milestones": [2, 10]}, "below the 10 epochs"),
        ({"scheduler": "multistep", "milestones": [8], "warmup": 2}, "below the 8 epochs"),
        ({"scheduler": "lambda"}, "lr_family of lambda must be known"),
        ({"scheduler": "lambda", "lr_family": "geometric"}, "inverse_time, polynomial, step_decay"),
        ({"scheduler": "lambda", "lr_family": "inverse_time"}, "needs decay"),
        ({"scheduler": "lambda", "lr_family": "polynomial", "decay": 0.1}, "lambda polynomial has no use for decay"),
        ({"scheduler": "plateau", "plateau_factor": 1.0}, "plateau_factor must be"),
        ({"scheduler": "plateau", "warmup": 2}, "plateau takes no warm-up"),
        ({"scheduler": "cosine", "final_factor": 1.2}, "final_factor must be"),
        ({"warmup": 10}, "shorter than the 10 epochs"),
        ({"warmup": -1}, "warmup must be"),
        ({"warmup_start": 0.5}, "no warm-up has no use for warmup_start"),
        ({"warmup": 2, "warmup_start": 0.0}, "warmup_start must be"),
    ],
)
def test_a_scheduler_refuses(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_scheduler({**scheduler_defaults(), **change}, sgd(), epochs=EPOCHS)


@pytest.mark.parametrize("epochs", [0, 2.5, True])
def test_a_schedule_lasts_whole_epochs(epochs: Any) -> None:
    with pytest.raises(UserError, match="whole number of epochs"):
        make_scheduler(scheduler_defaults(), sgd(), epochs=epochs)


# -- in a run ----------------------------------------------------------------------------------------------------------

DATA = TensorDataset(
    torch.randn(24, 4, generator=torch.Generator().manual_seed(1)),
    torch.randn(24, 2, generator=torch.Generator().manual_seed(2)),
)


def trained(out: Path, config: dict[str, Any], until: int | None, resume: bool, *, by: str) -> list[tuple[int, float]]:
    """(step, learning rate) of each step of a run of four epochs of three steps; its checkpoints in ``out``.

    The schedule moves ``by`` "step", after each, or by "epoch".
    """
    net = model()
    session = lone_session(out, config=config, max_steps=until, resume=resume, checkpoint_every_steps=None)
    optimizer = make_optimizer(session.config, net)
    net, optimizer, scheduler = session.prepare(net, optimizer, make_scheduler(session.config, optimizer, epochs=12))
    assert by in ("step", "epoch")
    results = []
    for _ in session.epochs(4):
        for x, y in session.batches(DATA, batch_size=8):
            loss = F.mse_loss(net(x.double()), y.double())
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                results.append((session.step, optimizer.param_groups[0]["lr"]))
            if by == "step":
                step_scheduler(scheduler, METRICS[min(session.step, 9)])
        if by == "epoch":
            step_scheduler(scheduler, METRICS[session.epoch])
    return results


@pytest.mark.sampled(4)
@pytest.mark.parametrize("by", ["step", "epoch"])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_an_interrupted_run_goes_on_with_the_same_rates(tmp_path: Path, name: str, by: str) -> None:
    """Interrupted in the middle of an epoch and at the end of one."""
    config = {**optimizer_defaults(), "momentum": 0.5, **schedule(name, warmup=None if name == "plateau" else 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = trained(tmp_path / "whole", config, None, False, by=by)
        begun = trained(tmp_path / "parts", config, 5, True, by=by)
        begun += trained(tmp_path / "parts", config, 9, True, by=by)
        begun += trained(tmp_path / "parts", config, None, True, by=by)
    assert [step for step, _ in begun] == [step for step, _ in expected]
    assert begun == expected
    assert name == "constant" or len({lr for _, lr in expected}) > 1


# -- network -----------------------------------------------------------------------------------------------------------


def test_a_network_is_as_it_was_designed() -> None:
    net = make_network({"widths": [7, 3], "activation": "gelu", "dropout": 0.25}, 6, 2)
    assert [type(layer) for layer in net] == [nn.Flatten, *[nn.Linear, nn.GELU, nn.Dropout] * 2, nn.Linear]
    assert [(m.in_features, m.out_features) for m in net if isinstance(m, nn.Linear)] == [(6, 7), (7, 3), (3, 2)]
    assert [m.p for m in net if isinstance(m, nn.Dropout)] == [0.25, 0.25]
    assert net(torch.ones(5, 2, 3)).shape == (5, 2)
    assert [name for name, _ in net.named_parameters() if name.endswith("weight")] == [
        "hidden_0.weight",
        "hidden_1.weight",
        "head.weight",
    ]
    assert len(make_network({**network_defaults(), "widths": []}, 6, 2)) == 2


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_is_that_of_torch(activation: str) -> None:
    net = make_network({**network_defaults(), "activation": activation}, 6, 2)
    x = torch.linspace(-2, 2, 5)
    assert torch.equal(net[2](x), getattr(F, activation)(x))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"widths": 64}, "widths must be a list"),
        ({"widths": [0]}, "width must be a whole number"),
        ({"activation": "step"}, "activation must be known"),
        ({"dropout": 1.0}, "dropout must be"),
    ],
)
def test_a_network_refuses(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_network({**network_defaults(), **change}, 6, 2)


@pytest.mark.parametrize("name", sorted(RANGES))
@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf"), -1, -0.5])
def test_no_setting_may_be(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{name} must be"):
        number(name, value)
