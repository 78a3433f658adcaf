"""Checkpoints: safetensors and JSON in a folder that appears complete or not at all. Reading one runs no code.

Every worker that holds unique state writes one file of tensors. ``state.json`` records which piece of which tensor is
in which file, and carries the digest of each file. If a byte, a name or a file was changed since, the checkpoint is
``Damaged``, and the run goes on from the one before it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from elastune.core.checkpoint_keeping import NEWEST_TWO, KeepCheckpoints, SavedCheckpoint, to_delete
from elastune.core.errors import UserError
from elastune.core.formatting import byte_count
from elastune.core.layout import FlatRange, fills, intersection
from elastune.core.run import Position
from elastune.elastic.coordinator.machine import ProtocolViolation
from elastune.parallel.mechanisms.tensor_storage import copy_common, whole
from elastune.train.checkpoints.checkpoint_part import CheckpointPart, Index, Written, file_name, sync, write
from elastune.train.checkpoints.spool import digest_of, is_sealed, seal, unseal
from elastune.train.checkpoints.tree import States, from_tree, from_trees, joined, to_tree
from elastune.train.data.sample_log import SampleSpans
from elastune.train.progress import Progress, position_of, spans_of

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORMAT = 4  # 2 had no digest; 3 had one file of whole tensors, and the optimizer's state by number
DRAFT = ".draft-"
DAMAGED = "damaged-"
UNWRITABLE = "a checkpoint must be writable"
STATE = "state.json"
DELETE = "delete this folder to continue from the one before it"
Check = Callable[[Path, Mapping[str, str]], str]
"""Returns what is wrong with the files of a checkpoint, given their digests by name; see ``faults``."""
_NAME = re.compile(r"step-([0-9]{10,})")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run at a step boundary.

    Attributes:
        position: How far the run is.
        must_match: The settings that a run must share to go on from it.
        states: The state of every part, by the part's name.
    """

    position: Position
    must_match: dict[str, Any]
    states: States


class Damaged(UserError):
    """A checkpoint that is not, byte by byte, as it was written."""


class NoRoom(UserError):
    """The disk has no room for a checkpoint."""


@dataclass(frozen=True)
class Contribution:
    """What one writer has written: its file, and the trees of the parts that it knows."""

    file: Written
    trees: dict[str, Any]

    @property
    def tree(self) -> dict[str, Any]:
        """This as a JSON value."""
        return asdict(self)

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Contribution:
        """The contribution whose ``tree`` this is."""
        return cls(Written(**tree["file"]), tree["trees"])


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``folder/step-N`` with this process alone; see ``publish``."""
    at = draft(folder, str(os.getpid()))
    shutil.rmtree(at, ignore_errors=True)
    drop_drafts(folder)
    try:
        share = contribute(at, CheckpointPart.of(checkpoint.states))
        return publish(at, checkpoint.position, checkpoint.must_match, [share])
    except NoRoom:
        give_up(at)
        raise


def load(path: Path, fix: str = DELETE, check: Check | None = None, whole_parts: bool = True) -> Checkpoint:
    """Read a checkpoint that ``save`` or ``publish`` wrote.

    Args:
        path: The checkpoint's folder.
        fix: What the user can do if it is damaged.
        check: Returns what is wrong with its files, given their digests; by default this process reads them all.
        whole_parts: Whether to read all tensors. If not, those of model and optimizer are ``StoredTensor``, read on
            demand.

    Raises:
        Damaged: The checkpoint is not as it was written.
        UserError: It has another format.
    """
    tree = _tree(path, fix)
    with _reading(path, fix):
        if wrong := (check or faults)(path, tree["files"]):
            raise ValueError(wrong)
        store = TensorStore(path, list(tree["files"]), tree["tensors"])
        whole_tensors = _Whole(store)
        lazy = () if whole_parts else ("model", "optimizer")
        on_demand = from_trees({name: part for name, part in tree["parts"].items() if name in lazy}, store)
        return Checkpoint(
            position=position_of(tree["position"]),
            must_match=from_tree(tree["must_match"], {}),
            states=on_demand
            | from_trees({name: part for name, part in tree["parts"].items() if name not in lazy}, whole_tensors),
        )


def load_newest(folder: Path, check: Check | None = None, whole_parts: bool = True) -> tuple[Path, Checkpoint] | None:
    """The newest checkpoint that is whole; None if there never was one. Raises ``UserError`` if all are damaged."""
    first: Damaged | None = None
    for path in reversed(complete(folder)):
        try:
            return path, load(path, check=check, whole_parts=whole_parts)
        except Damaged as error:
            first = first or error
            print(f"elastune: {error.rule} (got {error.value}): going on from the one before it", file=sys.stderr)
    if first is not None:
        raise first
    return None


# --- writing: a draft that becomes a checkpoint ---


def make_folder(folder: Path) -> None:
    """Make ``folder``, and the folders that contain it."""
    folder.mkdir(parents=True, exist_ok=True)


def draft(folder: Path, name: str) -> Path:
    """The folder for the files of an incomplete checkpoint in ``folder``.

    ``name`` is equal on all its writers, and differs from that of any other attempt at the same time.
    """
    return folder / f"{DRAFT}{name}"


def drop_older_drafts(at: Path) -> None:
    """Remove drafts of other steps beside the draft ``at``: their processes were killed, as a folder has one run.

    A worker may still be writing a draft of the same step, begun before a loss that other workers know of.
    """
    same = at.name.partition("-")[2].partition("-")[0]
    for stale in at.parent.glob(f"{DRAFT}*"):
        if stale.name.partition("-")[2].partition("-")[0] != same:
            shutil.rmtree(stale, ignore_errors=True)


def drop_drafts(folder: Path, published: str = "") -> None:
    """Remove the drafts in ``folder``: a checkpoint is complete, and all workers have contributed to it.

    ``published``: the name of its draft. Workers may have begun a later one, even of the same step; such a draft stays.
    """
    newest = _age(published)
    for stale in folder.glob(f"{DRAFT}*"):
        age = _age(stale.name)
        if not newest or not age or age <= newest:
            shutil.rmtree(stale, ignore_errors=True)


def _age(draft: str) -> tuple[int, ...]:
    """The key that orders drafts by time: view, step, and number in that view; () for any other name."""
    numbers = draft.removeprefix(DRAFT).split("-")
    if len(numbers) != 3 or not all(map(str.isdecimal, numbers)):
        return ()
    step, view, nth = map(int, numbers)
    return view, step, nth


def contribute(
    at: Path, part: CheckpointPart, number: int = 0, count: int = 1, make: Callable[[Path], None] = make_folder
) -> Contribution:
    """Write this worker's part of the draft ``at``, as writer ``number`` of ``count``; ``make`` makes its folder.

    A disk that has less free space than the part needs is not filled: the checkpoint is refused before its first byte.

    Raises:
        NoRoom: The disk is full. The draft stays until all its writers know, see ``give_up``.
        UserError: It cannot be written for another reason.
    """
    with writing(at):
        make(at)
        if (free := free_bytes(at)) < part.nbytes:
            needed = f"{byte_count(part.nbytes)} needed, {byte_count(free)} free in {at.parent}"
            raise NoRoom(UNWRITABLE, needed, f"free space at {at.parent}")
        return Contribution(write(at, file_name(number, count), part.tensors), part.trees)


def free_bytes(folder: Path) -> int:
    """The bytes that this user may still write to the disk of ``folder``. Raises ``OSError``."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def publish(
    at: Path,
    position: Position,
    must_match: dict[str, Any],
    shares: Sequence[Contribution],
    keep: KeepCheckpoints = NEWEST_TWO,
) -> Path:
    """Make the draft ``at`` the checkpoint of its folder after ``position``, and drop those that ``keep`` does not.

    ``state.json`` gets the digests of all files and of its own bytes, so that one digest stands for all of the
    checkpoint.

    Args:
        at: The folder that ``shares`` were written to, on a disk that all writers share.
        position: How far the run is.
        must_match: The settings that a run must share to go on from it.
        shares: The contribution of each writer. The first one has the parts that are equal on all.
        keep: Which checkpoints stay.

    Returns:
        The folder of the checkpoint.

    Raises:
        NoRoom: The disk is full.
        UserError: It cannot be written for another reason.
        ValueError: The shares are not a complete state.
    """
    content = sealed_state(position, must_match, shares)
    with writing(at):
        for share in shares:
            if not (at / share.file.name).is_file() or (at / share.file.name).stat().st_size != share.file.size:
                rule = "all workers write their part of a checkpoint into one folder"
                fix = "use an --out on a file system that all share, or --cluster ...,folder=local"
                raise UserError(rule, f"no {share.file.name} in {at}", fix)
        (at / STATE).write_bytes(content)
        sync(at / STATE)
        return complete_draft(at, at.parent, position.step, keep)


def sealed_state(position: Position, must_match: dict[str, Any], shares: Sequence[Contribution]) -> bytes:
    """The content of ``state.json`` for a checkpoint of ``shares``.

    Raises ``ValueError`` if they are not a complete state.
    """
    tree = {
        "format": FORMAT,
        "position": asdict(position),
        "must_match": to_tree(must_match, {}, "must_match"),
        "parts": {name: joined([s.trees[name] for s in shares if name in s.trees]) for name in shares[0].trees},
        "tensors": merged([share.file.index for share in shares]),
        "files": {share.file.name: share.file.sha256 for share in shares},
    }
    return seal(tree)


def complete_draft(at: Path, folder: Path, step: int, keep: KeepCheckpoints = NEWEST_TWO) -> Path:
    """Make the draft ``at``, whose files are all on the disk, the checkpoint of ``folder`` after ``step`` steps.

    Checkpoints that ``keep`` does not keep are dropped, never this one. Raises ``OSError``.
    """
    final, older = of_step(folder, step), at.with_name(f"{at.name}-older")
    sync(at)
    if final.exists():  # moved, so that it is missing only between the two renames
        final.rename(older)
    at.rename(final)
    sync(folder)
    shutil.rmtree(older, ignore_errors=True)
    _drop(of_step(folder, each) for each in to_delete(keep, _saved(folder, keep)) if each != step)
    return final


def _saved(folder: Path, keep: KeepCheckpoints) -> list[SavedCheckpoint]:
    """The checkpoints in ``folder``, with their metrics if ``keep`` asks for any. One that is damaged has none."""
    return [SavedCheckpoint(step_of(path), _metrics(path) if keep.best else {}) for path in complete(folder)]


def _metrics(path: Path) -> dict[str, float]:
    with suppress(UserError, *_UNREADABLE):
        progress = from_tree(_tree(path)["parts"][Progress.name], {})
        return {str(name): float(value) for name, value in progress["metrics"].items()}
    return {}


@contextmanager
def writing(at: Path) -> Iterator[None]:
    """Raise an error of the disk as a ``UserError``, and remove the draft ``at``.

    If the disk is full, the draft stays, as other workers may still be writing; see ``give_up``.
    """
    try:
        yield
    except UserError:
        give_up(at)
        raise
    except (OSError, SafetensorError) as error:
        if is_full(error):
            raise NoRoom(UNWRITABLE, error, f"free space at {at.parent}") from None
        give_up(at)
        raise UserError(UNWRITABLE, error, f"free space at {at.parent} or use another --out") from None


def give_up(at: Path) -> None:
    """Remove the draft ``at``, which no worker writes any more."""
    shutil.rmtree(at, ignore_errors=True)


# --- the checkpoints in a folder ---


def complete(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first. Each of them was complete once; other names are ignored."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def back_to_epoch(folder: Path) -> None:
    """Let a run go on from the newest checkpoint at the end of an epoch; without one, from the newest of all."""
    later: list[Path] = []
    for path in reversed(complete(folder)):
        with suppress(Damaged):
            if position_of(_tree(path)["position"]).offset == 0:
                return _drop(later)
        later.append(path)
    return None


def damaged(folder: Path) -> dict[int, str]:
    """The steps of the newest checkpoints in ``folder`` that are damaged, with the reasons.

    It ends at the first one that is whole.
    """
    faults_by_step: dict[int, str] = {}
    for path in reversed(complete(folder)):
        try:
            tree = _tree(path)
            with _reading(path, ""):
                if wrong := faults(path, tree["files"]):
                    raise ValueError(wrong)
            break
        except Damaged as error:
            faults_by_step[step_of(path)] = str(error.value)
        except UserError:  # it has another format, or cannot be read: loading it reports the reason
            break
    return faults_by_step


def set_aside(folder: Path, steps: Iterable[int]) -> None:
    """Let no run go on from the checkpoints of ``steps``: they stay, under other names."""
    for step in steps:
        path = of_step(folder, step)
        aside = folder / f"{DAMAGED}{path.name}"
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(FileNotFoundError):
            path.rename(aside)


def of_step(folder: Path, step: int) -> Path:
    """The folder in ``folder`` of the checkpoint after ``step`` steps."""
    return folder / f"step-{step:010d}"


def step_of(path: Path) -> int:
    """The number of steps before the checkpoint at ``path``."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def seal_of(path: Path) -> str:
    """The SHA-256 of ``state.json`` of the checkpoint at ``path``; "" if there is none. It stands for all files."""
    return digest_of(state) if (state := path / STATE).is_file() else ""


def spans(path: Path) -> SampleSpans:
    """The samples that the run at ``path`` has used; empty if they cannot be read.

    Raises ``UserError`` for a checkpoint of another format.
    """
    try:
        return spans_of(from_tree(_tree(path)["parts"][Progress.name], {}))
    except (Damaged, *_UNREADABLE):
        return []


def schedules(folder: Path) -> tuple[Position, list[Any]] | None:
    """The position of the newest checkpoint in ``folder`` and its schedulers' states; None if they cannot be read.

    It reads no tensors.
    """
    for path in reversed(complete(folder)):
        with suppress(UserError, *_UNREADABLE):
            tree = _tree(path)
            state = from_tree(tree["parts"].get("schedulers", {"dict": []}), {})
            unregistered = [each["state"] for each in state.get("found", [])]
            return position_of(tree["position"]), [*state.get("states", []), *unregistered]
    return None


def _tree(path: Path, fix: str = "") -> dict[str, Any]:
    """The content of ``state.json``, checked."""
    with _reading(path, fix):
        content = _regular(path / STATE).read_bytes()
        sealed = is_sealed(content)
        tree: dict[str, Any] = unseal(content) if sealed else json.loads(content)
        position = tree["position"]
        format_ = tree.get("format", 1)
        if format_ == FORMAT and not sealed:
            raise ValueError(f"{STATE} lacks its digest")
        if format_ == FORMAT and step_of(path) != position_of(position).step:
            raise ValueError(f"it was taken after {position['step']} steps")
    if format_ != FORMAT:
        fix_format = "use the version of elastune that wrote it, or begin again in another --out"
        raise UserError(f"a checkpoint must be of format {FORMAT}", f"format {format_}: {path}", fix_format)
    return tree


def faults(path: Path, files: Mapping[str, str], part: slice = slice(None)) -> str:
    """What is wrong with ``files`` (digests by name) at ``path``, or with a part of them; "" if nothing."""
    for name in sorted(files)[part]:
        if digest_of(_regular(path / name)) != files[name]:
            return f"the bytes of {name} do not have the digest that they were written with"
    return ""


@contextmanager
def _reading(path: Path, fix: str) -> Iterator[None]:
    try:
        yield
    except ProtocolViolation:  # between workers that read the files together: not the checkpoint's fault
        raise
    except PermissionError as error:
        raise UserError("a checkpoint must be readable", error, "run as the user who wrote it") from None
    except _UNREADABLE as error:
        raise Damaged("a checkpoint must be whole", f"{path}: {type(error).__name__}: {error}", fix) from None


def _regular(path: Path) -> Path:
    """``path``, unless reading it could block, as reading a pipe does."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is no file")
    return path


def _drop(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # renamed first, as a half removed one must not look like a checkpoint
            shutil.rmtree(path.rename(path.with_name(f"{DRAFT}{path.name}")))


class _Whole(Mapping[str, torch.Tensor]):
    """The tensors of a store, read as a whole each."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def __getitem__(self, name: str) -> torch.Tensor:
        return whole(self._store[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._store)

    def __len__(self) -> int:
        return len(self._store)


def is_full(error: OSError | SafetensorError) -> bool:
    """Whether ``error`` is about a full disk, or a used-up quota."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"(os error {number})" in str(error) for number in FULL)  # safetensors quotes the system's error


# --- the files of tensors ---


def merged(indices: Sequence[Index]) -> Index:
    """One index of the files of several writers.

    Raises:
        ValueError: A tensor is not complete, or an element of it is there twice.
    """
    whole_index: Index = {}
    for index in indices:
        for path, entry in index.items():
            joined_entry = whole_index.setdefault(path, {**entry, "pieces": []})
            if (joined_entry["dtype"], joined_entry["shape"]) != (entry["dtype"], entry["shape"]):
                raise ValueError(
                    f"{path} is {joined_entry['dtype']} {joined_entry['shape']} and {entry['dtype']} {entry['shape']}"
                )
            joined_entry["pieces"] = [*joined_entry["pieces"], *entry["pieces"]]
    for path, entry in whole_index.items():
        if not fills(entry["shape"], [_range_of(piece) for piece in entry["pieces"]]):
            raise ValueError(f"the pieces of {path} are not each element of it once")
    return whole_index


class TensorStore(Mapping[str, "StoredTensor"]):
    """The tensors of a checkpoint by name, read on demand.

    The files stay open, so that they can be read even if the folder is removed.
    """

    def __init__(self, folder: Path, files: Sequence[str], index: Index) -> None:
        self._index = index
        self._files = {name: safe_open(folder / name, "pt") for name in files}

    def __getitem__(self, name: str) -> StoredTensor:
        entry = self._index[name]
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is of {entry['dtype']}")
        pieces = [(self._files[piece[0]], piece[1], _range_of(piece)) for piece in entry["pieces"]]
        return StoredTensor(tuple(entry["shape"]), dtype, tuple(pieces))

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of ``shape`` in ``pieces``: for each an open file, the key in the file, and the range of the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Any, str, FlatRange], ...]

    def read(self, wanted: FlatRange) -> torch.Tensor:
        """The flat values of the range ``wanted``, whatever pieces they lie in. One piece at a time is in memory.

        Raises:
            ValueError: A piece differs from the index.
        """
        values = torch.empty(wanted.size, dtype=self.dtype)
        for file, key, piece in self.pieces:
            reach = _common(piece, wanted)
            if reach is None:
                continue
            part, reach = _read(file, key, piece, reach)
            if (part.dtype, len(part)) != (self.dtype, reach.size):
                raise ValueError(f"{key} has {len(part)} numbers of {part.dtype}, not {reach.size} of {self.dtype}")
            copy_common(wanted, values, reach, part)
        return values


def _read(file: Any, key: str, piece: FlatRange, reach: FlatRange) -> tuple[torch.Tensor, FlatRange]:
    """The flat values of ``reach``, a part of ``piece``, or of the whole rows around it; and their range."""
    stored = file.get_slice(key)
    shape = stored.get_shape()
    if not shape:
        return file.get_tensor(key).reshape(-1), piece
    row = prod(shape[1:])
    first, last = (reach.start - piece.start) // row, -(-(reach.stop - piece.start) // row)
    return stored[first:last].reshape(-1), FlatRange(piece.box, piece.start + first * row, piece.start + last * row)


def _common(piece: FlatRange, wanted: FlatRange) -> FlatRange | None:
    """The shortest range of ``piece`` that has all elements which it shares with ``wanted``; None if it shares none."""
    if piece.box == wanted.box:
        start, stop = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
        return FlatRange(piece.box, start, stop) if start < stop else None
    ends = []
    for box, at in piece.boxes:
        for wanted_box, _ in wanted.boxes:
            common = intersection(box, wanted_box)
            if common is not None:
                ends += [at + _place(common, box, 0), at + _place(common, box, 1) + 1]
    return FlatRange(piece.box, piece.start + min(ends), piece.start + max(ends)) if ends else None


def _place(inner: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]], last: int) -> int:
    """The index in the flat ``outer`` of the first element of ``inner``; with ``last`` 1, of its last one."""
    place = 0
    for (start, stop), (first, end) in zip(inner, outer, strict=True):
        place = place * (end - first) + (stop - 1 if last else start) - first
    return place


def _range_of(piece: Sequence[Any]) -> FlatRange:
    _, _, box, start, stop = piece
    return FlatRange(tuple((int(first), int(last)) for first, last in box), int(start), int(stop))
