"""What stands in a parameter's ``grad`` where its gradient lies with other workers: whoever reads it is told so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from elastune.core.errors import UserError

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
