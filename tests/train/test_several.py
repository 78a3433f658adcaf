"""Several optimizers as one, and what may be prepared together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.train.models import Models, Optimizers, Prepared


def _two() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(1)
    one, two = nn.Linear(3, 2), nn.Linear(2, 1)
    groups = [{"params": [two.weight]}, {"params": [two.bias], "lr": 0.5}]
    return one, two, torch.optim.AdamW(one.parameters()), torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def _step(one: nn.Module, two: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    two(one(torch.ones(4, 3))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_the_state_of_all_goes_to_others_and_training_goes_on_alike() -> None:
    one, two, first, second = _two()
    _step(one, two, first, second)
    saved = copy.deepcopy(Optimizers([first, second]).state_dict())
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2], [3]]
    assert sorted(saved["state"]) == [0, 1, 2, 3]
    other, another, third, fourth = _two()
    other.load_state_dict(one.state_dict())
    another.load_state_dict(two.state_dict())
    joint = Optimizers([third, fourth])
    joint.load_state_dict(saved)
    _step(one, two, first, second)
    _step(other, another, third, fourth)
    for mine, theirs in zip(
        (*one.parameters(), *two.parameters()), (*other.parameters(), *another.parameters()), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert set(joint.state) == {*other.parameters(), *another.parameters()}
    assert joint.param_groups[2] is fourth.param_groups[1]  # rates that are changed here are changed there
    with pytest.raises(ValueError, match="different number"):
        joint.load_state_dict({**saved, "param_groups": [*saved["param_groups"], saved["param_groups"][0]]})


def test_models_are_named_by_their_classes() -> None:
    one, two, *_ = _two()
    assert list(dict(Models([one, nn.Tanh(), two]).named_children())) == ["Linear1", "Tanh", "Linear2"]


def test_the_order_is_the_program_s() -> None:
    one, two, first, second = _two()
    slower = torch.optim.lr_scheduler.StepLR(first, 3)
    result = Prepared.of([first, one, slower, second, two])
    assert result.models == [one, two]
    assert result.schedulers == (slower,)
    assert Prepared.of([first, one]).optimizer is first


def test_what_cannot_be_prepared_is_refused() -> None:
    one, two, first, second = _two()
    for given, result in (
        ([one], "a model and its optimizer"),
        ([one, first, "cosine"], "models, optimizers and schedulers"),
        ([one, first, second], "parameters of the models beside it"),
        ([one, two, first, torch.optim.LBFGS(two.parameters())], "LBFGS"),
    ):
        with pytest.raises(UserError, match=result):
            Prepared.of(given)


def test_a_closure_is_evaluated_once_for_all() -> None:
    one, two, first, second = _two()
    called: list[float] = []

    def closure() -> float:
        loss = two(one(torch.ones(4, 3))).sum()
        loss.backward()
        called.append(loss.item())
        return called[-1]

    before = two.bias.clone()
    with torch.no_grad():
        result = Optimizers([first, second]).step(closure)
    assert [result] == called
    assert not torch.equal(two.bias, before)
