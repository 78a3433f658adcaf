"""Does an optimizer update each element by itself? Only then may a parameter be cut between workers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.leaves import UNIT

STEPS = 3
_FAILURES = (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError)


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UserError`` where ``optimizer`` does not come to the same bits on cut and flattened parameters.

    Tried on random numbers, with the options of each of its parameter groups; takes a few milliseconds a group.
    """
    for group in optimizer.param_groups:
        options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        if "lr" in options and float(options["lr"]) == 0.0:  # a schedule begins there, perhaps
            options["lr"] = 0.01
        device = next((p.device for p in group["params"]), torch.device("cpu"))
        if not _is_elementwise(optimizer, options, device):
            raise UserError(
                "an optimizer whose state is divided must update each element by itself",
                f"{type(optimizer).__name__} does not",
                "use SGD, Adam, AdamW or another that does, or --mechanism replicated",
            )


def _is_elementwise(optimizer: torch.optim.Optimizer, options: dict[str, Any], device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, UNIT // 2, generator=generator).to(device)
    whole = nn.Parameter(values.clone())
    pieces = [nn.Parameter(piece.clone()) for piece in (values.view(-1)[:UNIT], values.view(-1)[UNIT:])]
    try:
        runs = [_built(optimizer, options, [whole]), _built(optimizer, options, pieces)]
    except _FAILURES:  # it takes matrices only, say, or options that are not in its groups
        return False
    for _ in range(STEPS):
        gradient = torch.randn(3, UNIT // 2, generator=generator).to(device)
        whole.grad = gradient.clone()
        pieces[0].grad, pieces[1].grad = gradient.view(-1)[:UNIT].clone(), gradient.view(-1)[UNIT:].clone()
        try:
            for run in runs:
                run.step()
        except _FAILURES:  # LBFGS asks for a closure
            return False
    updated = torch.cat([piece.detach() for piece in pieces])
    return torch.equal(whole.detach().view(-1), updated) and not torch.equal(updated, values.view(-1))


def _built(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """One of the same kind and options on other parameters: the same object, as it was built, but for its state."""
    built = copy.copy(optimizer)
    built.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    built.state = type(optimizer.state)(dict)
    built.param_groups = [{**copy.deepcopy(options), "params": params}]
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(built, hooks, type(getattr(optimizer, hooks))())
    return built
