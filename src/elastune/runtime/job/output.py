"""The output folder of a run or study: a local folder, or a URL that fsspec knows (``--out s3://bucket/run``).

A folder never holds the results of two runs. Results at a URL are written to a local folder, which all other code uses,
and a thread copies new files to the URL. A resumed run first copies them back. This module imports nothing heavy,
because every command imports it.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from elastune.core.errors import UserError

JOURNAL = "journal.jsonl"
DEFAULT_ROOT = Path("elastune-out")
_OF_RESULTS = (b"reported", b"checkpointed", b"trial_reported", b"trial_finished", b"run_finished", b"plan_made")
CLAIMED: set[Path] = set()  # folders that this process has made and that may still be empty


def next_folder(program: Path, kind: str) -> Path:
    """Make the next free folder ``elastune-out/PROGRAM-KIND-N``. No other command gets the same one.

    ``release_unused`` removes it if it stays empty.

    Raises:
        UserError: If no folder can be made.
    """
    stem = f"{program.stem}-{kind}"
    try:
        DEFAULT_ROOT.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = DEFAULT_ROOT / f"{stem}-{number}"
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        rule = "a command needs a folder for its results"
        raise UserError(rule, error, "give --out a folder that can be written") from None
    if not CLAIMED:
        atexit.register(release_unused)
    CLAIMED.add(folder.absolute())
    return folder


def discard_refused() -> None:
    """Remove the folders that were made for a command which was refused before a training had any result."""
    for folder in CLAIMED:
        journal = folder / JOURNAL
        text = journal.read_bytes() if journal.is_file() else b""
        if not any(b'"kind":"%s"' % kind in text for kind in _OF_RESULTS):
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # other results are in it
                folder.parent.rmdir()


def release_unused() -> None:
    """Remove the folders of ``next_folder`` that are still empty. Idempotent."""
    for folder in CLAIMED:
        with suppress(OSError):  # it holds files
            folder.rmdir()
            folder.parent.rmdir()
    CLAIMED.clear()


def check_out(out: Path, resume: bool) -> Path:
    """Return the path of the journal in ``out``.

    Raises:
        UserError: If the folder has a journal and ``resume`` is false: a new run must not mix with an old one.
    """
    path = out / JOURNAL
    if os.path.lexists(path) and not path.is_file():
        raise UserError("a journal must be a file", path, "use another --out")
    if path.exists() and not resume:
        raise UserError("--out must be a new or empty folder", out, "use another --out, or --resume to go on")
    return path


# --- results at a URL ---

# Files of a checkpoint are copied first, then the file that completes the checkpoint, then other files, and the journal
# last: so the journal at the URL never names a missing file.

LOOK_S = 2.0  # the least pause between two copies; a pause is also ten times as long as the last copy took
STATE = "state.json"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.|[a-z0-9]+::")
_CHECKPOINT = re.compile(r"(?:[^/]+/)*checkpoints/step-[0-9]{10,}/[^/]+")
_LOCAL = ("logs", "cluster")  # folders that are not copied: output of workers, the secret of the agents


def is_url(out: str) -> bool:
    """Whether ``out`` is a URL and not a folder."""
    return _URL.match(out) is not None


def is_copied(name: str) -> bool:
    """Whether the file ``name`` (relative to the folder, with slashes) is copied: not drafts, locks, logs, secrets."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or any(part.startswith(".") for part in parts):
        return False
    return not (set(parts[:-1]) & set(_LOCAL) or name.endswith(".lock"))


def order(names: Iterable[str]) -> list[str]:
    """Sort ``names`` in the order in which files are copied: each file after all files that it refers to."""

    def key(name: str) -> tuple[int, str]:
        if name == JOURNAL:
            return 3, name
        if _CHECKPOINT.fullmatch(name):
            return int(name.endswith(f"/{STATE}")), name
        return 2, name

    return sorted(names, key=key)


@dataclass(frozen=True)
class CopyPlan:
    """Makes the copy equal to the folder: the files to ``copy``, then the files to ``remove``, each in order."""

    copy: list[str]
    remove: list[str]


def changes(local: Mapping[str, object], copied: Mapping[str, object]) -> CopyPlan:
    """Return what to copy and to remove. Only files of checkpoints that the folder no longer has are removed.

    Args:
        local: The files of the folder, each with a mark of its version.
        copied: The files at the URL, each with the mark of the version that was copied.
    """
    new = [name for name, mark in local.items() if copied.get(name) != mark]
    dropped = [name for name in copied.keys() - local.keys() if _CHECKPOINT.fullmatch(name)]
    return CopyPlan(order(new), order(dropped)[::-1])


def whole(names: Iterable[str]) -> list[str]:
    """Return ``names`` without the files of incomplete checkpoints."""
    known = set(names)
    return [name for name in known if not _CHECKPOINT.fullmatch(name) or f"{name.rpartition('/')[0]}/{STATE}" in known]


class Mirror:
    """Keeps a copy of a local folder at a URL, in a thread of its own.

    Args:
        url: The URL.
        notify: Called, from any thread, with a line for the user.
        root: The folder in which the local folder is made.

    Raises:
        UserError: If fsspec cannot open such a URL here.
    """

    def __init__(self, url: str, notify: Callable[[str], None], root: Path = DEFAULT_ROOT) -> None:
        import fsspec

        self.url, self._notify = url, notify
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            fix = "install its package, such as s3fs or gcsfs, or give a folder"
            raise UserError("--out must be a folder, or a URL that fsspec can open", f"{url}: {error}", fix) from None
        self.folder = root / f"mirror-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
        self._copied: dict[str, object] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="mirror", daemon=True)

    def begin(self, resume: bool) -> None:
        """Copy the results back if a command is to ``resume``; else refuse a URL with files. Then start the thread.

        Raises:
            UserError: For a URL with other files, or one that cannot be read.
        """
        remote = self._reached(self._listed)
        if remote and not (resume and JOURNAL in remote):  # perhaps files of another user
            value = f"{self.url} has {len(remote)} files" + ("" if JOURNAL in remote else f", none of them {JOURNAL}")
            raise UserError("--out must be new or empty", value, "use another --out, or --resume to go on with a run")
        if remote:
            self._reached(lambda: self._copy_back(remote))
        self._copied = dict.fromkeys(remote)  # of unknown versions: each file is copied again, or removed
        self._thread.start()

    def finish(self) -> None:
        """Copy all new files and stop the thread. Idempotent. Raises ``UserError`` if that fails."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
            self._reached(self._copy)

    # -- to the URL ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        reported, pause_s = "", LOOK_S
        while not self._closing.wait(pause_s):
            began = time.monotonic()
            try:
                self._copy()
                reported = ""
            except Exception as error:  # noqa: BLE001 - the package behind this URL may raise anything
                if (why := f"{type(error).__name__}: {error}") != reported:
                    reported = why
                    self._notify(f"results wait for {self.url}: {why}")
            pause_s = max(LOOK_S, 10 * (time.monotonic() - began))

    def _copy(self) -> None:
        todo = changes(_files_in(self.folder), self._copied)
        for name in todo.copy:
            path = self.folder / name
            try:
                mark = _mark(path)
                self._files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(path), self._at(name))
            except FileNotFoundError:
                if path.exists():
                    raise
                return  # its checkpoint was removed meanwhile; the next copy sees the files that are left
            self._copied[name] = mark
        for name in todo.remove:
            if self._files.exists(self._at(name)):
                self._files.rm_file(self._at(name))
            del self._copied[name]

    # -- from the URL -------------------------------------------------------------------------------------------------

    def _listed(self) -> list[str]:
        """The files at the URL, by their names below it."""
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return []
        paths = self._files.find(self._root)
        return [str(PurePosixPath(path).relative_to(PurePosixPath(self._root))) for path in paths]

    def _copy_back(self, names: list[str]) -> None:
        """Copy the files ``names`` into the local folder, unless it already has a later state of the same run."""
        journal = self.folder / JOURNAL
        if journal.is_file() and journal.read_bytes().startswith(self._files.cat_file(self._at(JOURNAL))):
            return
        self._notify(f"going on from {self.url}, in {self.folder}")
        coming = self.folder.with_name(f"{self.folder.name}.coming")
        shutil.rmtree(coming, ignore_errors=True)
        for name in whole(name for name in names if is_copied(name)):
            (coming / name).parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(self._at(name), str(coming / name))
        if self.folder.exists():  # the run has gone on elsewhere since
            self.folder.rename(self.folder.with_name(f"{self.folder.name}.before-{time.time_ns()}"))
        coming.rename(self.folder)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _reached(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - the package behind this URL may raise anything
            value = f"{self.url}: {type(error).__name__}: {error}"
            fix = f"check the address and your rights; all results are in {self.folder}"
            raise UserError("results must reach --out", value, fix) from None


@contextmanager
def mirrored(out: str, resume: bool, notify: Callable[[str], None]) -> Iterator[Path]:
    """Give the folder ``out`` or, for a URL, a local folder whose files are all at the URL when the block ends.

    Raises:
        UserError: If the files cannot be copied. If the block itself has failed, ``notify`` gets that line instead.
    """
    if not is_url(out):
        yield Path(out)
        return
    mirror = Mirror(out, notify)
    mirror.begin(resume)
    try:
        yield mirror.folder
    except BaseException:
        try:
            mirror.finish()
        except UserError as error:
            notify(str(error))
        raise
    mirror.finish()


def _files_in(folder: Path) -> dict[str, object]:
    marks: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if is_copied(name) and path.is_file() and not path.is_symlink():
            try:
                marks[name] = _mark(path)
            except FileNotFoundError:
                continue  # it was removed meanwhile
    return marks


def _mark(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
