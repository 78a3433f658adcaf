"""Errors for programs that use a divided model as if it were whole, and for optimizers that cannot be divided.

A gradient or a value may lie on other workers. A program that reads, copies, pickles or saves it gets a ``UserError``.
A parameter may be cut between workers only if the optimizer updates each element independently, which a trial shows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any, NoReturn, Self

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.layout import UNIT
from elastune.parallel.mechanisms import torch_private
from elastune.parallel.mechanisms.owned.store import has_storage

SAVED_ELSEWHERE = "save by session.save and elastune export"
"""The fix in errors about saving a model that lies in parts."""


class ProcessLocal:
    """Base of objects that belong to this process and its workers.

    A deep copy of the model (for an average of its weights, say) shares the object. Pickling it raises ``UserError``.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickling()


def refuse_pickling() -> NoReturn:
    """Raise ``UserError``: the object has no meaning without the workers that it was made for."""
    rule = "a model that workers have in parts is not pickled"
    fix = f"{SAVED_ELSEWHERE}, or use --mechanism replicated or zero"
    raise UserError(rule, "torch.save or pickle of the model or a module of it", fix)


_HARMLESS = {"detach", "detach_", "zero_", torch_private.FOREACH_ZERO_}
"""The operations of ``zero_grad``."""


class GradientGuard(torch.Tensor):
    """A gradient without values, whose use raises ``UserError``: torch's clipping, norms, prints.

    It stands on a parameter whose gradient lies on other workers. No gradient at all would be worse: torch's
    ``clip_grad_norm_`` silently skips parameters without one.
    """

    @staticmethod
    def of(parameter: torch.Tensor) -> GradientGuard:
        """A guard that fits as the gradient of ``parameter``."""
        guard: GradientGuard = torch_private.new_wrapper_tensor(
            GradientGuard, parameter.shape, dtype=parameter.dtype, device=parameter.device, layout=parameter.layout
        )
        return guard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        if func.overloadpacket.__name__ in _HARMLESS:
            return args[0]
        raise UserError(
            "a gradient lies in pieces with the workers that hold its parameter",
            f"the program uses the gradient of a parameter ({func.overloadpacket.__name__})",
            "clip with session.clip_grad_norm_(max_norm), or use --mechanism replicated",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientGuard({tuple(self.shape)})"


def refuse_copies(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Make copying, pickling or saving a parameter without storage raise ``UserError`` from now on.

    The same holds for the ``state_dict`` of ``model`` and its modules. Without this they would read freed memory.
    """
    for p in parameters:
        p.__class__ = _guarded(type(p))
    for module in model.modules():
        module.register_state_dict_pre_hook(_refuse_state_dict)


class _Guarded(nn.Parameter):
    """A parameter whose values may lie on other workers. A copy of one that lies here is a plain parameter."""

    plain: type[nn.Parameter]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refuse_unless_here(self, "a copy of a model", "copy it before session.prepare")
        copied = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied.__class__ = self.plain
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_unless_here(self, "a file of a model", SAVED_ELSEWHERE)
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


@cache
def _guarded(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The guarded subclass of ``kind``. It has the name of ``kind``."""
    if issubclass(kind, _Guarded):
        return kind
    return type(
        kind.__name__, (_Guarded, kind), {"plain": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Hook that torch calls before it collects a module's parameters for a ``state_dict``."""
    for p in module.parameters(recurse=False):
        _refuse_unless_here(p, "a state_dict", SAVED_ELSEWHERE)


def _refuse_unless_here(p: torch.Tensor, what: str, instead: str) -> None:
    if not has_storage(p):
        rule = f"{what} needs all of its parameters on each worker"
        fix = f"{instead}, or use --mechanism replicated or zero"
        raise UserError(rule, "parameters that lie with other workers", fix)


STEPS = 3
_FAILURES = (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError)


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UserError`` where ``optimizer`` gives other bits on cut and flattened parameters.

    Only an optimizer that updates each element independently may have a parameter cut between workers. The trial uses
    random numbers and the options of each parameter group. It takes a few milliseconds a group.
    """
    for group in optimizer.param_groups:
        options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        if "lr" in options and float(options["lr"]) == 0.0:  # a schedule may begin at 0
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
    except _FAILURES:  # for example: it takes only matrices, or options that are not in its groups
        return False
    for _ in range(STEPS):
        gradient = torch.randn(3, UNIT // 2, generator=generator).to(device)
        whole.grad = gradient.clone()
        pieces[0].grad, pieces[1].grad = gradient.view(-1)[:UNIT].clone(), gradient.view(-1)[UNIT:].clone()
        try:
            for run in runs:
                run.step()
        except _FAILURES:  # LBFGS requires a closure
            return False
    updated = torch.cat([piece.detach() for piece in pieces])
    return torch.equal(whole.detach().view(-1), updated) and not torch.equal(updated, values.view(-1))


def _built(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` with empty state, ``options`` and ``params``."""
    built = copy.copy(optimizer)
    built.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    built.state = type(optimizer.state)(dict)
    built.param_groups = [{**copy.deepcopy(options), "params": params}]
    for hooks in torch_private.STEP_HOOKS:
        setattr(built, hooks, type(getattr(optimizer, hooks))())
    return built
