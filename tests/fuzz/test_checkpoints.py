"""Whatever becomes of a checkpoint's files: what is loaded is what was saved, or it is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_journals import ODD, places, put
from fuzz_kit import fuzz, refusal
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.run import Position
from elastune.train.checkpoints.checkpoint import Checkpoint, complete, damaged, load, load_newest, save, spans
from elastune.train.checkpoints.spool import seal, unseal
from elastune.train.checkpoints.tree import fingerprint

FILES = ("state.json", "tensors.safetensors")


def checkpoint(step: int) -> Checkpoint:
    states = {
        "model": {"w": torch.arange(64.0) + step, "n": torch.tensor(step)},
        "progress": {"spans": [[0, 0, step, 9, 1, step]], "rate": float("inf")},
    }
    return Checkpoint(Position(1, step, step, 8 * step), {"seed": 1, "config": {"lr": 0.1}}, states)


def prints(found: Checkpoint) -> str:
    return fingerprint({"position": vars(found.position), "must_match": found.must_match, "states": found.states})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    for step in (4, 5):
        save(folder, checkpoint(step))
    return folder


@st.composite
def accidents(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    kinds = st.sampled_from(["flip", "cut", "insert", "swap", "remove", "rename", "foreign", "zero"])
    made = []
    for _ in range(draw(st.integers(1, 2))):
        kind, file = draw(kinds), draw(st.sampled_from(FILES))
        made.append((kind, file, draw(st.integers(0, 10**6)), draw(st.binary(min_size=1, max_size=8))))
    return made


def befall(folder: Path, kind: str, file: str, at: int, content: bytes) -> None:
    """An accident to the newest checkpoint in ``folder``."""
    path = folder / "step-0000000005" / file
    if kind in ("flip", "cut", "insert", "zero") and path.is_file():
        whole = bytearray(path.read_bytes())
        at %= max(1, len(whole))
        match kind:
            case "flip" if whole:
                whole[at] ^= content[0] or 1
            case "cut":
                del whole[at:]
            case "insert":
                whole[at:at] = content
            case "zero":
                whole[at:] = bytes(len(whole) - at)
        path.write_bytes(whole)
    elif kind == "swap":
        shutil.copy(folder / "step-0000000004" / file, path)
    elif kind == "remove":
        path.unlink(missing_ok=True)
    elif kind == "rename" and path.is_file():
        path.rename(path.with_name(f"{file}.old"))
    elif kind == "foreign":
        (path.parent / content.hex()).write_bytes(content)
        (folder / f"step-{content.hex()}x").mkdir(exist_ok=True)


@fuzz(60)
@given(made=accidents())
def test_what_is_loaded_is_what_was_saved(pristine: Path, tmp_path_factory: Any, made: list[tuple[Any, ...]]) -> None:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    shutil.copytree(pristine, folder)
    for accident in made:
        befall(folder, *accident)
    newest = complete(folder)[-1]
    if refused := refusal(lambda: load(newest)):
        assert str(newest) in refused
        loaded = load_newest(folder)
        assert loaded is not None
        assert list(damaged(folder)) == [5]
        assert prints(loaded[1]) == prints(checkpoint(4))
    else:
        assert prints(load(newest)) == prints(checkpoint(5))
        assert damaged(folder) == {}
    refusal(lambda: spans(newest))


@fuzz(40)
@given(data=st.data())
def test_a_tree_that_nobody_wrote_is_refused_or_loaded(pristine: Path, tmp_path_factory: Any, data: Any) -> None:
    """Its digest fits, as that of a program with a mistake would."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    shutil.copytree(pristine, folder)
    state = folder / "step-0000000005" / "state.json"
    tree = unseal(state.read_bytes())
    at = data.draw(st.sampled_from(places(tree)))
    state.write_bytes(seal(put(tree, at, data.draw(st.sampled_from(ODD)))))
    refusal(lambda: load(state.parent))
    refusal(lambda: spans(state.parent))
