"""A run's folder at its controller, as files of checkpoints come in: a checkpoint is one once all of it is here.

A file has another name until it is there whole, with the size and digest that were told, and on the disk. The last one
of a checkpoint makes its draft the checkpoint by a rename, as a worker does where the folder is shared.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from elastune.cluster.transfer.messages import Contents, Offer
from elastune.train.checkpoints.spool import NAME_PATTERN, Digest, FileName

if TYPE_CHECKING:
    from elastune.train.checkpoints.spool import Whose

PARTIAL = ".partial"  # the end of the name of a file that is not whole
_IS_NAME = re.compile(NAME_PATTERN)
_FILES = TypeAdapter(dict[FileName, Digest])


class NotWhole(Exception):
    """What came is not what was offered; why, in one line."""


class Receiving:
    """The file that ``offer`` tells of, on its way into ``folder``. What an earlier connection has brought is kept."""

    def __init__(self, offer: Offer, folder: Path) -> None:
        self.offer = offer
        self.at = folder / offer.name
        self._partial = folder / f"{offer.name}{PARTIAL}"
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._file = FileIO(handle, "r+")  # nothing is kept back: what a full disk does not take is told at once
        self._hash = hashlib.sha256()
        while block := self._file.read(1 << 20):
            self._hash.update(block)
        self.offset = self._file.tell()
        if self.offset > offer.size:
            self._begin_again()

    @property
    def whole(self) -> bool:
        """Whether as much has come as was offered."""
        return self.offset == self.offer.size

    def take(self, data: bytes) -> None:
        """More of it. Raises ``NotWhole`` where that is more than was offered, ``OSError`` where there is no room."""
        if self.offset + len(data) > self.offer.size:
            self._begin_again()
            raise NotWhole(f"{self.offer.name} is longer than the {self.offer.size} bytes that were offered")
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self._hash.update(data)
        self.offset += len(data)

    def finish(self) -> None:
        """Give it its name, once it is on the disk. Raises ``NotWhole`` where its digest is another one."""
        if self._hash.hexdigest() != self.offer.sha256:
            self._begin_again()
            raise NotWhole(f"the bytes of {self.offer.name} do not have the digest that was offered")
        os.fsync(self._file.fileno())
        self._partial.rename(self.at)
        self.close()

    def close(self) -> None:
        """Whatever has come stays. Idempotent."""
        self._file.close()

    def _begin_again(self) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self._hash, self.offset = hashlib.sha256(), 0


@dataclass(frozen=True)
class Arrived:
    """A checkpoint of the run is complete here: after ``step``, at ``path``."""

    step: int
    path: Path


def step_of_draft(draft: str) -> int:
    """After how many steps the checkpoint of this name is taken."""
    return int(draft.split("-")[1])


def _age(draft: str) -> tuple[int, int, int]:
    """What orders drafts by time: view, step, and which one of that view."""
    step, view, nth = (int(number) for number in draft.split("-")[1:])
    return view, step, nth


class Inbox:
    """The files of one run, whose folder is ``out``; ``parent``: that of the run which it begins with.

    One thread uses it. Every method may raise ``OSError``.
    """

    # Imported when needed: checkpoints need torch, which takes long to come.

    def __init__(self, out: Path, parent: Path | None = None) -> None:
        self._out, self._parent = out, parent
        self._digests: dict[str, dict[str, str]] = {}  # by draft and name, of files that were verified here
        self._done: set[str] = set()  # drafts that are checkpoints now, or that nothing becomes of any more
        self._newest = (-1, -1, -1)  # the age of what became one last: nothing becomes of drafts before it

    def receive(self, offer: Offer) -> Receiving | None:
        """To be filled with what was offered; None where it is here already, or nobody has use for it."""
        known = self._digests.get(offer.draft, {}).get(offer.name)
        if self._is_over(offer.draft) or known == offer.sha256:
            return None
        return Receiving(offer, self._draft(offer.draft))

    def accept(self, received: Receiving) -> Arrived | None:
        """The file has come; the checkpoint that it completes.

        Raises ``NotWhole`` where it is not what was offered, or belongs to no checkpoint.
        """
        if self._is_over(received.offer.draft):
            return None
        received.finish()
        self._digests.setdefault(received.offer.draft, {})[received.offer.name] = received.offer.sha256
        return self._completed(received.offer.draft)

    def incomplete(self) -> list[str]:
        """What is to be told of checkpoints of which something never came."""
        return [
            f"after step {step_of_draft(draft)}: {', '.join(sorted(names)) or 'nothing'} has come, and no more"
            for draft, names in self._digests.items()
            if not self._is_over(draft)
        ]

    def drop_drafts(self) -> None:
        """Leave nothing of checkpoints that did not become complete."""
        from elastune.train.checkpoints.checkpoint import DRAFT

        for left in (self._out / "checkpoints").glob(f"{DRAFT}*"):
            shutil.rmtree(left, ignore_errors=True)

    def contents(self, whose: Whose, step: int | None, before: int | None) -> Contents:
        """What the checkpoint after ``step`` consists of, or the newest one, below ``before`` if that is given."""
        from elastune.train.checkpoints.checkpoint import complete, of_step, step_of

        folder = self._folder(whose)
        if folder is None:
            return Contents(-1)
        if step is None:
            steps = [step_of(path) for path in complete(folder)]
            steps = [there for there in steps if before is None or there < before]
            return Contents(steps[-1]) if steps else Contents(-1)
        path = of_step(folder, step)
        if not path.is_dir():
            return Contents(-1)
        files = [file for file in sorted(path.iterdir()) if file.is_file() and _IS_NAME.fullmatch(file.name)]
        told = path.stat()
        return Contents(step, {file.name: file.stat().st_size for file in files}, f"{told.st_ino}-{told.st_mtime_ns}")

    def read(self, whose: Whose, step: int, name: str, offset: int, most: int) -> bytes:
        """Up to ``most`` bytes of one of its files."""
        from elastune.train.checkpoints.checkpoint import of_step

        folder = self._folder(whose)
        if folder is None:
            raise FileNotFoundError(name)
        with open(os.open(of_step(folder, step) / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            file.seek(offset)
            return file.read(most)

    def _folder(self, whose: Whose) -> Path | None:
        run = self._out if whose == "own" else self._parent
        return None if run is None else run / "checkpoints"

    def _draft(self, name: str) -> Path:
        return self._out / "checkpoints" / name

    def _is_over(self, draft: str) -> bool:
        return draft in self._done or _age(draft) < self._newest

    def _completed(self, draft: str) -> Arrived | None:
        """What ``draft`` has become, if all of it is here."""
        from elastune.train.checkpoints.checkpoint import STATE, complete_draft
        from elastune.train.checkpoints.seal import digest_of, unseal

        at, known = self._draft(draft), self._digests[draft]
        if STATE not in known and not (at / STATE).is_file():
            return None
        try:
            tree = unseal((at / STATE).read_bytes())
            files, step = _FILES.validate_python(tree["files"]), int(tree["position"]["step"])
        except (ValueError, KeyError, TypeError) as error:
            self.give_up(draft)
            raise NotWhole(f"the {STATE} of {draft} is none: {error}") from None
        if not all((at / name).is_file() for name in files):
            return None
        for name, digest in files.items():  # what a controller before this one has taken is read again
            if known.setdefault(name, "") == "":
                known[name] = digest_of(at / name)
            if known[name] != digest:
                self.give_up(draft)
                raise NotWhole(f"the {name} of {draft} is not the one that its {STATE} names")
        if step != step_of_draft(draft):
            self.give_up(draft)
            raise NotWhole(f"{draft} was taken after {step} steps")
        self._done.add(draft)
        self._newest = _age(draft)
        path = complete_draft(at, at.parent, step)
        self._drop_older()
        return Arrived(step, path)

    def _drop_older(self) -> None:
        """Nothing becomes of drafts before the one that became a checkpoint last."""
        from elastune.train.checkpoints.checkpoint import DRAFT

        for path in (self._out / "checkpoints").glob(f"{DRAFT}*"):
            with suppress(ValueError):  # it is none
                if _age(path.name) < self._newest:
                    self.give_up(path.name)

    def give_up(self, draft: str) -> None:
        """Nothing becomes of this one any more."""
        self._done.add(draft)
        self._digests.pop(draft, None)
        shutil.rmtree(self._draft(draft), ignore_errors=True)
