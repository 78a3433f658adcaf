"""Tensors between devices, as far as it can be had without a GPU (with one: ``tests/parity/test_gpu.py``)."""

from __future__ import annotations

import torch

from elastune.parallel.comm.reducer import DeviceCopy, outbox, room

CPU = torch.device("cpu")


def test_room_is_zero_and_what_crosses_arrives() -> None:
    data = torch.arange(5, dtype=torch.float64)
    target = room(8, data.dtype, CPU, CPU)
    assert not target.any()
    DeviceCopy(data, target[:5]).wait()
    assert target.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_an_outbox_is_never_what_was_sent_before() -> None:
    data = torch.ones(4, dtype=torch.bfloat16)
    first, second = outbox(data, CPU), outbox(data, CPU)
    assert (first.shape, first.dtype) == (data.shape, data.dtype)
    assert len({t.data_ptr() for t in (data, first, second)}) == 3
