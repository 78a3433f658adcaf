"""Training state to data and back."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from elastune.core.errors import UserError
from elastune.train.checkpoints.tree import Tensors, fingerprint, from_tree, to_tree

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
KEYS = st.one_of(st.integers(), st.sampled_from(["a", "b", "a.b", "a.0", "0", "tensor", "list", ""]))
TENSORS = st.builds(
    lambda shape, kind: torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape).to(kind),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(TYPES),
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), TENSORS)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


def there_and_back(state: Any) -> Any:
    tensors: Tensors = {}
    tree = json.loads(json.dumps(to_tree(state, tensors), allow_nan=False))
    return from_tree(tree, tensors)


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


@settings(max_examples=300, deadline=None)
@given(STATES)
def test_any_state_comes_back(state: Any) -> None:
    back = there_and_back(state)
    assert equal(back, state)
    assert fingerprint(back) == fingerprint(state)


def test_paths_that_read_alike_keep_their_tensors() -> None:
    state = {"a": {"b": torch.tensor(1.0)}, "a.b": torch.tensor(2.0), 1: torch.tensor(3.0), "1": torch.tensor(4.0)}
    assert equal(there_and_back(state), state)


def test_what_is_no_data_is_refused_by_its_place() -> None:
    with pytest.raises(UserError, match=r"function at state.schedulers.0.fn"):
        to_tree({"schedulers": [{"fn": lambda step: step}]}, {})


@pytest.mark.parametrize(
    "tree",
    [[1], {}, {"list": [1], "tuple": []}, {"unknown": 1}, {"tensor": "gone"}, {"dict": [[1]]}, {"float": "x"}],
)
def test_foreign_trees_are_refused(tree: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        from_tree(tree, {})


def test_a_fingerprint_sees_every_bit_and_type_but_no_order() -> None:
    x = torch.tensor([1.0, 2.0])
    same = fingerprint({"x": x, "y": 1})
    assert fingerprint({"y": 1, "x": x.clone()}) == same
    assert fingerprint({"x": torch.stack([x, x], 1)[:, 0], "y": 1}) == same
    others: list[Any] = [x.double(), x.view(2, 1), x.nextafter(torch.tensor(9.0)), -x]
    assert same not in {fingerprint({"x": other, "y": 1}) for other in others}
    assert fingerprint({"x": torch.tensor(0.0)}) != fingerprint({"x": torch.tensor(-0.0)})
    assert fingerprint({"x": torch.tensor([True, False]), "z": torch.tensor([1 + 2j])}) != same


def test_numpy_numbers_are_numbers() -> None:
    """A learning rate out of ``numpy.logspace``: a run that was interrupted must end with the same fingerprint."""
    state = {"lr": np.float64(0.1), "n": np.int64(3), "b": np.bool_(True), "s": np.float32(0.5)}
    back = there_and_back(state)
    assert back == {"lr": 0.1, "n": 3, "b": True, "s": 0.5}
    assert fingerprint(back) == fingerprint(state)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 7),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.99),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 3), lr_scheduler.ExponentialLR(o, 0.95)], optimizer=o
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 9)], [4]
    ),
}


def test_no_scheduler_of_torch_is_forgotten() -> None:
    known = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, LRScheduler) and kind is not LRScheduler
    }
    assert known - {"_LRScheduler"} == set(SCHEDULERS)


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_schedulers_go_on_from_their_data(name: str) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.05, momentum=0.9)
        optimizer.step()
        return optimizer, SCHEDULERS[name](optimizer)

    def step(scheduler: Any, at: int) -> None:
        scheduler.step(*([1.0 if at % 3 else 2.0] if name == "ReduceLROnPlateau" else []))

    optimizer, scheduler = made()
    for at in range(5):
        step(scheduler, at)
    resumed_optimizer, resumed = made()
    resumed_optimizer.load_state_dict(there_and_back(optimizer.state_dict()))
    resumed.load_state_dict(there_and_back(scheduler.state_dict()))
    for at in range(5, 20):
        step(scheduler, at)
        step(resumed, at)
        assert resumed_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert resumed_optimizer.param_groups[0]["momentum"] == optimizer.param_groups[0]["momentum"]
