"""Requests to a running study from outside: stop, pause or go on with a trial, change its budget or workers, end it.

A request is a file in a folder of the study in which only the study's owner can write, as only the owner can read the
contact file of a run. The study looks there a few times a second. It journals each request with who asked and whether
it is refused, which is the acknowledgement. It does what was asked at the next boundary, and journals that too. A
request that no controller has seen waits for the next one: ``elastune resume`` then does it.
"""

from __future__ import annotations

import getpass
import os
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.core.journal.follow import JournalFollower
from elastune.core.journal.records import ActAsked, StudyStarted, decode, encode

FOLDER = ".asked"
REQUEST_LIMIT_BYTES = 4096
MOST_REQUESTS = 1000  # in one look: others wait for the next
LOOK_S = 0.25  # between two looks of the study
ACKNOWLEDGED_S = 2.0  # a study that runs has journaled a request by then
JOURNAL_NAME = "journal.jsonl"


# --- ask a study ---


@dataclass(frozen=True)
class Acknowledgement:
    """What became of a request within ``ACKNOWLEDGED_S``.

    Attributes:
        seen: Whether the study has journaled it. Else it waits in the study's folder.
        refused: Why the study does not do it: rule, value and fix; "" if it does.
    """

    seen: bool
    refused: str = ""


def asker(by: str) -> str:
    """Return who asks: ``by`` ("elastune trials", "the dashboard"), the user and the machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = f"user {os.getuid()}"
    return f"{by}, {user} on {os.uname().nodename}"[:200]


def ask_study(out: Path, act: ActAsked, wait_s: float = ACKNOWLEDGED_S) -> Acknowledgement:
    """Ask the study in ``out`` to do ``act``, and wait until it has journaled the request.

    Args:
        out: The folder of the study. If no controller works on it, the request waits for the next one.
        act: The request, with a fresh name (see ``request``).
        wait_s: The longest time to wait for the acknowledgement.

    Returns:
        The acknowledgement.

    Raises:
        UserError: If ``out`` holds no journal, or if only another user can ask.

    Example:
        >>> ask_study(out, request("stop", "elastune trials", trial=3)).refused
        ''
    """
    journal = out / JOURNAL_NAME
    if not journal.is_file():
        raise UserError("a request needs the output folder of a study", out, "elastune ls lists them")
    follower = JournalFollower(journal, at_end=True)
    folder = out / FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder)
        atomic_write(folder / f"{act.ask}.json", encode(act), mode=0o600)
    except OSError as error:
        rule = "a study can be changed by its owner only"
        raise UserError(rule, f"{folder}: {error.strerror}", "ask as the user who started it") from None
    deadline = time.monotonic() + wait_s
    while True:
        for entry in follower.read_block():
            if isinstance(entry.record, ActAsked) and entry.record.ask == act.ask:
                return Acknowledgement(True, entry.record.refused)
        if time.monotonic() >= deadline:
            return Acknowledgement(False)
        time.sleep(0.05)


def is_study(out: Path) -> bool:
    """Return whether ``out`` holds the journal of a study or a frontier. Only its first records are read."""
    entries = JournalFollower(out / JOURNAL_NAME).read_block()
    return any(isinstance(entry.record, StudyStarted) for entry in entries[:10])


def request(act: str, by: str, **what: Any) -> ActAsked:
    """Return a request with a fresh name.

    Args:
        act: What to do, as ``ActAsked`` names it.
        by: See ``asker``.
        what: The fields of ``ActAsked`` that belong to ``act``.

    Raises:
        ValueError: If these fields do not belong to ``act``, or are out of range.
    """
    return ActAsked(act=act, ask=secrets.token_hex(8), by=asker(by), **what)  # type: ignore[arg-type]


def _check_private(folder: Path) -> None:
    """Raise ``OSError`` unless ``folder`` is a folder of this user, in which no other user can write."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(0, "it must be a folder of yours, in which others cannot write")


class Inbox:
    """The requests in the folder of a study, for its controller.

    Args:
        out: The folder of the study.
    """

    def __init__(self, out: Path) -> None:
        self._folder = out / FOLDER
        self._look_at = 0.0
        self._files: dict[str, Path] = {}

    def take(self) -> list[ActAsked]:
        """Return the requests, in the order of asking. It looks once every ``LOOK_S`` at most.

        Files that are no requests of the study's owner are removed.
        """
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_S
        try:
            _check_private(self._folder)
            with os.scandir(self._folder) as files:
                found = [(file.stat(follow_symlinks=False).st_mtime_ns, file.name) for file in files]
        except OSError:
            return []
        asked = []
        names = [name for _, name in sorted(found) if not name.startswith(".")]  # others are being written
        for path in (self._folder / name for name in names[:MOST_REQUESTS]):
            if (act := _read(path)) is None:
                _remove(path)
            else:
                self._files[act.ask] = path
                asked.append(act)
        return asked

    def remove(self, act: ActAsked) -> None:
        """Remove a request that is in the journal."""
        if (path := self._files.pop(act.ask, None)) is not None:
            _remove(path)


def _read(path: Path) -> ActAsked | None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                return None
            record = decode(file.read(REQUEST_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return replace(record, refused="") if isinstance(record, ActAsked) else None


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
