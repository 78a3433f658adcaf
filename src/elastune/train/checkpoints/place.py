"""Where the checkpoints of a run are, as its workers use them: in a shared folder, or on each worker's machine.

All workers read and write a shared folder. Without one each worker writes its part on its own machine and goes on;
agents bring the parts to the controller, which makes a checkpoint once it has all of them.
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

UNSENT = 2  # checkpoints of a writer that may wait for the agent; the next one has to wait
UNSENT_LIMIT_S = 120.0
LOOK_S = 0.05
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

    def contribute(self, at: Path, states: States, number: int = 0, count: int = 1) -> Contribution:
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
    ) -> Path | None:
        """Make a checkpoint of all ``parts``. One worker calls it.

        Returns its folder, if it is complete; None: the controller will report when it is. Raises as
        ``checkpoint.publish``.
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


def storage_of(spec: RunSpec) -> CheckpointStorage:
    """The storage of a worker of ``spec``."""
    return SharedStorage(spec.out) if spec.spool is None else LocalStorage(Spool(spec.spool), host=host_name())


class SharedStorage:
    """The run's folder ``out``, on a file system that all workers and the controller share."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._home = OutFolder.at(out)

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
        """Do nothing: the other workers see the file."""

    def publish(
        self, at: Path, position: Position, must_match: dict[str, Any], parts: Sequence[Contribution]
    ) -> Path | None:
        path = checkpoints.publish(at, position, must_match, parts)
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

    def contribute(self, at: Path, states: States, number: int = 0, count: int = 1) -> Contribution:
        with self._naming_host():
            return checkpoints.contribute(at, states, number, count)

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
    ) -> Path | None:
        content = checkpoints.sealed_state(position, must_match, parts)
        digest = hashlib.sha256(content).hexdigest()
        with self._naming_host(), checkpoints.writing(at):
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
