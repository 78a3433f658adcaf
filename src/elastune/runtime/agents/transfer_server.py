"""The controller's side of file transfer: a thread that receives files from agents and sends them files.

An incoming file has a temporary name until all of it is on the disk with the announced size and digest. The last file
of a checkpoint turns its draft into the checkpoint by a rename, as a worker does in a shared folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from elastune.core.checkpoint_keeping import NEWEST_TWO, KeepCheckpoints
from elastune.core.errors import UserError
from elastune.core.journal.records import Checkpointed, CheckpointFailed, ConnectionsRefused
from elastune.elastic.wire.server import Closed, Connection, ConnectionServer, Greeted, Heard, refusal_line
from elastune.elastic.wire.transport import WakeupPipe
from elastune.runtime.agents import transfer_messages as messages
from elastune.train.checkpoints.spool import NAME_PATTERN, Digest, FileName

if TYPE_CHECKING:
    from elastune.train.checkpoints.spool import Whose


PARTIAL = ".partial"  # the end of the name of an incomplete file
_IS_NAME = re.compile(NAME_PATTERN)
_FILES = TypeAdapter(dict[FileName, Digest])


class IncompleteFile(Exception):
    """The received bytes are not the offered file. The message says why, in one line."""


class IncomingFile:
    """A file that an agent has offered and now sends into ``folder``. Bytes of an earlier connection are kept."""

    def __init__(self, offer: messages.Offer, folder: Path) -> None:
        self.offer = offer
        self.at = folder / offer.name
        self._partial = folder / f"{offer.name}{PARTIAL}"
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._file = FileIO(handle, "r+")  # unbuffered: a full disk raises an error at once
        self._hash = hashlib.sha256()
        while block := self._file.read(1 << 20):
            self._hash.update(block)
        self.offset = self._file.tell()
        if self.offset > offer.size:
            self._begin_again()

    @property
    def whole(self) -> bool:
        """Whether all offered bytes have arrived."""
        return self.offset == self.offer.size

    def take(self, data: bytes) -> None:
        """Append bytes. Raises ``IncompleteFile`` for more bytes than offered, ``OSError`` for a full disk."""
        if self.offset + len(data) > self.offer.size:
            self._begin_again()
            raise IncompleteFile(f"{self.offer.name} is longer than the {self.offer.size} bytes that were offered")
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self._hash.update(data)
        self.offset += len(data)

    def finish(self) -> None:
        """Write the file to the disk and give it its name. Raises ``IncompleteFile`` if its digest is another one."""
        if self._hash.hexdigest() != self.offer.sha256:
            self._begin_again()
            raise IncompleteFile(f"the bytes of {self.offer.name} do not have the digest that was offered")
        os.fsync(self._file.fileno())
        self._partial.rename(self.at)
        self.close()

    def close(self) -> None:
        """Close the file; the bytes that have arrived stay. Idempotent."""
        self._file.close()

    def _begin_again(self) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self._hash, self.offset = hashlib.sha256(), 0


@dataclass(frozen=True)
class ReceivedCheckpoint:
    """A checkpoint that has arrived completely: the one after ``step``, at ``path``.

    ``dropped``: the steps of the checkpoints that were deleted for it.
    """

    step: int
    path: Path
    dropped: tuple[int, ...] = ()


def step_of_draft(draft: str) -> int:
    """The step of the checkpoint ``draft``."""
    return int(draft.split("-")[1])


def _age(draft: str) -> tuple[int, int, int]:
    """The key that orders drafts by time: view, step, and number in that view."""
    step, view, nth = (int(number) for number in draft.split("-")[1:])
    return view, step, nth


class CheckpointReceiver:
    """Receives the checkpoints of one run into its folder, and reads them for workers.

    One thread uses it. Every method may raise ``OSError``.

    Args:
        out: The folder of the run.
        parent: The folder of the run whose checkpoint it begins with.
        keep: Which checkpoints stay when a new one is complete.
    """

    # Checkpoints are imported when they are needed, because they need torch, whose import takes seconds.

    def __init__(self, out: Path, parent: Path | None = None, keep: KeepCheckpoints = NEWEST_TWO) -> None:
        self._out, self._parent, self._keep = out, parent, keep
        self._digests: dict[str, dict[str, str]] = {}  # of complete files, by draft and name
        self._done: set[str] = set()  # drafts that have become checkpoints, or were given up
        self._newest = (-1, -1, -1)  # the age of the newest checkpoint; older drafts are given up

    def receive(self, offer: messages.Offer) -> IncomingFile | None:
        """Return the file to fill; None if it is complete already, or its checkpoint was given up."""
        digest = self._digests.get(offer.draft, {}).get(offer.name)
        if self._is_over(offer.draft) or digest == offer.sha256:
            return None
        return IncomingFile(offer, self._draft(offer.draft))

    def accept(self, received: IncomingFile) -> ReceivedCheckpoint | None:
        """Take in a file that has arrived. Return the checkpoint that it completes, or None.

        Raises:
            IncompleteFile: If it is not the offered file, or does not belong to its checkpoint.
        """
        if self._is_over(received.offer.draft):
            return None
        received.finish()
        self._digests.setdefault(received.offer.draft, {})[received.offer.name] = received.offer.sha256
        return self._completed(received.offer.draft)

    def incomplete(self) -> list[str]:
        """Describe the checkpoints of which a file has not arrived."""
        return [
            f"after step {step_of_draft(draft)}: {', '.join(sorted(names)) or 'nothing'} has come, and no more"
            for draft, names in self._digests.items()
            if not self._is_over(draft)
        ]

    def drop_drafts(self) -> None:
        """Remove all checkpoints that did not become complete."""
        from elastune.train.checkpoints.checkpoint import DRAFT

        for draft in (self._out / "checkpoints").glob(f"{DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)

    def contents(self, whose: Whose, step: int | None, before: int | None) -> messages.Contents:
        """Return the files of the checkpoint after ``step``; None: the step of the newest checkpoint alone.

        ``before``: with no ``step``, the newest checkpoint of an earlier step than this.
        """
        from elastune.train.checkpoints.checkpoint import complete, of_step, step_of

        folder = self._folder(whose)
        if folder is None:
            return messages.Contents(-1)
        if step is None:
            steps = [step_of(path) for path in complete(folder)]
            steps = [each for each in steps if before is None or each < before]
            return messages.Contents(steps[-1]) if steps else messages.Contents(-1)
        path = of_step(folder, step)
        if not path.is_dir():
            return messages.Contents(-1)
        files = [file for file in sorted(path.iterdir()) if file.is_file() and _IS_NAME.fullmatch(file.name)]
        status = path.stat()
        sizes = {file.name: file.stat().st_size for file in files}
        return messages.Contents(step, sizes, f"{status.st_ino}-{status.st_mtime_ns}")

    def read(self, whose: Whose, step: int, name: str, offset: int, most: int) -> bytes:
        """Read up to ``most`` bytes of a file of the checkpoint after ``step``, from ``offset`` on."""
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

    def _completed(self, draft: str) -> ReceivedCheckpoint | None:
        """Turn ``draft`` into a checkpoint if all its files have arrived, and return it."""
        from elastune.train.checkpoints.checkpoint import STATE, complete, complete_draft, step_of
        from elastune.train.checkpoints.spool import digest_of, unseal

        at, known = self._draft(draft), self._digests[draft]
        if STATE not in known and not (at / STATE).is_file():
            return None
        try:
            tree = unseal((at / STATE).read_bytes())
            files, step = _FILES.validate_python(tree["files"]), int(tree["position"]["step"])
        except (ValueError, KeyError, TypeError) as error:
            self.give_up(draft)
            raise IncompleteFile(f"the {STATE} of {draft} is invalid: {error}") from None
        if not all((at / name).is_file() for name in files):
            return None
        for name, digest in files.items():  # files that an earlier controller received are read again
            if known.setdefault(name, "") == "":
                known[name] = digest_of(at / name)
            if known[name] != digest:
                self.give_up(draft)
                raise IncompleteFile(f"the {name} of {draft} is not the one that its {STATE} names")
        if step != step_of_draft(draft):
            self.give_up(draft)
            raise IncompleteFile(f"{draft} was taken after {step} steps")
        self._done.add(draft)
        self._newest = _age(draft)
        before = complete(at.parent)
        path = complete_draft(at, at.parent, step, self._keep)
        dropped = sorted({*before} - {*complete(at.parent)})
        self._drop_older()
        return ReceivedCheckpoint(step, path, tuple(map(step_of, dropped)))

    def _drop_older(self) -> None:
        """Give up the drafts that are older than the newest checkpoint."""
        from elastune.train.checkpoints.checkpoint import DRAFT

        for path in (self._out / "checkpoints").glob(f"{DRAFT}*"):
            with suppress(ValueError):  # not the name of a draft
                if _age(path.name) < self._newest:
                    self.give_up(path.name)

    def give_up(self, draft: str) -> None:
        """Remove ``draft`` and take no more of its files."""
        self._done.add(draft)
        self._digests.pop(draft, None)
        shutil.rmtree(self._draft(draft), ignore_errors=True)


UNKNOWN_RUN = "this controller does not have that run"
LOOK_S = 5.0
CLOSE_LIMIT_S = 10.0
WHY_LIMIT = 1000  # characters


class _Run:
    """A run's inbox, which one thread at a time uses."""

    def __init__(self, inbox: CheckpointReceiver) -> None:
        self.inbox = inbox
        self.using = threading.Lock()


class FileTransferServer:
    """Receives and sends the files of runs for agents, in a thread of its own.

    Args:
        host: The address at which it listens, on any free port.
        token: The secret of the agents.
        tls: The certificate that ``token`` names, if it names one.
        ring: Called, from its thread, when ``news`` has something to return.
        notify: Called, from its thread, with a line for the user.

    Raises:
        UserError: If it cannot listen.
    """

    def __init__(
        self,
        host: str,
        token: str,
        *,
        tls: ssl.SSLContext | None = None,
        ring: Callable[[], None] = lambda: None,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._wakeup = WakeupPipe()
        try:
            self._server = ConnectionServer(
                host,
                token,
                self._wakeup,
                purpose=messages.PURPOSE,
                tls=tls,
                greeting=messages.FilesHello,
                decode=messages.FROM_AGENT.decode,
            )
        except OSError as error:
            self._wakeup.close()
            rule = "the controller must be able to listen for agents' files"
            raise UserError(rule, f"{host}: {error.strerror}", "choose another address") from None
        self.port = self._server.port
        self._ring, self._notify = ring, notify
        self._changing = threading.Lock()  # held for a moment: the controller's own thread takes it, too
        self._runs: dict[str, _Run] = {}
        self._over: set[str] = set()
        self._news: list[tuple[str, Checkpointed | CheckpointFailed]] = []
        self._receiving: dict[Connection, IncomingFile] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="files", daemon=True)
        self._thread.start()

    # -- for the controller -------------------------------------------------------------------------------------------

    def open_run(
        self,
        run: str,
        out: Path,
        parent: Path | None = None,
        keep: KeepCheckpoints = NEWEST_TWO,
        *,
        goes_on: bool = False,
    ) -> None:
        """Receive files of ``run`` from now on.

        Args:
            run: The salt of the run's token.
            out: The folder of the run.
            parent: The folder of the run whose checkpoint it begins with.
            keep: Which checkpoints stay when a new one is complete.
            goes_on: Keep the incomplete checkpoints that an earlier controller has received.
        """
        inbox = CheckpointReceiver(out, parent, keep)
        if not goes_on:
            inbox.drop_drafts()
        with self._changing:
            self._runs[run] = _Run(inbox)

    def close_run(self, run: str) -> list[str]:
        """Receive no more files of ``run``. Return a line for each incomplete checkpoint."""
        with self._changing:
            closed = self._runs.pop(run, None)
            self._over.add(run)
        if closed is None:
            return []
        with closed.using:
            missing = closed.inbox.incomplete()
            closed.inbox.drop_drafts()
            return missing

    def news(self) -> list[tuple[str, Checkpointed | CheckpointFailed]]:
        """The checkpoints that were completed, or failed, since the last call, each with its run."""
        with self._changing:
            news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._closing.set()
        self._wakeup.ring()
        self._thread.join(CLOSE_LIMIT_S)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                for event in self._server.wait(LOOK_S):
                    match event:
                        case Greeted(connection, _):
                            self._send(connection, messages.FilesWelcome())
                        case Heard(connection, message, _):
                            self._handle(connection, message)
                        case Closed(connection, _):
                            self._let_go(connection)
                        case ConnectionsRefused():
                            self._notify(refusal_line(event))
        finally:
            for connection in list(self._receiving):
                self._let_go(connection)
            self._server.close()
            self._wakeup.close()

    def _handle(self, connection: Connection, message: messages.FileRequest) -> None:
        if isinstance(message, messages.FilePiece):
            self._take(connection, message)
            return
        self._let_go(connection)
        name = "" if isinstance(message, messages.FilesHello) else message.run
        with self._changing:
            run, over = self._runs.get(name), name in self._over
        if run is None:
            self._send(connection, messages.Refused(UNKNOWN_RUN, again=not over))
            return
        with run.using:
            try:
                self._answer(connection, run.inbox, message)
            except (OSError, ValueError) as error:
                again = isinstance(message, messages.Offer)
                self._send(connection, messages.Refused(str(error)[:WHY_LIMIT], again))

    def _answer(self, connection: Connection, inbox: CheckpointReceiver, message: messages.FileRequest) -> None:
        match message:
            case messages.Offer():
                for other in [c for c, r in self._receiving.items() if _same(r.offer, message)]:
                    self._let_go(other)  # its connection is dead, though the server has not seen that yet
                received = inbox.receive(message)
                if received is None:
                    self._send(connection, messages.FileTaken())
                    return
                self._receiving[connection] = received
                self._send(connection, messages.SendFrom(received.offset))
                if received.whole:
                    self._accept(connection, inbox, received)
            case messages.Ask(whose=whose, step=step, before=before):
                self._send(connection, inbox.contents(whose, step, before))
            case messages.Fetch(whose=whose, step=step, name=name, offset=offset):
                self._send(connection, messages.piece_of(inbox.read(whose, step, name, offset, messages.PIECE_BYTES)))
            case _:
                self._send(connection, messages.Refused("that is not a request"))

    def _take(self, connection: Connection, piece: messages.FilePiece) -> None:
        received = self._receiving.get(connection)
        if received is None:  # the file was refused while more of it was on its way
            return
        with self._changing:
            run = self._runs.get(received.offer.run)
        if run is None:
            self._refuse(connection, UNKNOWN_RUN)
            return
        with run.using:
            try:
                received.take(messages.data_of(piece))
            except (IncompleteFile, ValueError) as error:
                self._refuse(connection, str(error), again=True)
            except OSError as error:
                self._miss(connection, run.inbox, received, error)
            else:
                if received.whole:
                    self._accept(connection, run.inbox, received)

    def _accept(self, connection: Connection, inbox: CheckpointReceiver, received: IncomingFile) -> None:
        try:
            arrived = inbox.accept(received)
        except IncompleteFile as error:
            self._refuse(connection, str(error), again=True)
            return
        except OSError as error:
            self._miss(connection, inbox, received, error)
            return
        self._let_go(connection)
        if isinstance(arrived, ReceivedCheckpoint):  # noted before the agent knows, which then reports a worker's end
            checkpointed = Checkpointed(arrived.step, str(arrived.path), list(arrived.dropped))
            self._note(received.offer.run, checkpointed)
        self._send(connection, messages.FileTaken())

    def _miss(self, connection: Connection, inbox: CheckpointReceiver, received: IncomingFile, error: OSError) -> None:
        """Give up a checkpoint that cannot be written, and report that."""
        draft, why = received.offer.draft, error.strerror or str(error)
        self._refuse(connection, why)
        inbox.give_up(draft)
        failed = CheckpointFailed(step_of_draft(draft), f"at the controller: {why}")
        self._note(received.offer.run, failed)

    def _note(self, run: str, record: Checkpointed | CheckpointFailed) -> None:
        with self._changing:
            self._news.append((run, record))
        self._ring()

    def _refuse(self, connection: Connection, why: str, again: bool = False) -> None:
        self._let_go(connection)
        self._send(connection, messages.Refused(why, again))

    def _let_go(self, connection: Connection) -> None:
        if (received := self._receiving.pop(connection, None)) is not None:
            received.close()

    def _send(self, connection: Connection, message: messages.FileReply) -> None:
        self._server.send([connection], messages.FROM_CONTROLLER.encode(message))


def _same(offer: messages.Offer, other: messages.Offer) -> bool:
    return (offer.run, offer.draft, offer.name) == (other.run, other.draft, other.name)
