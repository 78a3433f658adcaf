"""Checkpoints: safetensors and JSON in a folder that appears complete or not at all. Reading one runs no code.

Every worker that holds unique state writes one file of tensors. ``state.json`` says which piece of which tensor is
in which file, and carries the digest of each file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from elastune.core.errors import UserError
from elastune.core.layout import FlatRange, fills, intersection, whole_range
from elastune.core.run import Position
from elastune.elastic.coordinator.machine import ProtocolViolation
from elastune.parallel.mechanisms.tensor_storage import PartialTensor, copy_common, whole
from elastune.train.checkpoints.spool import digest_of, is_sealed, seal, unseal
from elastune.train.checkpoints.tree import Pieces, States, from_tree, from_trees, joined, to_tree, to_trees
from elastune.train.data.sample_log import SampleSpans
from elastune.train.progress import Progress, position_of, spans_of

# [files] The tensors of a checkpoint: safetensors files, one a writer, and the index that tells which piece lies where.

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Index = dict[str, Any]
"""By a tensor's name: its dtype, its shape, its pieces as [file, key in the file, box, start, stop]; a JSON value."""


class NoRoom(UserError):
    """There is no room on the disk for a checkpoint."""


def is_full(error: OSError | SafetensorError) -> bool:
    """Whether ``error`` says that a disk is full, or a quota used up."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"(os error {number})" in str(error) for number in FULL)  # what safetensors has from the system


def file_name(number: int, count: int) -> str:
    """Of the file of writer ``number`` (from 0) of ``count``."""
    return "tensors.safetensors" if count == 1 else f"tensors-{number + 1:05d}-of-{count:05d}.safetensors"


@dataclass(frozen=True)
class Written:
    """What a writer tells of its file: its name, size, digest, and the index of what is in it."""

    name: str
    size: int
    sha256: str
    index: Index


def write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor | PartialTensor]) -> Written:
    """Write ``tensors``, whole ones and this worker's pieces of others, as one file; it is on the disk afterwards.

    Raises:
        OSError, SafetensorError: Where it cannot be written.
    """
    content: dict[str, torch.Tensor] = {}
    index: Index = {}
    for path, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            keyed = [(path, whole_range(tensor.shape), tensor)]
        else:
            keyed = [(f"{path}@{i}", stretch, values) for i, (stretch, values) in enumerate(tensor.pieces)]
        for key, _, values in keyed:
            content[key] = values.detach().to("cpu", copy=True).contiguous()
        index[path] = {
            "dtype": str(tensor.dtype)[6:],
            "shape": list(tensor.shape),
            "pieces": [[name, key, [list(edge) for edge in of.box], of.start, of.stop] for key, of, _ in keyed],
        }
    file = folder / name
    save_file(content, file)
    with ThreadPoolExecutor(1) as disk:  # the digest is made while the disk writes
        synced = disk.submit(sync, file)
        digest = digest_of(file)
        synced.result()
    return Written(name, file.stat().st_size, digest, index)


def merged(indices: Sequence[Index]) -> Index:
    """One index of what several writers have written.

    Raises:
        ValueError: Where a tensor is not there whole, or an element of it twice.
    """
    found: Index = {}
    for index in indices:
        for path, entry in index.items():
            known = found.setdefault(path, {**entry, "pieces": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise ValueError(f"{path} is {known['dtype']} {known['shape']} and {entry['dtype']} {entry['shape']}")
            known["pieces"] = [*known["pieces"], *entry["pieces"]]
    for path, entry in found.items():
        if not fills(entry["shape"], [_stretch(piece) for piece in entry["pieces"]]):
            raise ValueError(f"the pieces of {path} are not each element of it once")
    return found


class TensorStore(Mapping[str, "StoredTensor"]):
    """The tensors of a checkpoint by name, read when they are asked for.

    The files stay open, so that they can be read whatever becomes of the folder.
    """

    def __init__(self, folder: Path, files: Sequence[str], index: Index) -> None:
        self._index = index
        self._files = {name: safe_open(folder / name, "pt") for name in files}

    def __getitem__(self, name: str) -> StoredTensor:
        entry = self._index[name]
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is of {entry['dtype']}")
        pieces = [(self._files[piece[0]], piece[1], _stretch(piece)) for piece in entry["pieces"]]
        return StoredTensor(tuple(entry["shape"]), dtype, tuple(pieces))

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of ``shape`` that lies in ``pieces``: an open file, the key in it, and which stretch that is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Any, str, FlatRange], ...]

    def read(self, stretch: FlatRange) -> torch.Tensor:
        """The flat values of a stretch, whatever pieces they were written in; no more than one piece is read at a time.

        Raises:
            ValueError: Where a piece is not what the index says.
        """
        found = torch.empty(stretch.size, dtype=self.dtype)
        for file, key, piece in self.pieces:
            reach = _common(piece, stretch)
            if reach is None:
                continue
            values, reach = _read(file, key, piece, reach)
            if (values.dtype, len(values)) != (self.dtype, reach.size):
                raise ValueError(f"{key} has {len(values)} numbers of {values.dtype}, not {reach.size} of {self.dtype}")
            copy_common(stretch, found, reach, values)
        return found


def _read(file: Any, key: str, piece: FlatRange, reach: FlatRange) -> tuple[torch.Tensor, FlatRange]:
    """The flat values of ``reach``, a part of ``piece``, or of whole rows around it; and which stretch they are."""
    stored = file.get_slice(key)
    shape = stored.get_shape()
    if not shape:
        return file.get_tensor(key).reshape(-1), piece
    row = prod(shape[1:])
    first, last = (reach.start - piece.start) // row, -(-(reach.stop - piece.start) // row)
    return stored[first:last].reshape(-1), FlatRange(piece.box, piece.start + first * row, piece.start + last * row)


def _common(piece: FlatRange, wanted: FlatRange) -> FlatRange | None:
    """The shortest stretch of ``piece`` that has all that ``wanted`` has of it; None: it has nothing."""
    if piece.box == wanted.box:
        start, stop = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
        return FlatRange(piece.box, start, stop) if start < stop else None
    ends = []
    for box, at in piece.boxes:
        for own, _ in wanted.boxes:
            common = intersection(box, own)
            if common is not None:
                ends += [at + _place(common, box, 0), at + _place(common, box, 1) + 1]
    return FlatRange(piece.box, piece.start + min(ends), piece.start + max(ends)) if ends else None


def _place(inner: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]], last: int) -> int:
    """Where in the flat ``outer`` the first element of ``inner`` is; with ``last`` 1, its last one."""
    found = 0
    for (start, stop), (first, end) in zip(inner, outer, strict=True):
        found = found * (end - first) + (stop - 1 if last else start) - first
    return found


def _stretch(piece: Sequence[Any]) -> FlatRange:
    _, _, box, start, stop = piece
    return FlatRange(tuple((int(first), int(last)) for first, last in box), int(start), int(stop))


def sync(path: Path) -> None:
    """Return once ``path`` is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# [checkpoint] Checkpoints: safetensors and JSON in a folder that appears complete or not at all. Reading one runs no code.
#
# Every worker that holds what others do not writes a file of tensors; ``state.json`` says which piece of which tensor
# lies where, and carries the digest of its own bytes and those of the files, so one digest stands for all of it: a
# checkpoint of which a byte, a name or a file was changed is ``Damaged``, and a run goes on from the one before it.

FORMAT = 4  # 2 had no digest; 3 one file of whole tensors, and the optimizer's state by number instead of by name
KEPT = 2
DRAFT = ".draft-"
DAMAGED = "damaged-"
UNWRITABLE = "a checkpoint must be writable"
STATE = "state.json"
DELETE = "delete this folder to continue from the one before it"
Check = Callable[[Path, Mapping[str, str]], str]
"""What is wrong with the files of a checkpoint, given their digests by name; see ``faults``."""
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


@dataclass(frozen=True)
class Contribution:
    """What one writer has written: its file, and the parts' trees, as far as it knows them."""

    file: Written
    trees: dict[str, Any]

    @property
    def tree(self) -> dict[str, Any]:
        """As a JSON value."""
        return asdict(self)

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Contribution:
        """What ``tree`` gave."""
        return cls(Written(**tree["file"]), tree["trees"])


def make_folder(folder: Path) -> None:
    """Make ``folder``, and those that it is in."""
    folder.mkdir(parents=True, exist_ok=True)


def draft(folder: Path, name: str) -> Path:
    """Where the files of the checkpoint that is being written to ``folder`` are, until it is complete.

    ``name``: equal on all its writers, and of no other attempt that may still be under way.
    """
    return folder / f"{DRAFT}{name}"


def drop_older_drafts(at: Path) -> None:
    """Leave no draft of another step in the folder of the draft ``at``: processes were killed there; it has one run.

    Into one of the same step a worker may still be writing, which began before a loss that others know of.
    """
    same = at.name.partition("-")[2].partition("-")[0]
    for stale in at.parent.glob(f"{DRAFT}*"):
        if stale.name.partition("-")[2].partition("-")[0] != same:
            shutil.rmtree(stale, ignore_errors=True)


def drop_drafts(folder: Path) -> None:
    """Leave no draft in ``folder``: a checkpoint is complete, to which all have given their parts."""
    for stale in folder.glob(f"{DRAFT}*"):
        shutil.rmtree(stale, ignore_errors=True)


def contribute(
    at: Path, states: States, number: int = 0, count: int = 1, make: Callable[[Path], None] = make_folder
) -> Contribution:
    """Be writer ``number`` of ``count`` of the draft ``at``, which ``make`` makes where it is not there.

    Raises:
        NoRoom: Where the disk is full; the draft stays until all its writers know, see ``give_up``.
        UserError: Where it cannot be written for another reason.
    """
    tensors: Pieces = {}
    trees = to_trees(states, tensors)
    with writing(at):
        make(at)
        return Contribution(write(at, file_name(number, count), tensors), trees)


def publish(at: Path, position: Position, meaning: dict[str, Any], shares: Sequence[Contribution]) -> Path:
    """Make the draft ``at`` the checkpoint of its folder after ``position``, and drop all but the newest two.

    Args:
        at: Where ``shares`` were written; it is on a disk that all writers share.
        position: Of the run.
        meaning: What must be equal for another run to go on from it.
        shares: What each writer has told; the first one's are the parts that all have alike.

    Returns:
        The folder of the checkpoint.

    Raises:
        NoRoom: Where the disk is full.
        UserError: Where it cannot be written for another reason.
        ValueError: Where the shares are not a whole state.
    """
    content = sealed_state(position, meaning, shares)
    with writing(at):
        for share in shares:
            if not (at / share.file.name).is_file() or (at / share.file.name).stat().st_size != share.file.size:
                rule = "all workers write their part of a checkpoint into one folder"
                fix = "use an --out on a file system that all share, or --cluster ...,folder=local"
                raise UserError(rule, f"no {share.file.name} in {at}", fix)
        (at / STATE).write_bytes(content)
        sync(at / STATE)
        return complete_draft(at, at.parent, position.step)


def sealed_state(position: Position, meaning: dict[str, Any], shares: Sequence[Contribution]) -> bytes:
    """What ``state.json`` holds for a checkpoint of ``shares``. Raises ``ValueError`` where they are no whole state."""
    tree = {
        "format": FORMAT,
        "position": asdict(position),
        "meaning": to_tree(meaning, {}, "meaning"),
        "parts": {name: joined([s.trees[name] for s in shares if name in s.trees]) for name in shares[0].trees},
        "tensors": merged([share.file.index for share in shares]),
        "files": {share.file.name: share.file.sha256 for share in shares},
    }
    return seal(tree)


def complete_draft(at: Path, folder: Path, step: int) -> Path:
    """Make the draft ``at``, of which all files are on the disk, the checkpoint of ``folder`` after ``step`` steps.

    All but the newest two are dropped. Raises ``OSError``.
    """
    final, older = of_step(folder, step), at.with_name(f"{at.name}-older")
    sync(at)
    if final.exists():  # moved, not removed: it is missing for the blink between two renames only
        final.rename(older)
    at.rename(final)
    sync(folder)
    shutil.rmtree(older, ignore_errors=True)
    _drop(complete(folder)[:-KEPT])
    return final


@contextmanager
def writing(at: Path) -> Iterator[None]:
    """Tell what the disk says as a ``UserError``. The draft is gone then, but where the disk is full: others may still
    be writing; see ``give_up``.
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
    """Leave nothing of the draft ``at``, which nobody writes any more."""
    shutil.rmtree(at, ignore_errors=True)


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``folder/step-N``, all by this process; see ``publish``."""
    at = draft(folder, str(os.getpid()))
    shutil.rmtree(at, ignore_errors=True)
    drop_drafts(folder)
    try:
        return publish(at, checkpoint.position, checkpoint.meaning, [contribute(at, checkpoint.states)])
    except NoRoom:
        give_up(at)
        raise


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
            tree = _tree(path)
            with _refusing(path, ""):
                if wrong := faults(path, tree["files"]):
                    raise ValueError(wrong)
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


def seal_of(path: Path) -> str:
    """The SHA-256 of what holds the digests of all files of the checkpoint at ``path``; "" where there is none."""
    return digest_of(state) if (state := path / STATE).is_file() else ""


def load(path: Path, fix: str = DELETE, check: Check | None = None, whole_parts: bool = True) -> Checkpoint:
    """Read what ``save`` or ``publish`` wrote.

    Args:
        path: The checkpoint's folder.
        fix: What to do where it is damaged.
        check: Finds what is wrong with its files, given their digests; by default this process reads them all.
        whole_parts: Read all tensors; else those of model and optimizer are ``scattered.Stored``, read on demand.

    Raises:
        Damaged: For anything that was not written so.
        UserError: For another format.
    """
    tree = _tree(path, fix)
    with _refusing(path, fix):
        if wrong := (check or faults)(path, tree["files"]):
            raise ValueError(wrong)
        shelf = TensorStore(path, list(tree["files"]), tree["tensors"])
        here = _Whole(shelf)
        lazy = () if whole_parts else ("model", "optimizer")
        late = from_trees({name: of for name, of in tree["parts"].items() if name in lazy}, shelf)
        return Checkpoint(
            position=position_of(tree["position"]),
            meaning=from_tree(tree["meaning"], {}),
            states=late | from_trees({name: of for name, of in tree["parts"].items() if name not in lazy}, here),
        )


def load_newest(folder: Path, check: Check | None = None, whole_parts: bool = True) -> tuple[Path, Checkpoint] | None:
    """The newest checkpoint that is whole; None where there never was one. Raises ``UserError`` where none is left."""
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


def spans(path: Path) -> SampleSpans:
    """Which samples the run at ``path`` has used; nothing where that cannot be told.

    Raises ``UserError`` for a checkpoint of another format.
    """
    try:
        return spans_of(from_tree(_tree(path)["parts"][Progress.name], {}))
    except (Damaged, *_UNREADABLE):
        return []


def schedules(folder: Path) -> tuple[Position, list[Any]] | None:
    """Where the newest checkpoint in ``folder`` is, and the states of its schedulers; None where that cannot be told.

    It reads no tensors.
    """
    for path in reversed(complete(folder)):
        with suppress(UserError, *_UNREADABLE):
            tree = _tree(path)
            found = from_tree(tree["parts"].get("schedulers", {"dict": []}), {})
            return position_of(tree["position"]), list(found.get("states", []))
    return None


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


def faults(path: Path, files: Mapping[str, str], part: slice = slice(None)) -> str:
    """What is wrong with ``files`` (digests by name) at ``path``, or with a part of them; "" if nothing."""
    for name in sorted(files)[part]:
        if digest_of(_regular(path / name)) != files[name]:
            return f"the bytes of {name} do not have the digest that they were written with"
    return ""


class _Whole(Mapping[str, torch.Tensor]):
    """The tensors of a shelf, as such."""

    def __init__(self, shelf: TensorStore) -> None:
        self._shelf = shelf

    def __getitem__(self, name: str) -> torch.Tensor:
        return whole(self._shelf[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shelf)

    def __len__(self) -> int:
        return len(self._shelf)


@contextmanager
def _refusing(path: Path, fix: str) -> Iterator[None]:
    try:
        yield
    except ProtocolViolation:  # of workers that were to tell each other what they read: not the checkpoint's fault
        raise
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
