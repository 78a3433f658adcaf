"""Where the checkpoints of a run are, as its workers use them: in a shared folder, or on each worker's machine.

All workers read and write a shared folder. Without one each worker writes its part on its own machine and goes on;
agents bring the parts to the controller, which makes a checkpoint once it has all of them.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from elastune.core.checkpoint_keeping import NEWEST_TWO, KeepCheckpoints
from elastune.core.formatting import byte_count
from elastune.core.journal.files import atomic_write
from elastune.core.run import Position, RunSpec
from elastune.elastic.wire.transport import host_name
from elastune.train.checkpoints import checkpoint as checkpoints
from elastune.train.checkpoints.background import Published
from elastune.train.checkpoints.checkpoint import Check, Checkpoint, Contribution, Damaged, NoRoom
from elastune.train.checkpoints.checkpoint_part import CheckpointPart, Written, sync
from elastune.train.checkpoints.out_folder import OutFolder
from elastune.train.checkpoints.spool import DRAFTS, CheckpointRequest, Spool, Ticket, Whose

UNSENT = 2  # checkpoints of a writer that may wait for the agent; the next one has to wait
UNSENT_LIMIT_S = 120.0
LOOK_S = 0.05
FEW = 3  # checkpoints: a disk with room for fewer is reported before it is full
NOTE = "part-{:05d}.json"
"""In a draft: what one of several writers has written, or why it has not. A checkpoint holds no such file."""
Agree = Callable[[int], int]
"""Returns, on all workers, the step that the first worker passes."""
Found = tuple[Path, Checkpoint] | None


class CheckpointStorage(Protocol):
    """The checkpoints of a run, as one of its workers reads and writes them."""

    def check(self) -> None:
        """Raise ``UserError`` if another folder has taken the place of the run's."""
        ...

    def draft(self, name: str) -> Path:
        """The folder for this worker's part of a checkpoint; ``name`` is equal on all workers. Raises ``UserError``."""
        ...

    def make_room(self, at: Path, leads: bool) -> None:
        """Make room before a part of the draft ``at`` is written; one of its writers ``leads``.

        Raises ``NoRoom`` if earlier parts wait for too long.
        """
        ...

    def contribute(self, at: Path, part: CheckpointPart, number: int = 0, count: int = 1) -> Contribution:
        """Write this worker's part of the draft ``at``, as writer ``number`` of ``count``.

        Raises as ``checkpoint.contribute``; and ``UserError`` as ``check``.
        """
        ...

    def written(self, at: Path, file: Written) -> None:
        """Note that all have written their parts; ``file`` in the draft ``at`` is this worker's.

        Raises ``UserError``.
        """
        ...

    def publish(
        self, at: Path, position: Position, must_match: dict[str, Any], parts: Sequence[Contribution]
    ) -> Published:
        """Make a checkpoint of all ``parts``. One worker calls it. Raises as ``checkpoint.publish``."""
        ...

    def has(self, step: int) -> bool:
        """Whether the checkpoint after ``step`` steps is complete, as far as this worker can know."""
        ...

    def newest(self) -> int | None:
        """The step of the run's newest checkpoint; None if there is none, or this worker cannot know."""
        ...

    def forget(self, step: int) -> None:
        """Remove the checkpoints after ``step``, as far as this worker can."""
        ...

    def spare(self, step: int) -> None:
        """Let the newest checkpoint up to ``step`` stay, whatever else is dropped."""
        ...

    def note(self, at: Path, number: int, share: Contribution | None, why: str = "") -> None:
        """Note for the worker that publishes what writer ``number`` has written, or ``why`` it has no room.

        Raises ``UserError``.
        """
        ...

    def notes(self, at: Path, count: int) -> list[Contribution] | None:
        """The contributions of all ``count`` writers; None: some have not noted theirs yet, or never will.

        Raises ``NoRoom`` once all have noted, and one had no room.
        """
        ...

    def load_newest(self, check: Check, agree: Agree) -> Found:
        """The run's newest checkpoint that is whole; None if there is none. All workers call it."""
        ...

    def newest_of_parent(self, parent: Path) -> int:
        """The step of the newest checkpoint of the run in ``parent``; -1 if there is none."""
        ...

    def of_parent(self, parent: Path, step: int) -> Path:
        """The folder that contains this checkpoint of the run in ``parent``."""
        ...


def low_room(folder: Path, parts: Sequence[Contribution]) -> str:
    """Why ``folder`` may have no room for further checkpoints like that of ``parts``; "" if it has room."""
    needed, free = sum(part.file.size for part in parts), checkpoints.free_bytes(folder)
    if free >= FEW * needed:
        return ""
    return f"room for {free // needed} more of {byte_count(needed)}, {byte_count(free)} free in {folder}"


def storage_of(spec: RunSpec) -> CheckpointStorage:
    """The storage of a worker of ``spec``."""
    if spec.spool is None:
        return SharedStorage(spec.out, spec.keep_checkpoints)
    return LocalStorage(Spool(spec.spool), host=host_name())


class SharedStorage:
    """The run's folder ``out``, on a file system that all workers and the controller share.

    ``keep``: which checkpoints stay when a new one comes.
    """

    def __init__(self, out: Path, keep: KeepCheckpoints = NEWEST_TWO) -> None:
        self._out, self._keep = out, keep
        self._home = OutFolder.at(out)

    def check(self) -> None:
        self._home.check()

    def draft(self, name: str) -> Path:
        self._home.check()
        return checkpoints.draft(self._out / "checkpoints", name)

    def make_room(self, at: Path, leads: bool) -> None:
        if leads:
            checkpoints.drop_older_drafts(at)

    def contribute(self, at: Path, part: CheckpointPart, number: int = 0, count: int = 1) -> Contribution:
        return checkpoints.contribute(at, part, number, count, make=self._home.make)

    def written(self, at: Path, file: Written) -> None:
        """Do nothing: the other workers see the file."""

    def publish(
        self, at: Path, position: Position, must_match: dict[str, Any], parts: Sequence[Contribution]
    ) -> Published:
        for number in range(len(parts)):
            (at / NOTE.format(number)).unlink(missing_ok=True)
        before = checkpoints.complete(at.parent)
        path = checkpoints.publish(at, position, must_match, parts, self._keep)
        checkpoints.drop_drafts(at.parent, at.name)
        dropped = sorted({*before} - {*checkpoints.complete(at.parent)})
        return Published(path, tuple(map(checkpoints.step_of, dropped)), low_room(at.parent, parts))

    def has(self, step: int) -> bool:
        return checkpoints.of_step(self._out / "checkpoints", step).is_dir()

    def newest(self) -> int | None:
        steps = checkpoints.complete(self._out / "checkpoints")
        return checkpoints.step_of(steps[-1]) if steps else None

    def forget(self, step: int) -> None:
        for path in checkpoints.complete(self._out / "checkpoints"):
            if checkpoints.step_of(path) > step:
                shutil.rmtree(path, ignore_errors=True)

    def spare(self, step: int) -> None:
        self._keep = replace(self._keep, good=step)

    def note(self, at: Path, number: int, share: Contribution | None, why: str = "") -> None:
        with checkpoints.writing(at):
            self._home.make(at)
            tree = {"share": None if share is None else share.tree, "why": why}
            atomic_write(at / NOTE.format(number), json.dumps(tree).encode())

    def notes(self, at: Path, count: int) -> list[Contribution] | None:
        try:
            trees = [json.loads((at / NOTE.format(number)).read_bytes()) for number in range(count)]
        except FileNotFoundError:
            return None
        if full := next((tree["why"] for tree in trees if tree["why"]), ""):
            raise NoRoom(checkpoints.UNWRITABLE, full, "free space there")
        return [Contribution.of(tree["share"]) for tree in trees]

    def load_newest(self, check: Check, agree: Agree) -> Found:
        return checkpoints.load_newest(self._out / "checkpoints", check, whole_parts=False)

    def newest_of_parent(self, parent: Path) -> int:
        seen = checkpoints.complete(parent / "checkpoints")
        return checkpoints.step_of(seen[-1]) if seen else -1

    def of_parent(self, parent: Path, step: int) -> Path:
        return parent / "checkpoints"


class LocalStorage:
    """The folder ``spool`` on the worker's own machine, ``host``, from which the agent brings files to the controller.

    ``limit_s``: how long to wait for an agent that is behind.
    """

    def __init__(self, spool: Spool, limit_s: float = UNSENT_LIMIT_S, host: str = "") -> None:
        self._spool, self._host = spool, host or socket.gethostname()
        self._limit_s = limit_s
        self._writer = secrets.token_hex(8)

    def check(self) -> None:
        """Do nothing: the agent owns the folder."""

    def draft(self, name: str) -> Path:
        folder = self._spool.at / DRAFTS / self._writer
        sent = {ticket.draft for _, ticket in self._spool.tickets()}
        for stale in folder.glob("*"):  # from an attempt that was never completed
            if stale.name not in sent:
                shutil.rmtree(stale, ignore_errors=True)
        return checkpoints.draft(folder, name)

    def make_room(self, at: Path, leads: bool) -> None:
        until = time.monotonic() + self._limit_s
        while (waiting := self._spool.waiting(self._writer)) >= UNSENT:
            if time.monotonic() > until:
                why = f"{waiting} checkpoints are not with the controller after {self._limit_s:g} s"
                raise NoRoom("a checkpoint must find room", self._here(why), "see the network to the controller")
            time.sleep(LOOK_S)

    def contribute(self, at: Path, part: CheckpointPart, number: int = 0, count: int = 1) -> Contribution:
        with self._naming_host():
            return checkpoints.contribute(at, part, number, count)

    def forget(self, step: int) -> None:
        raise NotImplementedError("the controller has the checkpoints")

    def spare(self, step: int) -> None:
        raise NotImplementedError("the controller has the checkpoints")

    def written(self, at: Path, file: Written) -> None:
        with self._naming_host(), checkpoints.writing(at):
            self._spool.hand_over(Ticket(self._writer, at.name, file.name, file.size, file.sha256))

    def _here(self, why: object) -> str:
        return f"host {self._host}: {why}"

    @contextmanager
    def _naming_host(self) -> Iterator[None]:
        """Name this host in the error of a full disk, as all workers get the error."""
        try:
            yield
        except NoRoom as full:
            raise NoRoom(full.rule, self._here(full.value), full.fix) from None

    def publish(
        self, at: Path, position: Position, must_match: dict[str, Any], parts: Sequence[Contribution]
    ) -> Published:
        content = checkpoints.sealed_state(position, must_match, parts)
        digest = hashlib.sha256(content).hexdigest()
        with self._naming_host(), checkpoints.writing(at):
            (at / checkpoints.STATE).write_bytes(content)
            sync(at / checkpoints.STATE)
            self._spool.hand_over(Ticket(self._writer, at.name, checkpoints.STATE, len(content), digest))
        return Published(None)

    def has(self, step: int) -> bool:
        """True: the controller reports what did not become complete."""
        return True

    def newest(self) -> int | None:
        """None: the controller knows."""
        return None

    def note(self, at: Path, number: int, share: Contribution | None, why: str = "") -> None:
        raise AssertionError("the writers of several files on several machines meet in a gather")

    def notes(self, at: Path, count: int) -> list[Contribution] | None:
        raise AssertionError("the writers of several files on several machines meet in a gather")

    def load_newest(self, check: Check, agree: Agree) -> Found:
        first: Damaged | None = None
        before: int | None = None
        while (step := agree(self._spool.ask(CheckpointRequest("own", before=before)))) >= 0:
            self._spool.ask(CheckpointRequest("own", step))
            path = self._spool.checkpoint("own", step)
            try:
                return path, checkpoints.load(path, check=check, whole_parts=False)
            except Damaged as error:
                first, before = first or error, step
                print(f"elastune: {error.rule} (got {error.value}): going on from the one before it", file=sys.stderr)
        if first is not None:
            raise first
        return None

    def newest_of_parent(self, parent: Path) -> int:
        return self._spool.ask(CheckpointRequest("parent"))

    def of_parent(self, parent: Path, step: int) -> Path:
        whose: Whose = "parent"
        if step >= 0:
            self._spool.ask(CheckpointRequest(whose, step))
        return self._spool.checkpoints(whose)
