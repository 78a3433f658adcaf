"""Follow a journal with a logger, from where an earlier command's logger stopped."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.core.journal.follow import JournalFollower
from elastune.core.journal.records import Entry, RunFailed
from elastune.loggers.events import OPENINGS, JournalEvents
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.logger import Logger, LogWriter, folder_of

LOOK_S = 0.5


@dataclass
class Progress:
    """How far a logger has come: the entries of the journal that it logged, and what its writer keeps."""

    entries: int = 0
    ids: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Progress:
        """The progress in ``path``; that of a beginner if there is none. Raises ``UserError`` for any other text."""
        try:
            read = json.loads(path.read_bytes())
            progress = cls(read["entries"], read["ids"])
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError("a logger's file must be as it wrote it", path, "remove it: all is logged again") from None
        texts = [*progress.ids, *progress.ids.values()] if isinstance(progress.ids, dict) else [None]
        if type(progress.entries) is not int or not all(isinstance(text, str) for text in texts):
            raise UserError("a logger's file must be as it wrote it", path, "remove it: all is logged again")
        return progress

    def write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        atomic_write(path, json.dumps(asdict(self)).encode())


def follow(out: Path, logger: Logger, over: threading.Event, opening: Callable[[], None] = lambda: None) -> None:
    """Log what is journaled in ``out`` until ``over`` is set and nothing is left.

    A command that is refused before anything has run leaves no trace at the tracker.

    Args:
        out: The output folder; it may not exist yet.
        logger: The logger.
        over: Set once nothing more will be journaled.
        opening: Called when ``out`` exists and the logger is about to be opened.
    """
    path = folder_of(out) / f"{logger.name}.json"
    follower = JournalFollower(out / JOURNAL)
    events = JournalEvents(out)
    progress: Progress | None = None
    writer: LogWriter | None = None
    seen = 0
    held: list[Entry] = []
    while True:
        last = over.is_set()
        while block := follower.read_block():
            held += block
            if not any(_is_work(entry) for entry in held):
                continue
            if progress is None or writer is None:
                opening()
                progress = Progress.read(path)
                writer = logger.open(out, progress.ids)
            for entry in held:
                seen += 1
                for event in events.of(entry):
                    if seen > progress.entries:
                        writer.write(event)
            held = []
            writer.flush()
            progress.entries = max(seen, progress.entries)
            progress.write(path)
        if last:
            break
        over.wait(LOOK_S)
    if writer is not None and progress is not None:
        writer.close()
        progress.write(path)


def _is_work(entry: Entry) -> bool:
    record = entry.record
    return not (isinstance(record, OPENINGS) or (isinstance(record, RunFailed) and record.reason == "user_error"))
