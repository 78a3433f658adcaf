"""The device of a worker, as far as it can be had without a GPU (with one: ``tests/parity/test_gpu.py``)."""

from __future__ import annotations

import torch

from elastune.core.run import ExecutionSettings, Place
from elastune.train.worker import set_up_device, unordered_kernel


def test_a_cpu_needs_nothing_but_its_threads() -> None:
    assert set_up_device(ExecutionSettings(threads=1), Place(device="cpu")) == torch.device("cpu")
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_only_what_torch_says_of_an_order_is_taken_for_that() -> None:
    assert unordered_kernel(RuntimeError("CUDA error: device-side assert triggered")) is None
    assert unordered_kernel(ValueError("x does not have a deterministic implementation")) is None
    result = unordered_kernel(RuntimeError("x_cuda does not have a deterministic implementation, but you set 'torch."))
    assert result is not None
    assert result.value == "x_cuda"
