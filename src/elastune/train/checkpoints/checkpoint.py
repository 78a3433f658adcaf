"""Checkpoints: safetensors and JSON in a folder that appears complete or not at all. Reading one runs no code.

``state.json`` carries the digest of its own bytes and that of the tensors' file, so one digest stands for all of it: a
checkpoint of which a byte, a name or a file was changed is ``Damaged``, and a run goes on from the one before it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from elastune.core.errors import UserError
from elastune.core.run import Position
from elastune.train.checkpoints.parts import States, from_trees, to_trees
from elastune.train.checkpoints.seal import digest_of, is_sealed, seal, unseal
from elastune.train.checkpoints.tree import Tensors, from_tree, to_tree
from elastune.train.data.sample_log import SampleSpans
from elastune.train.progress import Progress, position_of, spans_of

FORMAT = 3  # 1 had no number, and a field for each piece of state instead of parts; 2 had no digest
KEPT = 2
DRAFT = ".draft-"
DAMAGED = "damaged-"
UNWRITABLE = "a checkpoint must be writable"
TENSORS = "tensors.safetensors"
STATE = "state.json"
_NAME = re.compile(r"step-([0-9]{10,})")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SafetensorError)


class Damaged(UserError):
    """A checkpoint that is not, byte by byte, what was written."""


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
        save_file(plain, draft / TENSORS)
        with ThreadPoolExecutor(1) as disk:  # the digest is made while the disk writes
            written = disk.submit(_sync, draft / TENSORS)
            tree["files"] = {TENSORS: digest_of(draft / TENSORS)}
            written.result()
        (draft / STATE).write_bytes(seal(tree))
        for path in (draft / STATE, draft):
            _sync(path)
        if final.exists():  # moved, not removed: it is missing for the blink between two renames only
            final.rename(older)
        draft.rename(final)
        _sync(folder)
        shutil.rmtree(older, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise UserError(UNWRITABLE, error, f"free space at {folder} or use another --out") from None
    _drop(complete(folder)[:-KEPT])
    return final


def complete(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first: each was complete once. Anything of another name is none."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def back_to_epoch(folder: Path) -> None:
    """Let a run go on from the newest checkpoint at the end of an epoch; where there is none, from the newest."""
    later: list[Path] = []
    for path in reversed(complete(folder)):
        with suppress(Damaged):
            if position_of(_tree(path)["position"]).offset == 0:
                return _drop(later)
        later.append(path)
    return None


def damaged(folder: Path) -> dict[int, str]:
    """The steps of the newest checkpoints in ``folder`` that are not whole, and why, up to the first that is."""
    found: dict[int, str] = {}
    for path in reversed(complete(folder)):
        try:
            _check(path, _tree(path))
            break
        except Damaged as error:
            found[step_of(path)] = str(error.value)
        except UserError:  # of another format, or not ours to read: whoever loads it says so
            break
    return found


def set_aside(folder: Path, steps: Iterable[int]) -> None:
    """Let no run go on from the checkpoints of ``steps``: they stay, under names of their own."""
    for step in steps:
        path = of_step(folder, step)
        aside = folder / f"{DAMAGED}{path.name}"
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(FileNotFoundError):
            path.rename(aside)


def of_step(folder: Path, step: int) -> Path:
    """Where in ``folder`` the checkpoint after ``step`` steps is."""
    return folder / f"step-{step:010d}"


def step_of(path: Path) -> int:
    """After how many steps the checkpoint at ``path`` was taken."""
    found = _NAME.fullmatch(path.name)
    assert found is not None, path
    return int(found[1])


def load(path: Path, fix: str = "delete this folder to continue from the one before it") -> Checkpoint:
    """Read what ``save`` wrote.

    Raises ``Damaged``, with ``fix``, for anything else, and ``UserError`` for another format.
    """
    tree = _tree(path, fix)
    _check(path, tree, fix)
    with _refusing(path, fix):
        tensors = load_file(path / TENSORS)
        return Checkpoint(
            position=position_of(tree["position"]),
            meaning=from_tree(tree["meaning"], tensors),
            states=from_trees(tree["parts"], tensors),
        )


def load_newest(folder: Path) -> tuple[Path, Checkpoint] | None:
    """The newest checkpoint that is whole; None where there never was one. Raises ``UserError`` where none is left."""
    first: Damaged | None = None
    for path in reversed(complete(folder)):
        try:
            return path, load(path)
        except Damaged as error:
            first = first or error
            print(f"elastune: {error.rule} (got {error.value}): going on from the one before it", file=sys.stderr)
    if first is not None:
        raise first
    return None


def spans(path: Path) -> SampleSpans:
    """Which samples the run at ``path`` has used; nothing where that cannot be told.

    Raises ``UserError`` for a checkpoint of another format.
    """
    try:
        return spans_of(from_tree(_tree(path)["parts"][Progress.name], {}))
    except (Damaged, *_UNREADABLE):
        return []


def _tree(path: Path, fix: str = "") -> dict[str, Any]:
    """What ``state.json`` holds, as it was written."""
    with _refusing(path, fix):
        content = _regular(path / STATE).read_bytes()
        sealed = is_sealed(content)
        tree: dict[str, Any] = unseal(content) if sealed else json.loads(content)
        position = tree["position"]
        other = tree.get("format", 1)
        if other == FORMAT and not sealed:
            raise ValueError(f"{STATE} lacks its digest")
        if other == FORMAT and step_of(path) != position_of(position).step:
            raise ValueError(f"it was taken after {position['step']} steps")
    if other != FORMAT:
        another = "use the version of elastune that wrote it, or begin again in another --out"
        raise UserError(f"a checkpoint must be of format {FORMAT}", f"format {other}: {path}", another)
    return tree


def _check(path: Path, tree: dict[str, Any], fix: str = "") -> None:
    with _refusing(path, fix):
        if digest_of(_regular(path / TENSORS)) != tree["files"][TENSORS]:
            raise ValueError(f"the bytes of {TENSORS} do not have the digest that they were written with")


@contextmanager
def _refusing(path: Path, fix: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise UserError("a checkpoint must be readable", error, "run as the user who wrote it") from None
    except _UNREADABLE as error:
        raise Damaged("a checkpoint must be whole", f"{path}: {type(error).__name__}: {error}", fix) from None


def _regular(path: Path) -> Path:
    """``path``, unless reading it could block, as that of a pipe does."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no file")
    return path


def _drop(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # renamed first: half a removal must not look like a checkpoint
            shutil.rmtree(path.rename(path.with_name(f"{DRAFT}{path.name}")))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
