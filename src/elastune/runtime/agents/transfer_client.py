"""The agent's side of file transfer: a thread that sends what workers wrote and fetches what they ask for.

It survives a broken connection: a file that was sent in part goes on from the offset that the controller has, over
the next connection and also to the next controller.
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elastune.elastic.wire.handshake import enter
from elastune.elastic.wire.transport import READ_BYTES, Lines, ProtocolError, dial
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
from elastune.train.checkpoints.spool import CheckpointReply, CheckpointRequest, Spool, Ticket

LOOK_S = 0.05  # between looks at the spools
AGAIN_S = 0.5  # after a connection broke, or files were refused for now
TRIES = 3  # at sending a file
DIAL_LIMIT_S = 5.0
ANSWER_LIMIT_S = 120.0  # the controller may have much to read and to write before it answers
FETCHES = 4  # asked for at a time: about so many are on their way


class FilesLink:
    """A connection to the controller's files at ``address``, let in by ``token``. Raises ``OSError``, ``ValueError``
    and ``ProtocolError``, as all its methods."""

    def __init__(self, address: str, token: str) -> None:
        self._lines, words = Lines(), transfer_messages.encode(FilesHello())
        entered = enter(dial(address, DIAL_LIMIT_S), self._lines, token, transfer_messages.PURPOSE, words, DIAL_LIMIT_S)
        self._socket: socket.socket = entered.connection
        self._received = list(entered.early)
        self._socket.settimeout(ANSWER_LIMIT_S)
        if not isinstance(transfer_messages.decode_from_controller(entered.line), FilesWelcome):
            raise ProtocolError("it does not take files")

    def send(self, message: FileRequest) -> None:
        """Send it."""
        self._socket.sendall(transfer_messages.encode(message))

    def receive(self) -> FileReply:
        """The next answer."""
        while not self._received:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the controller closed the connection")
            self._received += self._lines.feed(data)
        return transfer_messages.decode_from_controller(self._received.pop(0))

    def close(self) -> None:
        """Whoever waits on it hears so. Idempotent."""
        with suppress(OSError):  # the other side was quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@dataclass
class _Run:
    """``leaves``: no worker is left here; once its files are with the controller, nothing of it stays."""

    spool: Spool
    leaves: bool = False
    not_before: float = 0.0  # its files were refused for now
    tries: dict[Path, int] = field(default_factory=dict)  # of tickets whose files were sent in vain
    marks: dict[Path, str] = field(default_factory=dict)  # of checkpoints that were brought here


class FileTransferClient:
    """Moves files of runs, each by its spool in ``folder``. Its methods are for one other thread.

    ``notify``: is called, from the mover's thread, with a line that whoever looks after this machine should see.
    """

    def __init__(self, folder: Path, notify: Callable[[str], None] = lambda line: None) -> None:
        self._folder, self._notify = folder, notify
        self._changing = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._address = self._token = ""
        self.moved_at = time.monotonic()  # when the controller last took or gave anything
        self._closing = threading.Event()
        self._link: FilesLink | None = None
        self._used = ("", "")  # of the link
        self._thread = threading.Thread(target=self._serve, name="mover", daemon=True)
        self._thread.start()

    # -- for the agent ------------------------------------------------------------------------------------------------

    def use(self, address: str, token: str) -> None:
        """From now on the controller's files are at ``address`` ("host:port")."""
        with self._changing:
            self._address, self._token = address, token
            self.moved_at = time.monotonic()

    def spool_of(self, run: str) -> Path:
        """The folder by which workers of ``run`` pass files on."""
        return self._folder / run

    def begin(self, run: str) -> None:
        """Before a worker of ``run`` begins here. Raises ``OSError``."""
        with self._changing:
            if run not in self._runs:
                spool = Spool(self.spool_of(run))
                spool.make()
                self._runs[run] = _Run(spool)
            self._runs[run].leaves = False

    def pending(self, run: str) -> bool:
        """Whether files of ``run`` are not with the controller yet."""
        run_files = self._runs.get(run)
        return run_files is not None and bool(run_files.spool.tickets())

    def leave(self, run: str) -> None:
        """No worker of ``run`` is left here."""
        with self._changing:
            if run in self._runs:
                self._runs[run].leaves = True

    def close(self) -> None:
        """Move no more; nothing of any run stays here. Idempotent."""
        self._closing.set()
        link = self._link
        if link is not None:
            link.close()
        self._thread.join(DIAL_LIMIT_S + 1.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        reported = ""
        while not self._closing.is_set():
            pause_s = LOOK_S
            try:
                if self._round():
                    reported = ""
            except (OSError, ValueError, ProtocolError) as error:
                self._drop_link()
                pause_s, why = AGAIN_S, f"{type(error).__name__}: {error}"
                if why != reported and not self._closing.is_set():
                    reported = why
                    self._notify(f"files for the controller wait: {why}")
            self._closing.wait(pause_s)
        self._drop_link()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _round(self) -> bool:
        """Do what there is to do; whether there was anything. Wishes come first: somebody waits."""
        with self._changing:
            runs = {name: run for name, run in self._runs.items() if run.not_before <= time.monotonic()}
        moved = False
        for name, run in runs.items():
            for path, wish in run.spool.wishes():
                moved = self._grant(name, run, path, wish) or moved
        for name, run in runs.items():
            tickets = run.spool.tickets()
            for path, ticket in tickets:
                if self._closing.is_set() or run.spool.wishes() or run.not_before > time.monotonic():
                    break
                moved = self._push(name, run, path, ticket) or moved
            if run.leaves and not tickets:
                self._forget(name)
        return moved

    def _forget(self, name: str) -> None:
        with self._changing:
            if self._runs[name].leaves:  # none has come meanwhile
                shutil.rmtree(self._runs.pop(name).spool.at, ignore_errors=True)

    def _linked(self) -> FilesLink:
        with self._changing:
            address, token = self._address, self._token
        if self._link is None or self._used != (address, token):
            self._drop_link()
            self._link, self._used = FilesLink(address, token), (address, token)
        return self._link

    def _answer_to(self, message: FileRequest) -> FileReply:
        link = self._linked()
        link.send(message)
        return link.receive()

    # -- to the controller --------------------------------------------------------------------------------------------

    def _push(self, name: str, run: _Run, path: Path, ticket: Ticket) -> bool:
        """Offer a file, and send what is wanted of it; whether it is done with."""
        file = run.spool.file_of(ticket)
        if not file.is_file() or file.stat().st_size != ticket.size:  # its writer has given it up
            run.spool.gone(path, ticket)
            return True
        answer = self._answer_to(Offer(name, ticket.draft, ticket.name, ticket.size, ticket.sha256))
        if sent := isinstance(answer, SendFrom):
            answer = self._send(file, ticket.size, answer.offset)
            run.tries[path] = run.tries.get(path, 0) + isinstance(answer, Refused)
        match answer:
            case FileTaken():
                self.moved_at = time.monotonic()
            case Refused(again=True) if not sent or run.tries[path] < TRIES:
                run.not_before = time.monotonic() + AGAIN_S
                return False
            case Refused(why=why):
                self._notify(f"the controller does not take {ticket.name} of {ticket.draft}: {why}")
            case _:
                raise ProtocolError("it answers what was not asked")
        run.tries.pop(path, None)
        run.spool.gone(path, ticket)
        return True

    def _send(self, file: Path, size: int, offset: int) -> FileReply:
        """The rest of ``file``; what the controller says then."""
        link = self._linked()
        with file.open("rb") as content:
            content.seek(offset)
            while offset < size:
                data = content.read(min(PIECE_BYTES, size - offset))
                if not data:
                    raise ValueError(f"{file.name} has become shorter")
                link.send(transfer_messages.piece_of(data))
                offset += len(data)
                self.moved_at = time.monotonic()
        return link.receive()

    # -- from the controller ------------------------------------------------------------------------------------------

    def _grant(self, name: str, run: _Run, path: Path, wish: CheckpointRequest) -> bool:
        """Answer what a worker asks for, once it is here; whether that is done."""
        answer = self._answer_to(Ask(name, wish.whose, wish.step, wish.before))
        match answer:
            case Refused(again=True):
                run.not_before = time.monotonic() + AGAIN_S
                return False
            case Refused(why=why):
                granted = CheckpointReply(error=why)
            case Contents() if wish.step is None:
                granted = CheckpointReply(answer.step)
            case Contents(step=step) if step != wish.step:
                granted = CheckpointReply(error=f"the controller has no checkpoint after step {wish.step}")
            case Contents(step=step):
                self._fetch(name, run, wish, answer)
                granted = CheckpointReply(step)
            case _:
                raise ProtocolError("it answers what was not asked")
        run.spool.answer(path, granted)
        return True

    def _fetch(self, name: str, run: _Run, wish: CheckpointRequest, contents: Contents) -> None:
        """Have the files of a checkpoint here, unless another worker of this machine has asked for them before."""
        folder = run.spool.checkpoints(wish.whose)
        target, coming = run.spool.checkpoint(wish.whose, contents.step), folder / f".coming-{contents.step}"
        if run.marks.get(target) == contents.mark and target.is_dir():
            return
        shutil.rmtree(folder, ignore_errors=True)  # what was loaded before is not loaded again
        coming.mkdir(parents=True)
        for file, size in contents.files.items():
            with (coming / file).open("wb") as content:
                for data in self._parts(Fetch(name, wish.whose, contents.step, file, 0), size):
                    content.write(data)
        coming.rename(target)
        run.marks[target] = contents.mark

    def _parts(self, first: Fetch, size: int) -> Iterator[bytes]:
        """The content of a file of ``size`` bytes, in order; several parts are asked for before the first is here."""
        link, requested, got = self._linked(), 0, 0
        while got < size:
            while requested < size and requested < got + FETCHES * PIECE_BYTES:
                link.send(Fetch(first.run, first.whose, first.step, first.name, requested))
                requested += PIECE_BYTES
            answer = link.receive()
            if not isinstance(answer, FilePiece):
                raise ConnectionError(answer.why if isinstance(answer, Refused) else "it answers what was not asked")
            data = transfer_messages.data_of(answer)
            if len(data) != min(PIECE_BYTES, size - got):
                raise ConnectionError(f"{first.name} has changed meanwhile")
            got += len(data)
            self.moved_at = time.monotonic()
            yield data
