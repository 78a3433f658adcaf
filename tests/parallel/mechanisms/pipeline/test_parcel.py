"""What goes from stage to stage arrives as it was: values, strides, alignment, and which of it needs gradients."""

from __future__ import annotations

import pytest
import torch

from elastune.core.errors import UserError
from elastune.parallel.mechanisms.pipeline.stage import ALIGNMENT, pack, tensors_in, unpack

BASE = torch.arange(240.0)
TENSORS = {
    "plain": BASE.view(10, 24),
    "transposed": BASE.view(10, 24).T,
    "channels last": BASE.view(2, 3, 5, 8).contiguous(memory_format=torch.channels_last),
    "repeated": BASE[:24].view(1, 24).expand(10, 24),
    "with gaps": BASE.view(10, 24)[:, 3:7],
    "begun at an odd place": BASE[7:19],
    "empty": BASE[:0].view(0, 5),
    "one number": torch.tensor(3.5),
    "half": BASE.bfloat16(),
    "integers": torch.arange(7),
    "flags": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was(name: str) -> None:
    """Also behind another one that leaves it at an odd place of the payload."""
    sent = TENSORS[name]
    text, payload = pack({"before": torch.zeros(3, dtype=torch.uint8), "it": [sent, (sent, None, 2.5)]})
    result = unpack(text, payload)
    assert result["it"][1][1:] == (None, 2.5)
    assert type(result["it"][1]) is tuple
    for tensor in tensors_in(result["it"]):
        assert torch.equal(tensor, sent)
        assert (tensor.dtype, tensor.stride()) == (sent.dtype, sent.stride())
        assert not tensor.numel() or tensor.data_ptr() % ALIGNMENT == sent.data_ptr() % ALIGNMENT
        assert tensor._base is None


def test_gradients_are_asked_for_where_they_were() -> None:
    """Stages ask the next one for the gradients of these alone."""
    first, second = torch.ones(2, requires_grad=True), torch.ones(2)
    result = unpack(*pack((first, second)))
    assert [tensor.requires_grad for tensor in result] == [True, False]


def test_shapes_alone_decide_on_the_text() -> None:
    """It travels once for each shape."""
    assert pack([torch.zeros(3)])[0] == pack([torch.ones(3)])[0] != pack([torch.ones(4)])[0]


def test_what_cannot_travel_is_refused() -> None:
    """In one line."""
    with pytest.raises(UserError, match="stages hand on tensors"):
        pack({"a": object()})
