"""What is divided, what is refused, and what the user still sees of the model."""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel

from elastune.core.errors import UserError
from elastune.core.layout import ParamBlock
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.mechanisms.base import ModelParallel
from elastune.parallel.mechanisms.tensor.blocked import Blocked
from elastune.parallel.mechanisms.tensor.tensor_parallel import TensorParallel, chosen, plan_layers
from elastune.parallel.mechanisms.tensor.trunk import divide_layers

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

from models import COLUMNS, GPT_PLAN, ROWS, Cnn, Gpt, built, encoder, mlp, samples
from models import EXAMPLES as MODELS


def divided(model: nn.Module, plan: dict[str, Any] | None = None, blocks: int = 4) -> TensorParallel:
    if plan is not None:
        plan_layers(model, plan)
    division = divide_layers(ModelParallel(model), ExecutionSettings(virtual_tensor=blocks))
    assert isinstance(division, TensorParallel)
    return division


# -- what is found -----------------------------------------------------------------------------------------------------


def test_pairs_of_linear_layers_are_found_and_what_is_left_stays_whole() -> None:
    assert chosen(mlp(), 4, None) == {"0": "columns", "3": "rows"}
    assert chosen(Cnn(), 4, None) == {"fc1": "columns", "fc2": "rows"}
    normed = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    assert chosen(normed, 4, None) == {"0": "columns", "3": "rows"}
    assert not chosen(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)), 4, None)
    # Square projections that are declared one after the other are not taken for pairs.
    result = chosen(Gpt(), 4, None)
    assert result == {
        f"layers.{i}.{name}": parallel_style
        for i in range(2)
        for name, parallel_style in (("up", "columns"), ("down", "rows"))
    }


def test_transformer_layers_are_found_as_their_parts() -> None:
    parallel_styles = chosen(encoder(), 4, None)
    assert parallel_styles == {
        f"layers.{i}.{name}": parallel_style
        for i in range(2)
        for name, parallel_style in (("self_attn", "columns"), ("linear1", "columns"), ("linear2", "rows"))
    }


def test_a_large_embedding_is_found_by_vocabulary_where_it_is_tied() -> None:
    class Tied(nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(4096, 16), nn.Linear(16, 4096, bias=False)
            if tie:
                self.head.weight = self.words.weight

    assert chosen(Tied(tie=True), 4, None) == {"words": "rows", "head": "columns"}
    assert chosen(Tied(tie=False), 4, None) == {"words": "columns"}
    blocks = divided(Tied(tie=True)).split.param_blocks
    assert [(param_block.name, param_block.tensor) for param_block in blocks] == [
        (f"words.weight#{i}", "words.weight") for i in range(4)
    ]


def test_a_plan_that_names_some_modules_divides_them_alone() -> None:
    division = divided(Cnn(), {"fc1": COLUMNS, "fc2": ROWS})
    assert {param_block.tensor for param_block in division.split.param_blocks if param_block.block is not None} == {
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
    }
    blocks = [param_block for param_block in division.split.param_blocks if param_block.tensor == "fc2.weight"]
    assert [param_block.box for param_block in blocks] == [
        ((0, 10), (a, b)) for a, b in ((0, 10), (10, 20), (20, 30), (30, 41))
    ]
    assert [param_block.block for param_block in blocks] == [0, 1, 2, 3]
    whole = next(param_block for param_block in division.split.param_blocks if param_block.tensor == "fc2.bias")
    assert whole == ParamBlock("fc2.bias", "fc2.bias", ((0, 10),))


def test_rows_come_in_the_blocks_of_the_channels_before() -> None:
    """So that nothing has to be gathered where a convolution's output is flattened."""
    division = divided(Cnn(), {"conv2": COLUMNS, "fc1": ROWS})
    boxes = [param_block.box[1] for param_block in division.split.param_blocks if param_block.tensor == "fc1.weight"]
    assert boxes == [(0, 18), (18, 45), (45, 63), (63, 90)]  # 9 places of 2, 3, 2 and 3 channels


def test_bytes_of_a_worker_are_those_of_its_blocks_and_of_what_is_whole() -> None:
    split = divided(encoder()).split
    mesh = Mesh(tensor=2)
    own = [sum(split.param_blocks[i].size for i in split.computed(mesh, rank)) for rank in range(2)]
    everything = sum(p.numel() for p in encoder().parameters())
    whole = sum(param_block.size for param_block in split.param_blocks if param_block.block is None)
    assert sum(own) == everything + whole
    assert max(own) < 0.6 * everything


def test_one_block_divides_nothing() -> None:
    division = ModelParallel(mlp())
    assert divide_layers(division, ExecutionSettings(mesh=Mesh(tensor=1), virtual_tensor=1)) is division


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (mlp, {"layers.*": COLUMNS}, "a plan names modules of the model"),
        (mlp, {"0": SequenceParallel()}, "by columns or by rows"),
        (mlp, {"1": COLUMNS}, "is a Tanh"),
        (mlp, {"5": COLUMNS, "*": ROWS}, "once"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 4)), {"0": COLUMNS}, "has 3 columns"),
        (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2)), {"0": COLUMNS}, "has groups=2"),
        (lambda: nn.Sequential(nn.Embedding(8, 8, sparse=True)), {"0": COLUMNS}, "has sparse"),
        (lambda: nn.MultiheadAttention(12, 6), None, "has 6 heads"),
        (lambda: nn.TransformerEncoderLayer(12, 3), None, "has 3 heads"),
        (lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True), None, "keys of its own"),
        (lambda: nn.GRU(8, 8), None, "none found in GRU"),
        (Gpt, {**GPT_PLAN, "words": COLUMNS}, "along the same dimension"),
        (Gpt, {"words": ROWS}, "along the same dimension"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, plan: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        divided(model(), plan)


# -- what the user sees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_states_have_the_users_names(name: str) -> None:
    """They load both ways, keys that are missing or too many are told, and nothing is changed by looking."""
    example = MODELS[name]
    plain, model = built(example), divided(built(example), example.plan).module
    state = model.state_dict()
    assert list(state) == list(state | plain.state_dict())
    assert state.keys() == plain.state_dict().keys()
    for key, value in plain.state_dict().items():
        assert torch.equal(state[key], value), key
    names = [key for key, _ in model.named_parameters()]
    other = {key: value + 1 for key, value in state.items()}
    model.load_state_dict(other)
    plain.load_state_dict(model.state_dict())
    assert all(torch.equal(value, other[key]) for key, value in plain.state_dict().items())
    assert [key for key, _ in model.named_parameters()] == names
    removed = next(key for key in other if key.endswith("weight") and key not in dict(model.named_parameters()))
    result = model.load_state_dict(
        {"new": torch.ones(1)} | {k: v for k, v in other.items() if k != removed}, strict=False
    )
    assert (result.missing_keys, result.unexpected_keys) == ([removed], ["new"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(other | {removed: torch.ones(2, 2)})


def test_a_state_that_lies_on_several_workers_is_refused() -> None:
    division = divided(mlp())
    division.parameters[0].data.untyped_storage().resize_(0)
    with pytest.raises(UserError, match="whole model on one worker"):
        division.module.state_dict()
    division.module.load_state_dict(mlp().state_dict())  # what is here


def test_a_weight_is_whole_inside_of_a_pass_alone() -> None:
    """Outside of it a change in place would be lost without a word."""
    model = divided(mlp()).module
    with pytest.raises(UserError, match=r"has its blocks weight#0"):
        model[0].weight.data.clamp_(-1, 1)
    assert isinstance(model[0], nn.Linear)
    assert model[0].out_features == 33


def test_a_copy_of_the_model_works(tmp_path: Path) -> None:
    """For averages of weights, say."""
    example = MODELS["encoder"]
    model = divided(built(example)).module
    twin = copy.deepcopy(model)
    x = samples(example, 0, torch.float32)
    assert torch.equal(model.eval()(x), twin.eval()(x))
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.equal(model(x), twin(x))


def test_in_blocks_nothing_else_is_changed_in_place() -> None:
    division = divided(mlp())
    x = Blocked(division.axis, [torch.ones(2, 2)] * 4, (2, 2, 2, 2), -1)
    with pytest.raises(UserError, match="not changed in place"):
        x.mul_(2)
    assert torch.equal((2 * x - 1).whole(), torch.ones(2, 8))
    assert torch.equal(torch.cat([x, x]), torch.ones(4, 8))
    assert x.view(2, 4, 2).shape == (2, 4, 2)
    assert isinstance(x.view(2, 4, 2), Blocked)
    assert isinstance(x.view(4, 4), torch.Tensor)  # rows and blocks mixed: gathered
    assert x.sum().item() == 16
    assert x[1].shape == (8,)


def test_gradients_that_are_frozen_stay_away() -> None:
    model = built(MODELS["mlp"])
    model[0].weight.requires_grad_(False)
    division = divided(model)
    division.module(torch.ones(2, 6)).sum().backward()
    for param_block, p in zip(division.split.param_blocks, division.parameters, strict=True):
        assert (p.grad is None) == (param_block.tensor == "0.weight")
        assert param_block.trained == (param_block.tensor != "0.weight")


def test_a_group_that_breaks_in_the_users_forward_pass_is_told_behind_it() -> None:
    """The program's own lines see numbers, and nothing that it would have to catch."""
    met: list[GroupBroken] = []

    class Broken(Group):
        def __init__(self) -> None:
            super().__init__(0, 2)

        def _start(self, start: Any) -> Any:
            raise GroupBroken("somebody died")

    division = divided(mlp())
    division.failure_hooks.meet = met.append
    division.axis.enter(Broken())
    assert division.model(torch.ones(2, 6)).isfinite().all()
    assert [str(error) for error in met] == ["somebody died"]
    division.axis.enter(Broken())
    division.failure_hooks.step_lost = lambda: True
    assert division.model(torch.ones(2, 6)).isfinite().all()
    assert len(met) == 1, "in the rest of a lost batch nobody is asked"
    division.failure_hooks.step_lost = lambda: False
    division.axis.enter(Group())
    list(division.backward(division.model(torch.ones(2, 6)).mean(), BatchSlice(range(2), 0, 1.0, True, True)))


def test_the_share_of_divided_layers_is_measured() -> None:
    """What takes long between divided layers counts, what takes long elsewhere does not."""

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)
            return torch.relu(x)

    def share(*layers: nn.Module) -> float:
        names = [str(i) for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
        division = divided(nn.Sequential(*layers), dict(zip(names, (COLUMNS, ROWS), strict=True)))
        for _ in range(3):
            list(division.backward(division.model(torch.ones(2, 8)).mean(), BatchSlice(range(2), 0, 1.0, True, True)))
        return division.divided_share

    up, down = nn.Linear(8, 8), nn.Linear(8, 8)
    assert 0.5 < share(up, Slow(), down) < 1
    assert 0 < share(Slow(), nn.Linear(8, 8), nn.Linear(8, 8)) < 0.5
