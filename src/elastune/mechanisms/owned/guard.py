"""Where a parameter's gradient or values lie with other workers, whoever reads, copies or saves them is told so."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.mechanisms.in_place import SAVED_ELSEWHERE
from elastune.mechanisms.owned.store import has_storage

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
