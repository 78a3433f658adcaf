"""Emulated compute: products and convolutions that take as long as a device of a declared speed would need for them.

For benchmarks with more workers than this machine has cores: a worker sleeps until that time has gone, so workers do
not wait for each other's cores. What they send and wait for is real.
"""

from __future__ import annotations

import time
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Paced(TorchDispatchMode):
    """Inside, floating-point operations (as torch's FlopCounterMode counts them) take ``1 / flops_a_second`` each.

    Attributes:
        flops: Those counted so far.
    """

    def __init__(self, flops_a_second: float) -> None:
        super().__init__()
        self.flops = 0.0
        self._owed_s = 0.0
        self._flops_a_second = flops_a_second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            flops = count(*args, **(kwargs or {}), out_val=out)
            self.flops += flops
            self._owed_s += flops / self._flops_a_second - (time.perf_counter() - started)
            if self._owed_s > 0.001:  # short sleeps are not exact
                slept = time.perf_counter()
                time.sleep(self._owed_s)
                self._owed_s -= time.perf_counter() - slept
        return out
