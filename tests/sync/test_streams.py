"""What ``exact`` mode asks of random numbers, without a GPU."""

from __future__ import annotations

import pytest
from torch import nn

from elastune.core.errors import UserError
from elastune.sync.streams import check_streams


def on_gpu(part: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """As if its parameters lay on a GPU."""

    class There:
        class device:
            type = "cuda"

    for module in part.modules():
        monkeypatch.setattr(module, "parameters", lambda: [There()])
    return part


def test_dropout_that_no_seed_reaches_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4, num_layers=2, dropout=0.25))
    check_streams(inside)
    with pytest.raises(UserError, match=r"GRU '1' with dropout=0.25.*nn.Dropout between"):
        check_streams(on_gpu(inside, monkeypatch))
    for fine in (nn.GRU(4, 4, num_layers=2), nn.LSTM(4, 4), nn.Dropout(0.5)):
        check_streams(on_gpu(fine, monkeypatch))
