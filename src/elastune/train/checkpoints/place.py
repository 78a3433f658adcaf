"""Where the checkpoints of a run lie, as its workers use them: in its own folder, or near each worker, for its agent.

A shared folder is read and written by all. Elsewhere each worker writes its part on its own machine and goes on; agents
bring the parts to the controller, which makes them a checkpoint once all are there.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from elastune.core.run import Position, RunSpec
from elastune.elastic.wire.transport import host_name
from elastune.train.checkpoints import checkpoint as checkpoints
from elastune.train.checkpoints.checkpoint import Check, Checkpoint, Contribution, Damaged, NoRoom, Written, sync
from elastune.train.checkpoints.out_folder import OutFolder
from elastune.train.checkpoints.spool import DRAFTS, CheckpointRequest, Spool, Ticket, Whose
from elastune.train.checkpoints.tree import States

UNSENT = 2  # checkpoints of a writer that may wait for its agent; the next one waits for them
UNSENT_LIMIT_S = 120.0
LOOK_S = 0.05
Agree = Callable[[int], int]
"""Gives all workers the step that the first of them names."""
Found = tuple[Path, Checkpoint] | None


class CheckpointStorage(Protocol):
    """One worker's way to the checkpoints of its run."""

    def check(self) -> None:
        """Raise ``UserError`` where it is no longer what it was when the work began."""
        ...

    def draft(self, name: str) -> Path:
        """Where this worker writes its part of a checkpoint; ``name`` is equal on all of them. Raises ``UserError``."""
        ...

    def make_room(self, at: Path, leads: bool) -> None:
        """Before a part of the draft ``at`` is written: of those who do, one ``leads``.

        Raises ``NoRoom`` where those before it are not done with for too long.
        """
        ...

    def contribute(self, at: Path, states: States, number: int = 0, count: int = 1) -> Contribution:
        """Be writer ``number`` of ``count`` of the draft ``at``. Raises as ``checkpoint.contribute``; and ``UserError``
        as ``check``."""
        ...

    def written(self, at: Path, file: Written) -> None:
        """All have written their parts; ``file`` in the draft ``at`` is this worker's. Raises ``UserError``."""
        ...

    def publish(
        self, at: Path, position: Position, meaning: dict[str, Any], parts: Sequence[Contribution]
    ) -> Path | None:
        """Make of all ``parts`` a checkpoint, which is here then; None: the controller will tell when it is complete.

        One worker calls it. Raises as ``checkpoint.publish``.
        """
        ...

    def load_newest(self, check: Check, agree: Agree) -> Found:
        """The run's newest checkpoint that is whole; None where there is none. All workers call it."""
        ...

    def newest_of_parent(self, parent: Path) -> int:
        """The step of the newest checkpoint of the run in ``parent``; -1 where there is none."""
        ...

    def of_parent(self, parent: Path, step: int) -> Path:
        """The folder that has this checkpoint of the run in ``parent``."""
        ...


def storage_of(spec: RunSpec) -> CheckpointStorage:
    """That of a worker of ``spec``."""
    return SharedStorage(spec.out) if spec.spool is None else LocalStorage(Spool(spec.spool), host=host_name())


class SharedStorage:
    """The run's folder ``out``, which all its workers and its controller see."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._home = OutFolder.found(out)

    def check(self) -> None:
        self._home.check()

    def draft(self, name: str) -> Path:
        self._home.check()
        return checkpoints.draft(self._out / "checkpoints", name)

    def make_room(self, at: Path, leads: bool) -> None:
        if leads:
            checkpoints.drop_older_drafts(at)

    def contribute(self, at: Path, states: States, number: int = 0, count: int = 1) -> Contribution:
        return checkpoints.contribute(at, states, number, count, make=self._home.make)

    def written(self, at: Path, file: Written) -> None:
        """The others see it."""

    def publish(
        self, at: Path, position: Position, meaning: dict[str, Any], parts: Sequence[Contribution]
    ) -> Path | None:
        path = checkpoints.publish(at, position, meaning, parts)
        checkpoints.drop_drafts(at.parent)
        return path

    def load_newest(self, check: Check, agree: Agree) -> Found:
        return checkpoints.load_newest(self._out / "checkpoints", check, whole_parts=False)

    def newest_of_parent(self, parent: Path) -> int:
        seen = checkpoints.complete(parent / "checkpoints")
        return checkpoints.step_of(seen[-1]) if seen else -1

    def of_parent(self, parent: Path, step: int) -> Path:
        return parent / "checkpoints"


class LocalStorage:
    """The ``spool`` of a worker's machine ``host``. ``limit_s``: how long to wait for an agent that is behind."""

    def __init__(self, spool: Spool, limit_s: float = UNSENT_LIMIT_S, host: str = "") -> None:
        self._spool, self._host = spool, host or socket.gethostname()
        self._limit_s = limit_s
        self._writer = secrets.token_hex(8)

    def check(self) -> None:
        """It is the agent's, and goes with it."""

    def draft(self, name: str) -> Path:
        folder = self._spool.at / DRAFTS / self._writer
        sent = {ticket.draft for _, ticket in self._spool.tickets()}
        for left in folder.glob("*"):  # of an attempt of which nothing has come
            if left.name not in sent:
                shutil.rmtree(left, ignore_errors=True)
        return checkpoints.draft(folder, name)

    def make_room(self, at: Path, leads: bool) -> None:
        until = time.monotonic() + self._limit_s
        while (waiting := self._spool.waiting(self._writer)) >= UNSENT:
            if time.monotonic() > until:
                why = f"{waiting} checkpoints are not with the controller after {self._limit_s:g} s"
                raise NoRoom("a checkpoint must find room", self._here(why), "see the network to the controller")
            time.sleep(LOOK_S)

    def contribute(self, at: Path, states: States, number: int = 0, count: int = 1) -> Contribution:
        with self._told_here():
            return checkpoints.contribute(at, states, number, count)

    def written(self, at: Path, file: Written) -> None:
        with self._told_here(), checkpoints.writing(at):
            self._spool.hand_over(Ticket(self._writer, at.name, file.name, file.size, file.sha256))

    def _here(self, why: object) -> str:
        return f"host {self._host}: {why}"

    @contextmanager
    def _told_here(self) -> Iterator[None]:
        """A full disk is one machine's, and all are told of it."""
        try:
            yield
        except NoRoom as full:
            raise NoRoom(full.rule, self._here(full.value), full.fix) from None

    def publish(
        self, at: Path, position: Position, meaning: dict[str, Any], parts: Sequence[Contribution]
    ) -> Path | None:
        content = checkpoints.sealed_state(position, meaning, parts)
        digest = hashlib.sha256(content).hexdigest()
        with self._told_here(), checkpoints.writing(at):
            (at / checkpoints.STATE).write_bytes(content)
            sync(at / checkpoints.STATE)
            self._spool.hand_over(Ticket(self._writer, at.name, checkpoints.STATE, len(content), digest))
        return None

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
