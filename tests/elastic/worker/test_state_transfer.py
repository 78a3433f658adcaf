"""A state arrives as it was sent, whatever it is made of."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from elastune.elastic.worker.recovery import (
    DTYPES,
    SMALL_BYTES,
    receive_floats,
    receive_packed,
    send_floats,
    send_packed,
)
from elastune.parallel.comm.group import Group


class Pipe(Group):
    """What is sent is received, in order; a receiver that expects another size fails, as gloo would."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: deque[torch.Tensor] = deque()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        assert tensor.is_contiguous()
        self.sent.append(tensor.clone())

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        came = self.sent.popleft()
        assert (came.dtype, came.shape) == (tensor.dtype, tensor.shape)
        tensor.copy_(came)


def tensor_of(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    return (torch.rand(shape) * 100).to(dtype)


tensors = st.builds(tensor_of, st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3))


@given(st.binary(min_size=1, max_size=40), st.lists(tensors, max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_state(header: bytes, state: list[torch.Tensor]) -> None:
    pipe = Pipe()
    send_packed(pipe, 1, (header, state))
    came_header, came = receive_packed(pipe, 0)
    assert not pipe.sent
    assert came_header == header
    assert len(came) == len(state)
    for a, b in zip(came, state, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)


def test_large_tensors_travel_alone_and_small_ones_together() -> None:
    pipe = Pipe()
    large, small = torch.rand(SMALL_BYTES // 4 + 1), torch.rand(10)
    send_packed(pipe, 1, (b"{}", [small, large, small.clone(), large.t()]))
    assert [t.numel() * t.element_size() for t in list(pipe.sent)[3:]] == [80, 4 * len(large), 4 * len(large)]
    _, came = receive_packed(pipe, 0)
    assert torch.equal(came[2], small)
    assert torch.equal(came[3], large)


def test_what_is_not_contiguous_is_sent_by_value() -> None:
    pipe = Pipe()
    table = torch.rand(5, 3).t()
    send_packed(pipe, 1, (b"{}", [table]))
    assert torch.equal(receive_packed(pipe, 0)[1][0], table)


@given(st.lists(st.floats(allow_nan=False), max_size=5))
@settings(max_examples=20, deadline=None)
def test_numbers(values: list[float]) -> None:
    pipe = Pipe()
    send_floats(pipe, 1, values)
    assert receive_floats(pipe, 0) == values
