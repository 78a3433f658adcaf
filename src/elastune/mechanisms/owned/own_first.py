"""An optimizer's step in two calls: first what other workers wait for, then, while that travels, the copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch.optim import optimizer as hooks

from elastune.core.ownership import Segment
from elastune.mechanisms.owned.store import LeafStore


class OwnFirst:
    """Has ``store``'s optimizer step on some of its shards alone; ``finish`` steps on the others.

    That shows nowhere else: the program, its schedulers and profilers see one step, and the bits are those of one.
    Hence it is left alone where somebody may see more: hooks of others, a closure, or an optimizer that is not torch's
    own and may count its calls (torch's count steps with each parameter), or whose ``step`` somebody has wrapped.
    """

    def __init__(self, store: LeafStore) -> None:
        optimizer = store.optimizer
        self._store, self._optimizer = store, optimizer
        self._step = _without_hooks(type(optimizer))
        self._later: dict[torch.nn.Parameter, torch.Tensor | None] = {}

    def begin(self, own: Set[Segment], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """To be called by the optimizer's pre-hook: its step with these arguments is to be on the shards of ``own``."""
        self._later = {}
        if self._step is not None and len(args) == 1 and not kwargs and not self._has_other_hooks():
            later = [s.parameter for s in self._store.shards if s.segment not in own and s.parameter.grad is not None]
            self._later = {p: p.grad for p in later}
            _give(dict.fromkeys(later))

    def finish(self) -> None:
        """Step on the rest, if there is any left."""
        later, self._later = self._later, {}
        if later and self._step is not None:
            done = {s.parameter: s.parameter.grad for s in self._store.shards}
            _give({**dict.fromkeys(done), **later})
            self._step(self._optimizer)
            _give({**done, **later})

    def _has_other_hooks(self) -> bool:
        own = len(self._optimizer._optimizer_step_pre_hooks), len(self._optimizer._optimizer_step_post_hooks)
        return own != (1, 1) or bool(hooks._global_optimizer_pre_hooks or hooks._global_optimizer_post_hooks)


def _without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any] | None:
    """``step`` without the hooks around it, which torch keeps within reach of functools.wraps; None where it is not
    torch's own, or somebody has wrapped it: what is within reach then is theirs, or has the hooks once more.
    """
    if not kind.__module__.startswith("torch.optim."):
        return None
    step: Callable[..., Any] | None = getattr(kind.step, "__wrapped__", None)
    written_in = getattr(step, "__globals__", {}).get("__name__", "")
    return None if getattr(step, "hooked", False) or not written_in.startswith("torch.") else step


def _give(gradients: Mapping[torch.nn.Parameter, torch.Tensor | None]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
