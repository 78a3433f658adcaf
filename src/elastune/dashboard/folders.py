"""The output folders that the page may show, and the views that follow their journals.

A request names a folder by its place in this list. No path of a request ever reaches the file system, and links that
lead out of the folders that were asked for are left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastune.core.journal.files import writer_of
from elastune.core.journal.follow import JournalFollower
from elastune.core.journal.records import RunStarted, StudyStarted
from elastune.dashboard.run_view import FollowedRun, log_tails
from elastune.dashboard.study_view import FollowedStudy

JOURNAL = "journal.jsonl"
LIST_S = 2.0  # between two looks for new folders
WRITER_S = 1.0  # between two looks who writes a journal
FOLDS_S = 0.2  # a call reads at most so long: a page shows the first records of a long journal meanwhile


@dataclass
class Sent:
    """What one open page has of a folder.

    Attributes:
        view: The view that it knows.
        version: The version of the view that it knows.
        head: The small part of what is shown.
        curves: By curve, how many points it had.
    """

    view: FollowedStudy | FollowedRun | None = None
    version: int = 0
    head: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, int] = field(default_factory=dict)


@dataclass
class FollowedFolder:
    """One output folder, and the view of what is in its journal.

    Attributes:
        name: Its name on the page.
        out: The folder.
        view: None until the journal says what it holds.
        complete: Whether all records so far were read.
    """

    name: str
    out: Path
    view: FollowedStudy | FollowedRun | None = None
    complete: bool = False
    pid: int | None = None
    _follower: JournalFollower | None = None
    _generation: int = 0
    _writer_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> bool:
        """Return whether the journal has records that were not read. It costs next to nothing, and reads none."""
        now = time.monotonic()
        if now >= self._writer_at:
            self._writer_at = now + WRITER_S
            self.pid = writer_of(self.out / JOURNAL)
        self._follower = self._follower or JournalFollower(self.out / JOURNAL)
        return self._follower.behind

    @property
    def state(self) -> tuple[object, ...]:
        """Differs when there is something new to show."""
        return id(self.view), 0 if self.view is None else self.view.version, self.pid, self.complete

    def advance(self) -> None:
        """Read what is new, for ``FOLDS_S`` at most."""
        with self._lock:
            follower = self._follower = self._follower or JournalFollower(self.out / JOURNAL)
            self.pid = writer_of(self.out / JOURNAL)
            until = time.monotonic() + FOLDS_S
            while time.monotonic() < until:
                entries = follower.read_block()
                if follower.generation != self._generation:
                    self._generation, self.view = follower.generation, None
                if not entries:
                    break
                for entry in entries:
                    if self.view is None and isinstance(entry.record, StudyStarted | RunStarted):
                        self.view = FollowedStudy() if isinstance(entry.record, StudyStarted) else FollowedRun()
                    if self.view is not None:
                        self.view.observe(entry)
            self.complete = not follower.behind

    def summary(self) -> dict[str, Any]:
        """What the list of folders shows of it."""
        with self._lock:
            head = None if self.view is None else self.view.head(self.pid is not None)
        known = ("kind", "state", "running", "started_at", "last_at", "best", "counts", "program")
        return {"name": self.name, **({} if head is None else {key: head[key] for key in known if key in head})}

    def event(self, sent: Sent) -> dict[str, Any]:
        """Return what differs from ``sent``, which a page has, and note it there. ``fresh``: forget what was before."""
        with self._lock:
            view = self.view
            fresh = sent.view is not view or view is None
            if fresh:
                sent.view, sent.version, sent.head, sent.curves = view, 0, {}, {}
            if view is None:
                return {"name": self.name, "complete": self.complete, "kind": "", "fresh": True}
            head = {"name": self.name, "complete": self.complete, **view.head(self.pid is not None)}
            news = {key: value for key, value in head.items() if key not in sent.head or sent.head[key] != value}
            news |= {"kind": head["kind"], "fresh": fresh}
            if isinstance(view, FollowedStudy):
                news |= view.news(sent.version)
            else:
                curves = view.curves()
                changed = {name: each for name, each in curves.items() if each.count != sent.curves.get(name, 0)}
                news["curves"] = {name: each.after(sent.curves.get(name, 0)) for name, each in changed.items()}
                sent.curves = {name: each.count for name, each in curves.items()}
            sent.version, sent.head = view.version, head
            return news

    def importance(self) -> list[dict[str, Any]]:
        """What decides the objectives of a study."""
        with self._lock:
            return self.view.importance() if isinstance(self.view, FollowedStudy) else []

    def ledger(self) -> dict[str, Any] | None:
        """The ledger of a run so far; None for a study."""
        with self._lock:
            return self.view.ledger() if isinstance(self.view, FollowedRun) else None

    def curves(self, trial: int) -> dict[str, Any] | None:
        """What the page shows of one trial; None if there is none."""
        with self._lock:
            return self.view.curves(trial) if isinstance(self.view, FollowedStudy) else None

    def logs(self, trial: int | None) -> list[dict[str, str]]:
        """The last lines of the workers' logs, of the run or of one trial."""
        if trial is None:
            return log_tails(self.out)
        folder = self.out / "trials" / f"{trial:05d}"
        inside = folder.is_dir() and folder.resolve().is_relative_to(self.out.resolve())
        return log_tails(folder) if inside else []


class Folders:
    """The folders that the page may show.

    Args:
        roots: Output folders, and folders that hold output folders.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._known: dict[str, FollowedFolder] = {}
        self._look_at = -LIST_S
        self._lock = threading.Lock()

    def all(self) -> list[FollowedFolder]:
        """All folders with a journal, those of the newest records first."""
        with self._lock:
            if time.monotonic() >= self._look_at:
                self._look()
                self._look_at = time.monotonic() + LIST_S
            return list(self._known.values())

    def of(self, name: str) -> FollowedFolder | None:
        """Return the folder of that name; None if the page may not show it."""
        return next((each for each in self.all() if each.name == name), None)

    def _look(self) -> None:
        found: dict[str, Path] = {}
        for root in self._roots:
            here = root.resolve()
            if _has_journal(here, here):
                found[_free(here.name, found)] = here
                continue
            try:
                inside = sorted(path for path in here.iterdir() if path.is_dir())
            except OSError:
                continue
            for path in inside:
                if _has_journal(path, here):
                    found[_free(path.name, found)] = path
        known = {each.name: each for each in self._known.values() if found.get(each.name) == each.out}
        self._known = {name: known.get(name) or FollowedFolder(name, path) for name, path in found.items()}


def _has_journal(folder: Path, root: Path) -> bool:
    """Whether ``folder`` holds a journal, and both lie in ``root`` however links lead."""
    journal = folder / JOURNAL
    return journal.is_file() and journal.resolve().is_relative_to(root) and folder.resolve().is_relative_to(root)


def _free(name: str, taken: dict[str, Path]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name} ({number})", number + 1
    return free
