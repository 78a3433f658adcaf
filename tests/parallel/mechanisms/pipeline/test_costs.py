"""What layers cost, and where a model is cut by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.layout import cut_by_cost
from elastune.parallel.mechanisms.pipeline.layers import layers_of
from elastune.parallel.mechanisms.pipeline.pipeline_parallel import counted_costs, estimated_costs


def network() -> nn.Sequential:
    """Convolutions that work, and a large layer that does not."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 3), nn.Dropout(0.5), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(400, 16), nn.Linear(16, 8))


def test_counts_are_of_a_forward_pass() -> None:
    costs = counted_costs(layers_of(network()), (torch.randn(2, 1, 16, 16),))
    flops = [2 * 2 * 16 * 25 * 144, 0, 2 * 2 * 16 * 4 * 9 * 100, 0, 0, 2 * 2 * 400 * 16, 2 * 2 * 16 * 8]
    assert costs == pytest.approx([each + max(flops) * 1e-3 for each in flops])


def test_counts_cut_where_numbers_of_parameters_would_not() -> None:
    layers = layers_of(network())
    counted = counted_costs(layers, (torch.randn(2, 1, 16, 16),))
    assert cut_by_cost(counted, 2) == (range(2), range(2, 7))
    assert cut_by_cost(estimated_costs(layers), 2) == (range(5), range(5, 7))


def test_counting_leaves_no_trace() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    counted_costs(layers_of(model), (torch.randn(2, 1, 16, 16, generator=torch.Generator()),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p.grad is None for p in model.parameters())


def test_an_example_that_is_none() -> None:
    with pytest.raises(UserError, match="2 values"):
        counted_costs(layers_of(network()), (torch.randn(2, 1, 16, 16), 3))
