"""What may be tracked, and how its state waits and comes back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan
from elastune.train.models import Tracked


def always() -> bool:
    return True


def test_state_waits_for_its_name_and_goes_on_until_it_is_known() -> None:
    first, second = Tracked(), Tracked()
    first.add("best", {"loss": 0.5, "at": [1, 2]}, always)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()  # saved once more before the program names it
    mine: dict[str, Any] = {"loss": 9.0, "other": 1}
    second.add("best", mine, always)
    assert mine == {"loss": 0.5, "at": [1, 2]}
    mine["loss"] = 0.25
    second.load_state_dict(first.state_dict())
    assert mine["loss"] == 0.5


def test_averages_are_taken_once_a_step() -> None:
    model, ends = torch.nn.Linear(2, 1), [False, True, False, True]
    average, tracked = AveragedModel(model), Tracked()
    tracked.add("ema", average, lambda: ends.pop(0))
    for _ in range(4):
        average.update_parameters(model)
    assert int(average.n_averaged) == 2


def test_a_later_session_takes_over_what_an_earlier_one_has_tracked() -> None:
    model = torch.nn.Linear(2, 1)
    average, scaler = AveragedModel(model), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for ends in (lambda: False, always):
        tracked = Tracked()
        tracked.add("ema", average, ends)
        tracked.add("scaler", scaler, ends)
    average.update_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (int(average.n_averaged), scaler.get_scale()) == (1, 16.0)


def test_a_copy_of_an_average_is_one_of_its_own() -> None:
    model = torch.nn.Linear(2, 1)
    average, tracked = AveragedModel(model), Tracked()
    tracked.add("ema", average, always)
    other = copy.deepcopy(average)
    before = average.module.weight.clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    other.update_parameters(model)
    assert torch.equal(average.module.weight, before)
    assert torch.equal(other.module.weight, model.weight)
    assert (int(average.n_averaged), int(other.n_averaged)) == (0, 1)


@pytest.mark.parametrize(
    ("name", "obj", "message"),
    [
        ("", {}, "has a name"),
        ("taken", {}, "once"),
        ("list", [1, 2], "has a state"),
        ("open", {"file": object()}, "tensors, numbers, text"),
    ],
)
def test_what_cannot_be_tracked_is_refused(name: str, obj: object, message: str) -> None:
    tracked = Tracked()
    tracked.add("taken", {}, always)
    with pytest.raises(UserError, match=message):
        tracked.add(name, obj, always)


def test_another_object_s_state_and_differing_learners_are_refused() -> None:
    tracked = Tracked()
    tracked.refuse(SyncPlan.parse("local:learners=2,every=2"))  # nothing is tracked
    tracked.add("ema", torch.nn.Linear(2, 1), always)
    with pytest.raises(UserError, match="its own state"):
        tracked.load_state_dict({"ema": {"weight": torch.zeros(3, 3)}})
    with pytest.raises(UserError, match="learners between their rounds"):
        tracked.refuse(SyncPlan.parse("local:learners=2,every=2"))
    tracked.refuse(SyncPlan.parse("allreduce"))
