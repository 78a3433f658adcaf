"""Checkpoints: safetensors and JSON in a folder that appears complete or not at all. Reading one runs no code."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from elastune.core.errors import UserError
from elastune.core.run import Position
from elastune.train.checkpoints.parts import States, from_trees, to_trees
from elastune.train.checkpoints.tree import Tensors, from_tree, to_tree
from elastune.train.data.sample_log import SampleSpans
from elastune.train.progress import Progress, position_of, spans_of

FORMAT = 2  # 1 had no number, and a field for each piece of state instead of parts
KEPT = 2
DRAFT = ".draft-"
UNWRITABLE = "a checkpoint must be writable"


@dataclass(frozen=True)
class Checkpoint:
    """A run at a step boundary.

    Attributes:
        position: Where it is.
        meaning: What must be equal for another run to go on from it.
        states: The state of every part, by its name.
    """

    position: Position
    meaning: dict[str, Any]
    states: States


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``folder/step-N`` atomically and drop all but the newest two. Raises ``UserError`` where it cannot."""
    tensors: Tensors = {}
    tree = {
        "format": FORMAT,
        "position": asdict(checkpoint.position),
        "meaning": to_tree(checkpoint.meaning, tensors, "meaning"),
        "parts": to_trees(checkpoint.states, tensors),
    }
    plain = {name: t.to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    final = of_step(folder, checkpoint.position.step)
    draft, older = folder / f"{DRAFT}{os.getpid()}", folder / f"{DRAFT}{os.getpid()}-older"
    try:
        for stale in folder.glob(f"{DRAFT}*"):  # of a process that was killed here; a folder has one writer
            shutil.rmtree(stale, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file(plain, draft / "tensors.safetensors")
        (draft / "state.json").write_text(json.dumps(tree))
        for path in (draft / "tensors.safetensors", draft / "state.json", draft):
            _sync(path)
        if final.exists():  # moved, not removed: it is missing for the blink between two renames only
            final.rename(older)
        draft.rename(final)
        _sync(folder)
        shutil.rmtree(older, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise UserError(UNWRITABLE, error, f"free space at {folder} or use another --out") from None
    for old in complete(folder)[:-KEPT]:
        with suppress(OSError):  # renamed first: half a removal must not look like a checkpoint
            shutil.rmtree(old.rename(folder / f"{DRAFT}{old.name}"))
    return final


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").is_file())


def back_to_epoch(folder: Path) -> None:
    """Let a run go on from the newest checkpoint at the end of an epoch; where there is none, from the newest."""
    later: list[Path] = []
    for path in reversed(complete(folder)):
        if load(path).position.offset == 0:
            for old in later:
                with suppress(OSError):  # renamed first: half a removal must not look like a checkpoint
                    shutil.rmtree(old.rename(folder / f"{DRAFT}{old.name}"))
            return
        later.append(path)


def drop_damaged(folder: Path) -> None:
    """Let a run go on from the newest checkpoint that is whole; where none is, from its beginning."""
    for path in reversed(complete(folder)):
        try:
            json.loads((path / "state.json").read_text())["position"]
            with safe_open(path / "tensors.safetensors", framework="pt"):  # reads the header, compares the size
                return
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            with suppress(OSError):
                shutil.rmtree(path.rename(folder / f"{DRAFT}{path.name}"))


def of_step(folder: Path, step: int) -> Path:
    """Where in ``folder`` the checkpoint after ``step`` steps is."""
    return folder / f"step-{step:010d}"


def step_of(path: Path) -> int:
    """After how many steps the checkpoint at ``path`` was taken."""
    return int(path.name.split("-")[1])


def load(path: Path, fix: str = "delete this folder to continue from the one before it") -> Checkpoint:
    """Read what ``save`` wrote. Raises ``UserError``, with ``fix``, for anything else."""
    try:
        tensors = load_file(path / "tensors.safetensors")
        tree = _tree(path)
        return Checkpoint(
            position=position_of(tree["position"]),
            meaning=from_tree(tree["meaning"], tensors),
            states=from_trees(tree["parts"], tensors),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, torch.OutOfMemoryError) as error:
        raise UserError("a checkpoint must be whole", f"{path}: {type(error).__name__}: {error}", fix) from None


def spans(path: Path) -> SampleSpans:
    """Which samples the run at ``path`` has used; nothing where that cannot be told.

    Raises ``UserError`` for a checkpoint of another format.
    """
    try:
        return spans_of(from_tree(_tree(path)["parts"][Progress.name], {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _tree(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((path / "state.json").read_text())
    found = tree.get("format", 1)
    if found != FORMAT:
        fix = "use the version of elastune that wrote it, or begin again in another --out"
        raise UserError(f"a checkpoint must be of format {FORMAT}", f"format {found}: {path}", fix)
    return tree


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
