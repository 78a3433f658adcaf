"""The output folder of a run or study, here or at a URL (``--out s3://bucket/run``, any that fsspec knows).

A folder never holds the results of two runs. Results at a URL are written to a folder here, which is what all other
code uses, and a thread copies what is new in it. It copies files of checkpoints first, then what makes each a
checkpoint, then the rest, then the journal, which so never tells of a file that is missing. Resuming from the URL
brings the folder back. This module loads nothing heavy: every command imports it.
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
CLAIMED: set[Path] = set()  # folders that this process has made, and nothing may have come of yet


def next_folder(program: Path, kind: str) -> Path:
    """The next free ``elastune-out/PROGRAM-KIND-N``, made here: no other command that begins now has the same.

    ``release_unused`` removes it where nothing came of it. Raises ``UserError``.
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
    """Remove the folders that were made for commands which have left nothing in them. Idempotent."""
    for folder in CLAIMED:
        with suppress(OSError):  # it is used
            folder.rmdir()
            folder.parent.rmdir()
    CLAIMED.clear()


def check_out(out: Path, resume: bool) -> Path:
    """The path of the journal in ``out``. Refuses to mix a new run into an old one's folder."""
    path = out / JOURNAL
    if os.path.lexists(path) and not path.is_file():
        raise UserError("a journal must be a file", path, "use another --out")
    if path.exists() and not resume:
        raise UserError("--out must be a new or empty folder", out, "use another --out, or --resume to go on")
    return path


# Results at a URL (``--out s3://bucket/run``, any URL that fsspec knows) are written to a local folder, and a thread
# copies new files to the URL. It copies the files of a checkpoint first, then the file that completes the checkpoint,
# then other files, and the journal last: the journal never names a file that is not there. A resumed run first copies
# the files back from the URL.

LOOK_S = 2.0  # between copies, at least; and ten times what the last one took
STATE = "state.json"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.|[a-z0-9]+::")
_CHECKPOINT = re.compile(r"(?:[^/]+/)*checkpoints/step-[0-9]{10,}/[^/]+")
_STAYS = ("logs", "cluster")  # folders of this machine's own: what it printed, its agents' secret


def is_url(out: str) -> bool:
    """Whether ``out`` is a URL, and no folder."""
    return _URL.match(out) is not None


def goes(name: str) -> bool:
    """Whether the file ``name``, relative to the folder, with slashes, is copied: no drafts, locks, logs or secrets."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or any(part.startswith(".") for part in parts):
        return False
    return not (set(parts[:-1]) & set(_STAYS) or name.endswith(".lock"))


def order(names: Iterable[str]) -> list[str]:
    """How files are copied one after the other, so that whatever is there is whole with what was copied before it."""

    def last(name: str) -> tuple[int, str]:
        if name == JOURNAL:
            return 3, name
        if _CHECKPOINT.fullmatch(name):
            return int(name.endswith(f"/{STATE}")), name
        return 2, name

    return sorted(names, key=last)


@dataclass(frozen=True)
class CopyPlan:
    """What makes the copy what the folder is: files to ``copy``, then others to ``remove``, each in order."""

    copy: list[str]
    remove: list[str]


def changes(local: Mapping[str, object], remote: Mapping[str, object]) -> CopyPlan:
    """``local``: the files of the folder and what tells one version from another; ``remote``: those that were copied.

    Nothing is removed there but files of checkpoints, which were dropped here.
    """
    new = [name for name, mark in local.items() if remote.get(name) != mark]
    dropped = [name for name in remote.keys() - local.keys() if _CHECKPOINT.fullmatch(name)]
    return CopyPlan(order(new), order(dropped)[::-1])


def whole(names: Iterable[str]) -> list[str]:
    """``names`` without the files of checkpoints of which the last file never came."""
    known = set(names)
    return [name for name in known if not _CHECKPOINT.fullmatch(name) or f"{name.rpartition('/')[0]}/{STATE}" in known]


class Mirror:
    """The copy at ``url`` of a folder of this machine. ``notify`` takes a line for the user, from any thread.

    Raises ``UserError`` where nothing on this machine can go to such a URL.
    """

    def __init__(self, url: str, notify: Callable[[str], None], root: Path = DEFAULT_ROOT) -> None:
        import fsspec

        self.url, self._notify = url, notify
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            fix = "install what that needs, such as s3fs or gcsfs, or give a folder"
            raise UserError("--out must be a folder, or a URL that fsspec can open", f"{url}: {error}", fix) from None
        self.folder = root / f"mirror-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
        self._copied: dict[str, object] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="mirror", daemon=True)

    def begin(self, resume: bool) -> None:
        """Bring back what is there, where a command is to ``resume``; else there must be nothing. Then copy, for good.

        Raises ``UserError``.
        """
        remote = self._reached(self._listed)
        if remote and not (resume and JOURNAL in remote):  # others' files, perhaps
            value = f"{self.url} has {len(remote)} files" + ("" if JOURNAL in remote else f", none of them {JOURNAL}")
            raise UserError("--out must be new or empty", value, "use another --out, or --resume to go on with a run")
        if remote:
            self._reached(lambda: self._bring(remote))
        self._copied = dict.fromkeys(remote)  # of unknown versions: each is copied again, or removed
        self._thread.start()

    def finish(self) -> None:
        """Copy what is still to be copied, and end. Idempotent. Raises ``UserError`` where that fails."""
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
            except Exception as error:  # noqa: BLE001 - of whatever kind the package behind this URL raises
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
                return  # it was dropped meanwhile, and its checkpoint with it: the next look sees what is left
            self._copied[name] = mark
        for name in todo.remove:
            if self._files.exists(self._at(name)):
                self._files.rm_file(self._at(name))
            del self._copied[name]

    # -- from the URL -------------------------------------------------------------------------------------------------

    def _listed(self) -> list[str]:
        """The files that are there, by their names below the URL."""
        self._files.invalidate_cache()
        if not self._files.exists(self._root):
            return []
        under = self._files.find(self._root)
        return [str(PurePosixPath(path).relative_to(PurePosixPath(self._root))) for path in under]

    def _bring(self, names: list[str]) -> None:
        """Have the folder here, unless what is here already has gone further."""
        journal = self.folder / JOURNAL
        if journal.is_file() and journal.read_bytes().startswith(self._files.cat_file(self._at(JOURNAL))):
            return
        self._notify(f"going on from {self.url}, in {self.folder}")
        coming = self.folder.with_name(f"{self.folder.name}.coming")
        shutil.rmtree(coming, ignore_errors=True)
        for name in whole(name for name in names if goes(name)):
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
        except Exception as error:  # noqa: BLE001 - of whatever kind the package behind this URL raises
            value = f"{self.url}: {type(error).__name__}: {error}"
            fix = f"see its address and your rights there; what there is lies in {self.folder}"
            raise UserError("results must reach --out", value, fix) from None


@contextmanager
def mirrored(out: str, resume: bool, notify: Callable[[str], None]) -> Iterator[Path]:
    """The folder ``out``; of a URL a folder here, all of which is there, too, when the block ends.

    Raises ``UserError`` where that cannot be; where the block has failed, ``notify`` hears of it.
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
        if goes(name) and path.is_file() and not path.is_symlink():
            try:
                marks[name] = _mark(path)
            except FileNotFoundError:
                continue  # it was dropped meanwhile
    return marks


def _mark(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
