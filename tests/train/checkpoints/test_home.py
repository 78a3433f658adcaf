"""What an output folder that is removed, moved or replaced at any moment does to whoever writes into it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from elastune.core.errors import UserError
from elastune.train.checkpoints.checkpoint import contribute, draft
from elastune.train.checkpoints.checkpoint_part import CheckpointPart
from elastune.train.checkpoints.out_folder import OutFolder

MOMENTS = range(6)  # before each of the five calls that make a draft's folder, open and mkdir in turn; and after them
HOW = ("removed", "moved", "replaced")


def take_away(out: Path, how: str) -> None:
    out.rename(out.with_name("elsewhere"))
    if how == "removed":
        shutil.rmtree(out.with_name("elsewhere"))
    if how == "replaced":
        out.mkdir()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_is_made_in_what_has_taken_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, moment: int
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    home, calls = OutFolder.at(out), 0

    def later(inner: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if calls == moment:
                calls += 1  # before: what takes it away calls these functions, too
                take_away(out, how)
            else:
                calls += 1
            return inner(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", later(os.open))
        patch.setattr(os, "mkdir", later(os.mkdir))
        with suppress(UserError):  # not where it was moved, say, with all that is made
            home.make(out / "checkpoints" / ".draft-1")
    if calls <= moment:
        take_away(out, how)
    assert out.exists() == (how == "replaced")
    assert how != "replaced" or list(out.iterdir()) == []
    with pytest.raises(UserError, match="was removed or replaced"):
        home.check()
    with pytest.raises(UserError, match="was removed or replaced"):
        home.make(out / "checkpoints")


def test_a_share_of_a_checkpoint_is_written_into_the_folder_that_was_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    home = OutFolder.at(out)
    at = draft(out / "checkpoints", "1")
    contribute(at, CheckpointPart.of({"model": {"w": torch.zeros(2)}}), make=home.make)
    assert [file.name for file in at.iterdir()] == ["tensors.safetensors"]
    take_away(out, "replaced")
    with pytest.raises(UserError, match="was removed or replaced"):
        contribute(at, CheckpointPart.of({"model": {"w": torch.zeros(2)}}), make=home.make)
    assert list(out.iterdir()) == []


def test_a_folder_that_was_not_there_yet_is_made(tmp_path: Path) -> None:
    home = OutFolder.at(tmp_path / "out")
    home.make(tmp_path / "out" / "checkpoints")
    home.check()
    assert (tmp_path / "out" / "checkpoints").is_dir()
