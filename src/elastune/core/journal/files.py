"""Journal files: append records durably, read them back, and replace other files atomically.

A kill, a power cut or a full disk costs at most the record that is being written.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from elastune.core.clock import SystemClock
from elastune.core.errors import UserError
from elastune.core.formatting import cut
from elastune.core.journal import logs
from elastune.core.journal.records import OPENING, Entry, Record, decode_entry, encode_entry
from elastune.core.journal.run_records import JOURNAL_FORMAT

# Files that are whole or missing: written under another name, then renamed.


def atomic_write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the file ``path`` at once: readers see all of the old content or all of the new.

    ``mode``: the file's permissions, less the process's umask. Raises ``OSError``, and then leaves the old content in
    place and no other file.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


# Read a journal.

LONGEST_WHY = 300  # characters: a broken line can be a name of many megabytes


def read(path: Path) -> list[Entry]:
    """Return all entries, in order.

    A torn last line (its writer crashed, or still writes) is left out. Raises ``UserError`` where the file is missing,
    or, with the line's number, where an earlier line is no record.

    Example:
        >>> [entry.record.kind for entry in read(Path("out/journal.jsonl"))][0]
        'run_started'
    """
    lines = _bytes(path).split(b"\n")
    whole, tail = lines[:-1], lines[-1]
    if whole and not tail and not _is_json(whole[-1]):
        whole.pop()
    return [_entry(path, number, line) for number, line in enumerate(whole, start=1)]


def _bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
            raise UserError("a journal must be a file", path, "give the output folder of a run or a study")
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError("a journal must exist", path, "give the output folder of a run or a study") from None
    except OSError as error:
        raise UserError("a journal must be readable", f"{path}: {error.strerror}", "check the path") from None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _entry(path: Path, number: int, line: bytes) -> Entry:
    try:
        return decode_entry(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["loc"] in (("run_started", "format"), ("study_started", "format")):
            rule = f"this release reads journals of format {JOURNAL_FORMAT}"
            fix = "use the release of elastune that wrote it"
            raise UserError(rule, f"{path}: format {cut(repr(first['input']), 20)}", fix) from None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".lstrip(": ")
    except ValueError as error:
        why = str(error)
    fix = f"restore the file, or delete line {number} if its record can be missed"
    raise UserError("every line of a journal must be a record", f"{path}, line {number}: {cut(why, LONGEST_WHY)}", fix)


# Write a journal.

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SYNC_S = 0.1
_locked_here: set[Path] = set()


class JournalWriter:
    """The one writer of a journal: each ``write`` adds a line and hands it to the operating system.

    With ``exclusive`` a second writer on this machine, in this process or another, gets a ``UserError`` with the
    holder's pid. Opening cuts off a line that a crash tore. Not safe for several threads.

    Example:
        >>> with JournalWriter(out / "journal.jsonl") as journal:
        ...     journal.write(Checkpointed(step=100, path="step-0000000100"), durable=True)
    """

    def __init__(self, path: Path, *, exclusive: bool = True, wall: Callable[[], float] | None = None) -> None:
        self.path = Path(path)
        self._log = logs.run_logger(__name__, str(self.path.parent.absolute()))
        self._wall = wall or SystemClock().wall
        self._lock = -1
        self._file = -1
        self._owes = False
        self._sync_at = 0.0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if exclusive:
                self._lock = _acquire(self.path)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _cut_torn_tail(self._file, self.path)
        except OSError as error:
            self.close()
            raise _cannot_write(self.path, error) from error
        except UserError:
            self.close()
            raise
        self._size = os.fstat(self._file).st_size

    def write(self, record: Record, *, durable: bool = False) -> Entry:
        """Append ``record``. ``durable``: also have it on the disk, as for the end of a trial or a run.

        The death of this process loses no written record. Against a power cut the writer waits for the disk, at most
        once every ``SYNC_S``. Faster records reach the disk with the next write, ``settle`` or ``close``.

        Raises:
            UserError: Where the disk is full; the journal then ends with the last whole line. Also where the file was
                removed or replaced, since its records would be lost.
        """
        if self._file < 0:
            raise ValueError(f"journal {self.path} is closed")
        self._check_in_place()
        entry = Entry(self._wall(), record)
        line = encode_entry(entry) + b"\n"
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise _cannot_write(self.path, error) from error
        self._size += len(line)
        logs.log_record(self._log, record)
        self._owes = self._owes or durable
        self.settle()
        return entry

    def settle(self) -> None:
        """Have durable records on the disk, if it is time. Call it now and then where writes are rare.

        Raises ``UserError`` as ``write``.
        """
        self._check_in_place()
        if self._owes and time.monotonic() >= self._sync_at:
            try:
                os.fsync(self._file)
            except OSError as error:
                raise _cannot_write(self.path, error) from error
            self._owes, self._sync_at = False, time.monotonic() + SYNC_S

    @property
    def in_place(self) -> bool:
        """Whether the open file is still the one at ``path``."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _check_in_place(self) -> None:
        if not self.in_place:
            rule = "an output folder must stay where it is while something runs"
            raise UserError(rule, f"{self.path} was removed or replaced", "begin again in a folder that stays")

    def close(self) -> None:
        """Flush to the disk and release the lock. Idempotent."""
        if self._file >= 0:
            try:
                os.fsync(self._file)
            finally:
                os.close(self._file)
                self._file = -1
        if self._lock >= 0:
            _locked_here.discard(_lock_path(self.path))
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_unwritten(path: Path) -> None:
    """Raise ``UserError``, as ``JournalWriter`` does, if a process writes the journal ``path`` now. Leaves no file."""
    if not path.exists() or not _lock_path(path).exists():
        return
    try:
        os.close(_acquire(path))
    except OSError as error:
        raise _cannot_write(path, error) from error
    _locked_here.discard(_lock_path(path))


def writer_of(path: Path) -> int | None:
    """Return the pid of the process that writes the journal ``path`` on this machine; None if none does."""
    lock = _lock_path(path)
    if lock in _locked_here:
        return os.getpid()
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file gives it back
        return None
    except (BlockingIOError, PermissionError):
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        return int(owner) if owner.isascii() and owner.isdigit() and int(owner) > 1 else None
    finally:
        os.close(descriptor)


def _lock_path(path: Path) -> Path:
    real = path.resolve()
    return real.with_name(real.name + ".lock")


def _acquire(path: Path) -> int:
    """Take the journal's lock and return its open file.

    A POSIX record lock: the kernel drops it when its process ends, and a forked worker does not inherit it. It lies on
    a file of its own, because readers open the journal, and closing any descriptor of a file drops a process's locks on
    it. Within one process such a lock never conflicts, hence the set beside it.
    """
    lock = _lock_path(path)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644) if lock not in _locked_here else -1
    try:
        if descriptor < 0:
            raise BlockingIOError
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        if descriptor >= 0:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
        else:
            owner = str(os.getpid())
        rule = "a journal has one writer at a time"
        raise UserError(rule, f"{path}, held by pid {owner}", "wait for that process, or end it") from None
    _locked_here.add(lock)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _cut_torn_tail(file: int, path: Path) -> None:
    """Cut off a last line without its end, or one that is no JSON: a crash tore it. Any other content stays."""
    size = os.fstat(file).st_size
    if size == 0:
        return
    head = os.pread(file, len(OPENING), 0)
    if head != OPENING[: len(head)]:
        raise UserError("a journal must consist of elastune's records", path, "choose another output folder")
    start, line = _last_line(file, size)
    if line.endswith(b"\n"):
        try:
            json.loads(line)
            return
        except (ValueError, RecursionError):
            pass
    os.ftruncate(file, start)
    os.fsync(file)


def _last_line(file: int, size: int, block: int = 65536) -> tuple[int, bytes]:
    """The start of the last line, and the line, with or without its end."""
    blocks: list[bytes] = []  # joined once: a line may have many megabytes
    at = size
    while at > 0:
        step = min(block, at)
        at -= step
        blocks.append(os.pread(file, step, at))
        cut = blocks[-1].rfind(b"\n", 0, step if len(blocks) > 1 else step - 1)
        if cut >= 0:
            blocks[-1] = blocks[-1][cut + 1 :]
            return at + cut + 1, b"".join(reversed(blocks))
    return 0, b"".join(reversed(blocks))


def _cannot_write(path: Path, error: OSError) -> UserError:
    if error.errno in _FULL:
        return UserError("a journal needs room on its disk", f"{path}: {error.strerror}", "free space, then --resume")
    return UserError("a journal must be writable", f"{path}: {error.strerror}", "choose another output folder")
