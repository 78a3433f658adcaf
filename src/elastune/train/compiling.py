"""Models under ``torch.compile`` and under bf16 autocast: plain names, compile time, fp32 outputs.

A compiled module wraps the original and adds ``_orig_mod.`` to the names of its tensors. State that moves between
workers or is saved uses the plain names.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elastune.core.errors import UserError
from elastune.core.run import Mode

# [compiling] Models under ``torch.compile``: plain names for what they hold, code that shapes alone decide, seconds told apart.
#
# A compiled module wraps the one it was made of, and puts ``_orig_mod.`` before the names of all that is in it. What is
# moved between workers, saved and compared is the module itself; one inside of a model is called through in its place.

F = TypeVar("F", bound=Callable[..., Any])
PREFIX = "_orig_mod."


def plain(module: nn.Module) -> nn.Module:
    """``module`` without what ``torch.compile`` has put around it; what is compiled inside of it has plain names, too.

    It still runs compiled there. May be called again, once the program has compiled more of it.
    """
    if (kind := _wrapper()) is None:
        return module
    while isinstance(module, kind):
        module = module._orig_mod
    for parent in list(module.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, kind):
                inner = plain(part)
                if inner._compiled_call_impl is None:  # what ``inner.compile()`` would have set
                    inner._compiled_call_impl = part.dynamo_ctx(_entry(inner))
                parent.register_module(name, inner)
    return module


def _entry(module: nn.Module) -> Callable[..., Any]:
    """What the compiler begins at: it takes the first frame that is not torch's, and torch's own modules have none."""
    if not type(module).__module__.startswith("torch."):
        return module._call_impl

    def call(*given: Any, **named: Any) -> Any:
        return module._call_impl(*given, **named)

    call.__code__ = call.__code__.replace()  # its own: code is kept, and counted, by where it begins
    return call


def unseen(function: F) -> F:
    """``function``, which the compiler is to leave as it is, if there is one in this process."""
    return function if _wrapper() is None else torch.compiler.disable(function)


def is_compiled(module: nn.Module) -> bool:
    """Whether something of ``module`` was compiled, in whatever way."""
    kind = _wrapper()
    if kind is None:
        return False
    return any(isinstance(part, kind) or part._compiled_call_impl is not None for part in module.modules())


def plain_name(name: str) -> str:
    """The name of a tensor that was saved from a compiled model, as the model itself has it."""
    return name.replace(PREFIX, "")


def by_shapes_alone(mode: Mode) -> None:
    """In ``exact`` mode code depends on the shapes that it is for, and not on those that a worker has seen before.

    Else a worker's second shape brings code for any, which rounds otherwise than another worker's code for the same.
    """
    if mode == "exact" and _wrapper() is not None:
        config: Any = sys.modules["torch._dynamo"].config
        config.automatic_dynamic_shapes = False
        config.fail_on_recompile_limit_hit = not config.suppress_errors


def too_many_shapes(error: BaseException) -> UserError | None:
    """What the user is told where ``error`` says that a compiled model was given too many shapes."""
    if type(error).__name__ != "FailOnRecompileLimitHit":
        return None
    limit = sys.modules["torch._dynamo"].config.recompile_limit
    rule = "in exact mode compiled code is for one shape, and of a few"
    fix = "pad batches to fewer lengths, raise torch._dynamo.config.recompile_limit, or use --mode fast"
    return UserError(rule, f"more than {limit}, or other changes of what it depends on", f"{fix} (docs/programs.md)")


def _wrapper() -> Any:
    """The class of compiled modules; None where this process has never compiled, and need not import what does."""
    found = sys.modules.get("torch._dynamo")
    return None if found is None else getattr(found, "OptimizedModule", None)


class CompileTimes:
    """Seconds that this process has spent in ``torch.compile``, as torch tells of it, forward and backward."""

    def __init__(self) -> None:
        self.seconds = 0.0  # all of them since the process began to ``listen``
        self._told = 0.0
        self._since: float | None = None

    def untold(self) -> float:
        """Those since this was asked last, in whatever session: also of a joiner's first passes, which do not count."""
        self.listen()
        before, self._told = self._told, self.seconds
        return self._told - before

    def listen(self) -> None:
        """Hear of what is compiled from here on, if there is a compiler in this process."""
        if (callbacks := sys.modules.get("torch._dynamo.callback")) is not None:
            handler = callbacks.callback_handler
            if self._begins not in handler.start_callbacks:  # not yet, or torch._dynamo.reset has dropped it
                handler.register_start_callback(self._begins)
                handler.register_end_callback(self._ends)

    def _begins(self, _: object) -> None:
        self._since = time.monotonic()

    def _ends(self, _: object) -> None:
        if self._since is not None:
            self.seconds += time.monotonic() - self._since
            self._since = None


COMPILED = CompileTimes()
"""Of this process: torch has one compiler in each."""


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled models run as they were before, for those who look at each operation."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using `torch.compile")  # of hooks on all modules: who looks has some
        yield


# [precision] Mixed precision around a model's forward pass: bf16 inside, fp32 out.

_ENTERED: list[torch.autocast] = []
"""Of passes under way."""


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
        """Again, where the program has compiled the model since: what enters and leaves is not to be compiled."""
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
    """Passes that were under way were left for good: torch runs no hook where a ``BaseException`` comes through."""
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
