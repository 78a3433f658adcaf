"""Every private name of torch that the mechanisms use, in one place.

Torch may move or change these names without notice. Checked on: torch 2.13.0, the version in ``constraints.txt``
(``pyproject.toml`` allows 2.9 and newer). Where a new version moves a name, change it here and nowhere else, then
extend the checked range; ``tests/parallel/mechanisms/test_torch_private.py`` finds names that are gone.

Private attributes and overridden methods cannot be collected. They stand where they are used:

- ``nn.Module``: ``_parameters``, ``_buffers``, ``_save_to_state_dict``, ``_load_from_state_dict`` (``tensor.layers``,
  ``pipeline.stage``).
- ``nn.Conv2d._conv_forward``, ``nn.TransformerEncoderLayer._sa_block`` and ``._ff_block`` (``tensor.layers``).
- ``Tensor._version``, the counter of changes in place, and ``variable`` of autograd's accumulating nodes
  (``pipeline.stage``).
- ``Optimizer.step.hooked``, torch's mark on the wrapper that runs hooks (``owned.replica``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import optimizer as optimizer_module
from torch.utils._pytree import tree_map as tree_map  # re-exported

BatchNorm = _BatchNorm
"""The base class of all batch normalisation."""
NormWithStatistics = _NormBase
"""The base class of normalisation with running statistics (batch and instance normalisation)."""

# Operations on lists of tensors, in one kernel where the device has one. Optimizers of torch use the same functions.
foreach_add = torch._foreach_add
foreach_copy_ = torch._foreach_copy_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_sub = torch._foreach_sub
FOREACH_ZERO_ = "_foreach_zero_"
"""The name of the operation by which optimizers clear gradients."""

new_wrapper_tensor: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass with a shape and without memory."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The attributes of an optimizer with the hooks around its ``step``."""


def step_hooks_of(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """The number of hooks before and after the ``step`` of one optimizer."""
    return len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)


def has_global_step_hooks() -> bool:
    """Whether hooks around the ``step`` of all optimizers are registered."""
    return bool(optimizer_module._global_optimizer_pre_hooks or optimizer_module._global_optimizer_post_hooks)


def mark_scheduled(step: Any) -> None:
    """Mark a replaced ``optimizer.step``, so that learning rate schedulers do not wrap it or warn."""
    step._wrapped_by_lr_sched = True


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Record that ``optimizer.step`` was called, which learning rate schedulers check."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def fsdp_reduce_scatter() -> type[Any]:
    """The base class of a custom reduce-scatter of ``fully_shard``. The import is slow, so it is here."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    return ReduceScatter
