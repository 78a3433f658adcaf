"""Memory for what travels."""

from __future__ import annotations

import torch

from elastune.parallel.comm.streamed import BufferPool


def test_what_was_given_back_goes_out_again() -> None:
    rooms = BufferPool(torch.device("cpu"))
    large, small = rooms.take(100, torch.float32), rooms.take(10, torch.float32)
    places = {large.data_ptr(), small.data_ptr()}
    assert len(large) == 100
    assert len(places) == 2
    rooms.give(large)
    rooms.give(small)
    again = rooms.take(5, torch.float64), rooms.take(50, torch.float64)
    assert {each.data_ptr() for each in again} == places
    assert [each.data_ptr() for each in again] == [small.data_ptr(), large.data_ptr()], "the smallest that fits"
    assert again[0].dtype == torch.float64


def test_no_more_is_kept_than_was_in_use_at_one_time() -> None:
    rooms = BufferPool(torch.device("cpu"))
    for size in (10, 1000, 20, 2000, 5):
        rooms.give(rooms.take(size, torch.uint8))
    assert [len(each) for each in rooms._free] == [2000]
