"""Errors for programs that use a divided model as if it were whole, and for optimizers that cannot be divided.

A gradient or a value may lie with other workers: whoever reads, copies, pickles or saves it gets a ``UserError``.
A parameter may be cut between workers only if the optimizer updates each element by itself; this is tried out.
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
from elastune.parallel.mechanisms.owned.store import has_storage

# [in place] What ties a program's model to other workers: it stays where it is.

SAVED_ELSEWHERE = "save by session.save and elastune export"
"""What to do in place of writing a model that lies in parts."""


class ProcessLocal:
    """A copy of the model (an average of its weights, say) has the same one, and nothing that has it is pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickling()


def refuse_pickling() -> NoReturn:
    """Raise ``UserError`` for what would mean nothing without the workers that it was made for."""
    rule = "a model that workers have in parts is not pickled"
    fix = f"{SAVED_ELSEWHERE}, or use --mechanism replicated or zero"
    raise UserError(rule, "torch.save or pickle of the model or a module of it", fix)


# [guard] Where a parameter's gradient or values lie with other workers, whoever reads, copies or saves them is told so.

_HARMLESS = {"detach", "detach_", "zero_", "_foreach_zero_"}
"""What ``zero_grad`` does."""


class GradientGuard(torch.Tensor):
    """A tensor without values, of a parameter's shape: clipping by itself, norms and prints raise ``UserError``.

    Silence would be worse: torch's ``clip_grad_norm_`` skips parameters that have no gradient.
    """

    @staticmethod
    def of(parameter: torch.Tensor) -> GradientGuard:
        """The one that ``parameter`` may have for a gradient."""
        guard: GradientGuard = torch.Tensor._make_wrapper_subclass(
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
    """From here on whoever copies, pickles or saves one of ``parameters`` that is not here is told so (``UserError``),
    as is who asks ``model`` or a module of it for its ``state_dict``: they would read freed memory.
    """
    for p in parameters:
        p.__class__ = _guarded(type(p))
    for module in model.modules():
        module.register_state_dict_pre_hook(_refuse_state_dict)


class _Guarded(nn.Parameter):
    """A parameter that may lie with other workers. What is copied or loaded of one that is here is a plain one."""

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
    """``kind``, guarded; whatever asks for a parameter's class is told that name."""
    if issubclass(kind, _Guarded):
        return kind
    return type(
        kind.__name__, (_Guarded, kind), {"plain": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """What torch calls before it takes a module's parameters for a ``state_dict``."""
    for p in module.parameters(recurse=False):
        _refuse_unless_here(p, "a state_dict", SAVED_ELSEWHERE)


def _refuse_unless_here(p: torch.Tensor, what: str, instead: str) -> None:
    if not has_storage(p):
        rule = f"{what} needs all of its parameters on each worker"
        fix = f"{instead}, or use --mechanism replicated or zero"
        raise UserError(rule, "parameters that lie with other workers", fix)


# [probe] Does an optimizer update each element by itself? Only then may a parameter be cut between workers.

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
