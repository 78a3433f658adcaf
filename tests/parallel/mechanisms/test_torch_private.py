"""The private names of torch that the mechanisms use exist in the installed version."""

from __future__ import annotations

import torch
from torch import nn

from elastune.parallel.mechanisms import torch_private

MOVED = "torch has moved it: find its new place, change parallel/mechanisms/torch_private.py and the versions there"


def test_functions_on_lists_do_what_their_names_say() -> None:
    values = [torch.ones(2), torch.zeros(3)]
    doubled = torch_private.foreach_add(values, values)
    assert [v.tolist() for v in torch_private.foreach_sub(doubled, values)] == [v.tolist() for v in values], MOVED
    torch_private.foreach_mul_(doubled, 0.5)
    torch_private.foreach_copy_(values, torch_private.foreach_mul(doubled, 3.0))
    assert values[0].tolist() == [3.0, 3.0], MOVED
    assert hasattr(torch, torch_private.FOREACH_ZERO_), MOVED


def test_hooks_and_marks_of_an_optimizer_are_found() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert torch_private.step_hooks_of(optimizer) == (1, 0), MOVED
    assert all(hasattr(optimizer, name) for name in torch_private.STEP_HOOKS), MOVED
    assert not torch_private.has_global_step_hooks()
    torch_private.mark_stepped(optimizer)
    torch_private.mark_scheduled(type(optimizer).step)
    del type(optimizer).step._wrapped_by_lr_sched  # type: ignore[attr-defined]


def test_attributes_that_are_used_in_place_exist() -> None:
    module = nn.Conv2d(1, 1, 1)
    names = ("_parameters", "_buffers", "_save_to_state_dict", "_load_from_state_dict", "_conv_forward")
    assert all(hasattr(module, name) for name in names), MOVED
    assert all(hasattr(nn.TransformerEncoderLayer, name) for name in ("_sa_block", "_ff_block")), MOVED
    assert isinstance(module.weight._version, int), MOVED
    assert isinstance(nn.BatchNorm1d(1), torch_private.BatchNorm), MOVED
    assert isinstance(nn.InstanceNorm1d(1), torch_private.NormWithStatistics), MOVED
