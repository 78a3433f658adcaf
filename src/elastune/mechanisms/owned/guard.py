"""Where a parameter's gradient or values lie with other workers, whoever reads or copies them is told so."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from elastune.core.errors import UserError
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


def refuse_copies(parameters: Iterable[nn.Parameter]) -> None:
    """From here on ``copy.deepcopy`` of one that is not here raises ``UserError``; it would read freed memory."""
    for p in parameters:
        p.__deepcopy__ = partial(_copied, ref(p))  # type: ignore[method-assign]


def _copied(parameter: ref[nn.Parameter], memo: dict[int, Any]) -> Any:
    p = parameter()
    assert p is not None, "whoever copies it has it"
    if not has_storage(p):
        rule = "a copy of a model needs all of its parameters on each worker"
        fix = "copy it before session.prepare, or use --mechanism replicated or zero"
        raise UserError(rule, "parameters that lie with other workers", fix)
    return nn.Parameter.__deepcopy__(p, memo)
