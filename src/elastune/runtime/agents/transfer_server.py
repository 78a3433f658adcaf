"""The controller's side of file transfer: a thread that receives what agents send and sends what they ask for.

An incoming file has another name until all of it is on the disk, with the size and digest that were announced. The
last file of a checkpoint makes its draft the checkpoint by a rename, as a worker does in a shared folder.
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

from elastune.core.errors import UserError
from elastune.core.journal.records import Checkpointed, CheckpointFailed, ConnectionsRefused
from elastune.elastic.wire.server import Closed, Connection, ConnectionServer, Greeted, Heard, refusal_line
from elastune.elastic.wire.transport import WakeupPipe
from elastune.runtime.agents import transfer_messages
from elastune.runtime.agents.transfer_messages import (
    PIECE_BYTES,
    Ask,
    Contents,
    Fetch,
    FilePiece,
    FileReply,
    FileRequest,
    FilesHello,
    FilesWelcome,
    FileTaken,
    Offer,
    Refused,
    SendFrom,
)
from elastune.train.checkpoints.spool import NAME_PATTERN, Digest, FileName

if TYPE_CHECKING:
    from elastune.train.checkpoints.spool import Whose


# A file keeps a temporary name until all of it is on the disk with the announced size and digest. The last file of a
# checkpoint turns its draft into the checkpoint by a rename, as a worker does in a shared folder.

PARTIAL = ".partial"  # the end of the name of a file that is not whole
_IS_NAME = re.compile(NAME_PATTERN)
_FILES = TypeAdapter(dict[FileName, Digest])


class IncompleteFile(Exception):
    """What came is not what was offered; why, in one line."""


class IncomingFile:
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
        """Give it its name, once it is on the disk. Raises ``IncompleteFile`` where its digest is another one."""
        if self._hash.hexdigest() != self.offer.sha256:
            self._begin_again()
            raise IncompleteFile(f"the bytes of {self.offer.name} do not have the digest that was offered")
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
class ReceivedCheckpoint:
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


class CheckpointReceiver:
    """The files of one run, whose folder is ``out``; ``parent``: that of the run which it begins with.

    One thread uses it. Every method may raise ``OSError``.
    """

    # Imported when needed: checkpoints need torch, which takes long to come.

    def __init__(self, out: Path, parent: Path | None = None) -> None:
        self._out, self._parent = out, parent
        self._digests: dict[str, dict[str, str]] = {}  # by draft and name, of files that were verified here
        self._done: set[str] = set()  # drafts that are checkpoints now, or that nothing becomes of any more
        self._newest = (-1, -1, -1)  # the age of what became one last: nothing becomes of drafts before it

    def receive(self, offer: Offer) -> IncomingFile | None:
        """To be filled with what was offered; None where it is here already, or nobody has use for it."""
        digest = self._digests.get(offer.draft, {}).get(offer.name)
        if self._is_over(offer.draft) or digest == offer.sha256:
            return None
        return IncomingFile(offer, self._draft(offer.draft))

    def accept(self, received: IncomingFile) -> ReceivedCheckpoint | None:
        """The file has come; the checkpoint that it completes.

        Raises ``IncompleteFile`` where it is not what was offered, or belongs to no checkpoint.
        """
        if self._is_over(received.offer.draft):
            return None
        received.finish()
        self._digests.setdefault(received.offer.draft, {})[received.offer.name] = received.offer.sha256
        return self._completed(received.offer.draft)

    def incomplete(self) -> list[str]:
        """Describe the checkpoints of which a file never came."""
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
            steps = [candidate for candidate in steps if before is None or candidate < before]
            return Contents(steps[-1]) if steps else Contents(-1)
        path = of_step(folder, step)
        if not path.is_dir():
            return Contents(-1)
        files = [file for file in sorted(path.iterdir()) if file.is_file() and _IS_NAME.fullmatch(file.name)]
        status = path.stat()
        sizes = {file.name: file.stat().st_size for file in files}
        return Contents(step, sizes, f"{status.st_ino}-{status.st_mtime_ns}")

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

    def _completed(self, draft: str) -> ReceivedCheckpoint | None:
        """What ``draft`` has become, if all of it is here."""
        from elastune.train.checkpoints.checkpoint import STATE, complete_draft
        from elastune.train.checkpoints.spool import digest_of, unseal

        at, known = self._draft(draft), self._digests[draft]
        if STATE not in known and not (at / STATE).is_file():
            return None
        try:
            tree = unseal((at / STATE).read_bytes())
            files, step = _FILES.validate_python(tree["files"]), int(tree["position"]["step"])
        except (ValueError, KeyError, TypeError) as error:
            self.give_up(draft)
            raise IncompleteFile(f"the {STATE} of {draft} is none: {error}") from None
        if not all((at / name).is_file() for name in files):
            return None
        for name, digest in files.items():  # what a controller before this one has taken is read again
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
        path = complete_draft(at, at.parent, step)
        self._drop_older()
        return ReceivedCheckpoint(step, path)

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
    """Listens on a free port of ``host`` for agents with ``token``.

    ``ring``: is called, from its thread, when there is ``news``; ``notify``: with what is to be told, likewise. Raises
    ``UserError`` where it cannot listen.
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
        self._bell = WakeupPipe()
        try:
            self._hub = ConnectionServer(
                host,
                token,
                self._bell,
                purpose=transfer_messages.PURPOSE,
                tls=tls,
                greeting=FilesHello,
                decode=transfer_messages.decode_from_agent,
            )
        except OSError as error:
            self._bell.close()
            rule = "the controller must be able to listen for agents' files"
            raise UserError(rule, f"{host}: {error.strerror}", "choose another address") from None
        self.port = self._hub.port
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

    def open_run(self, run: str, out: Path, parent: Path | None = None, *, goes_on: bool = False) -> None:
        """Take files of ``run`` into the folder ``out``. ``parent``: of the run that it begins with.

        ``goes_on``: what came of it for a controller before this one is still wanted.
        """
        inbox = CheckpointReceiver(out, parent)
        if not goes_on:
            inbox.drop_drafts()
        with self._changing:
            self._runs[run] = _Run(inbox)

    def close_run(self, run: str) -> list[str]:
        """Accept no more files of this run. Returns a line for each checkpoint that is not complete."""
        with self._changing:
            registered = self._runs.pop(run, None)
            self._over.add(run)
        if registered is None:
            return []
        with registered.using:
            missing = registered.inbox.incomplete()
            registered.inbox.drop_drafts()
            return missing

    def news(self) -> list[tuple[str, Checkpointed | CheckpointFailed]]:
        """What became of checkpoints since the last call, each with its run."""
        with self._changing:
            events, self._news = self._news, []
        return events

    def close(self) -> None:
        """Idempotent."""
        self._closing.set()
        self._bell.ring()
        self._thread.join(CLOSE_LIMIT_S)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                for event in self._hub.wait(LOOK_S):
                    match event:
                        case Greeted(connection, _):
                            self._send(connection, FilesWelcome())
                        case Heard(connection, message, _):
                            self._handle(connection, message)
                        case Closed(connection, _):
                            self._let_go(connection)
                        case ConnectionsRefused():
                            self._notify(refusal_line(event))
        finally:
            for connection in list(self._receiving):
                self._let_go(connection)
            self._hub.close()
            self._bell.close()

    def _handle(self, connection: Connection, message: FileRequest) -> None:
        if isinstance(message, FilePiece):
            self._take(connection, message)
            return
        self._let_go(connection)
        run = "" if isinstance(message, FilesHello) else message.run
        with self._changing:
            registered, over = self._runs.get(run), run in self._over
        if registered is None:
            self._send(connection, Refused(UNKNOWN_RUN, again=not over))
            return
        with registered.using:
            try:
                self._answer(connection, registered.inbox, message)
            except (OSError, ValueError) as error:
                self._send(connection, Refused(str(error)[:WHY_LIMIT], again=isinstance(message, Offer)))

    def _answer(self, connection: Connection, inbox: CheckpointReceiver, message: FileRequest) -> None:
        match message:
            case Offer():
                for other in [c for c, r in self._receiving.items() if _same(r.offer, message)]:
                    self._let_go(other)  # of a connection that is about to be found dead
                received = inbox.receive(message)
                if received is None:
                    self._send(connection, FileTaken())
                    return
                self._receiving[connection] = received
                self._send(connection, SendFrom(received.offset))
                if received.whole:
                    self._accept(connection, inbox, received)
            case Ask(whose=whose, step=step, before=before):
                self._send(connection, inbox.contents(whose, step, before))
            case Fetch(whose=whose, step=step, name=name, offset=offset):
                self._send(connection, transfer_messages.piece_of(inbox.read(whose, step, name, offset, PIECE_BYTES)))
            case _:
                self._send(connection, Refused("that is no request"))

    def _take(self, connection: Connection, piece: FilePiece) -> None:
        received = self._receiving.get(connection)
        if received is None:  # it was refused, and more of it was on its way
            return
        with self._changing:
            registered = self._runs.get(received.offer.run)
        if registered is None:
            self._refuse(connection, UNKNOWN_RUN)
            return
        with registered.using:
            try:
                received.take(transfer_messages.data_of(piece))
            except (IncompleteFile, ValueError) as error:
                self._refuse(connection, str(error), again=True)
            except OSError as error:
                self._miss(connection, registered.inbox, received, error)
            else:
                if received.whole:
                    self._accept(connection, registered.inbox, received)

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
        if isinstance(
            arrived, ReceivedCheckpoint
        ):  # before the agent hears of it: it may have nothing more to wait for then
            self._note(received.offer.run, Checkpointed(arrived.step, str(arrived.path)))
        self._send(connection, FileTaken())

    def _miss(self, connection: Connection, inbox: CheckpointReceiver, received: IncomingFile, error: OSError) -> None:
        """Give up this checkpoint, which cannot be written, and report that."""
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
        self._send(connection, Refused(why, again))

    def _let_go(self, connection: Connection) -> None:
        if (received := self._receiving.pop(connection, None)) is not None:
            received.close()

    def _send(self, connection: Connection, message: FileReply) -> None:
        self._hub.send([connection], transfer_messages.encode(message))


def _same(offer: Offer, other: Offer) -> bool:
    return (offer.run, offer.draft, offer.name) == (other.run, other.draft, other.name)
