"""A best checkpoint that there was no room for is none: a later one, though lesser, is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.sessions import lone_session
from torch import nn

from elastune.train.checkpoints import run_folder
from elastune.train.checkpoints.checkpoint import complete


def test_a_value_whose_checkpoint_was_not_kept_is_not_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = lone_session(tmp_path)
    model = nn.Linear(2, 1)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    keep = run_folder.keep_best
    for full, accuracy, kept in ((True, 0.9, False), (False, 0.5, True), (True, 0.8, False), (False, 0.6, True)):
        monkeypatch.setattr(run_folder, "keep_best", (lambda *given: False) if full else keep)
        session.report(accuracy=accuracy)
        assert session.save_best("accuracy") is kept
    assert complete(tmp_path / "best" / "accuracy" / "checkpoints")
