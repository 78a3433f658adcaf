"""Models under ``torch.compile`` and under bf16 autocast: plain names, fp32 outputs.

A compiled module wraps the original and adds ``_orig_mod.`` to the names of its tensors. State that moves between
workers or is saved uses the plain names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elastune.core.errors import UserError
from elastune.core.slots import Mode

F = TypeVar("F", bound=Callable[..., Any])
PREFIX = "_orig_mod."


def plain(module: nn.Module) -> nn.Module:
    """``module`` without the wrapper of ``torch.compile``; compiled modules inside of it get plain names, too.

    They still run compiled. Call it again after the program has compiled more of the module.
    """
    if (kind := _wrapper()) is None:
        return module
    while isinstance(module, kind):
        module = module._orig_mod
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, kind):
                inner = plain(part)
                if inner._compiled_call_impl is None:  # ``inner.compile()`` would have set it
                    inner._compiled_call_impl = part.dynamo_ctx(_entry(inner))
                parent.register_module(name, inner)
    return module


def _entry(module: nn.Module) -> Callable[..., Any]:
    """The function that the compiler starts at: the first frame outside torch; torch's own modules have none."""
    if not type(module).__module__.startswith("torch."):
        return module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # a code object of its own: torch keeps and counts compiled code by it
    return call


def unseen(function: F) -> F:
    """``function``, marked so that the compiler leaves it alone, if this process has a compiler."""
    return function if _wrapper() is None else torch.compiler.disable(function)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it was compiled."""
    kind = _wrapper()
    if kind is None:
        return False
    return any(isinstance(part, kind) or part._compiled_call_impl is not None for part in module.modules())


def plain_name(name: str) -> str:
    """The name of a tensor that was saved from a compiled model, as the model itself has it."""
    return name.replace(PREFIX, "")


def by_shapes_alone(mode: Mode) -> None:
    """Let compiled code in ``exact`` mode depend on the shapes it is for alone, not on shapes a worker has seen before.

    Torch compiles a worker's second shape for any shape. Such code rounds differently than the code of a worker
    that has seen this shape alone.
    """
    if mode == "exact" and _wrapper() is not None:
        config: Any = sys.modules["torch._dynamo"].config
        config.automatic_dynamic_shapes = False
        config.fail_on_recompile_limit_hit = not config.suppress_errors


def too_many_shapes(error: BaseException) -> UserError | None:
    """The error for the user, where ``error`` is torch's for a compiled model that got too many shapes; else None."""
    if type(error).__name__ != "FailOnRecompileLimitHit":
        return None
    limit = sys.modules["torch._dynamo"].config.recompile_limit
    rule = "in exact mode compiled code is for one shape, and of a few"
    fix = "pad batches to fewer lengths, raise torch._dynamo.config.recompile_limit, or use --mode fast"
    return UserError(rule, f"more than {limit}, or other changes of what it depends on", f"{fix} (docs/programs.md)")


def _wrapper() -> Any:
    """The class of compiled modules; None where this process has not imported the compiler, which takes long."""
    dynamo = sys.modules.get("torch._dynamo")
    return None if dynamo is None else getattr(dynamo, "OptimizedModule", None)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models uncompiled, so that each operation can be observed."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Using `torch.compile"
        )  # of hooks on all modules: an observer has some
        yield


# --- mixed precision around a model's forward pass: bf16 inside, fp32 out ---

_ENTERED: list[torch.autocast] = []
"""The contexts of the running forward passes."""


class Autocast:
    """Runs every forward pass of ``model`` under bf16 autocast and returns its floating-point outputs as fp32.

    Weights, gradients and optimizer state stay fp32, as torch's automatic mixed precision has it.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._handles: list[RemovableHandle] = []
        self._unseen = False
        self.register()

    def register(self) -> None:
        """Put the hooks on the model; again after the program has compiled it, since hooks must not be compiled."""
        before, after = unseen(self._before), unseen(_after)
        if self._handles and self._unseen == (after is not _after):
            return
        self._unseen = after is not _after
        for handle in self._handles:
            handle.remove()
        model = self._model
        self._handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after, always_call=True)]

    def _before(self, _: nn.Module, __: Any) -> None:
        context = torch.autocast(self._device.type, dtype=torch.bfloat16)
        context.__enter__()
        _ENTERED.append(context)


def _after(_: nn.Module, __: Any, output: Any) -> Any:
    _ENTERED.pop().__exit__(None, None, None)
    return _to_fp32(output)


def leave_passes() -> None:
    """Leave the contexts of passes that a ``BaseException`` has ended: torch runs no hook then."""
    while _ENTERED:
        _ENTERED.pop().__exit__(None, None, None)


def _to_fp32(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype == torch.bfloat16 else output
    if isinstance(output, (list, tuple)):
        return type(output)(map(_to_fp32, output))
    if isinstance(output, dict):
        return {key: _to_fp32(value) for key, value in output.items()}
    return output
