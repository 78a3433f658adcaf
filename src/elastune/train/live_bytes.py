"""The most bytes of tensors that are alive at once while some code runs; fake tensors count as real ones do.

What an operation takes for itself while it runs, and what an allocator rounds up, is not in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """While it is entered, storages that operations make are counted until nobody has them.

    ``most`` leaves out ``held``, which were there before, and gradients of parameters from where they are complete.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._held = {tensor.untyped_storage()._cdata for tensor in held}
        self._ends: dict[int, weakref.finalize[..., Any]] = {}

    def watch(self, parameters: Iterable[torch.Tensor]) -> list[Any]:
        """Leave their gradients out; the handles end that."""
        return [each.register_post_accumulate_grad_hook(self._complete) for each in parameters if each.requires_grad]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count what it made."""
        made = func(*args, **(kwargs or {}))
        for each in tree_iter(made):
            if isinstance(each, torch.Tensor) and each.layout is torch.strided:
                self._count(each.untyped_storage())
        self.most = max(self.most, self._now)
        return made

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._held and key not in self._ends:
            self._now += size
            self._ends[key] = weakref.finalize(storage, self._gone, key, size)

    def _complete(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        end = self._ends.get(storage._cdata)
        if end is not None and end.detach() is not None:
            self._gone(storage._cdata, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._now -= size
        del self._ends[key]
