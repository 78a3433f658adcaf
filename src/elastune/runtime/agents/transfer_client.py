"""The agent's side of file transfer: a thread that sends the files of workers and fetches the files that they need.

It survives a broken connection. The rest of a file that was sent in part goes over the next connection, from the offset
that the controller has. The next connection may lead to the next controller.
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

from elastune.core.journal import logs
from elastune.elastic.wire.contact import enter
from elastune.elastic.wire.transport import READ_BYTES, Lines, ProtocolError, dial
from elastune.runtime.agents import transfer_messages as messages
from elastune.train.checkpoints.spool import CheckpointReply, CheckpointRequest, Spool, Ticket

LOOK_S = 0.05  # between two readings of the spools
AGAIN_S = 0.5  # after a broken connection or a temporary refusal
TRIES = 3  # to send a file
DIAL_LIMIT_S = 5.0
UNREQUESTED = "it answers another request"
ANSWER_LIMIT_S = 120.0  # the controller may have much to read and to write before it answers
FETCHES = 4  # pieces that are requested ahead


class FilesLink:
    """An agent's connection to the files of its controller.

    The constructor and all methods raise ``OSError``, ``ValueError`` and ``ProtocolError``.

    Args:
        address: Where the controller listens for files ("host:port").
        token: The secret of its agents.
    """

    def __init__(self, address: str, token: str) -> None:
        self._lines, hello = Lines(), messages.FROM_AGENT.encode(messages.FilesHello())
        entered = enter(dial(address, DIAL_LIMIT_S), self._lines, token, messages.PURPOSE, hello, DIAL_LIMIT_S)
        self._socket: socket.socket = entered.connection
        self._received = list(entered.early)
        self._socket.settimeout(ANSWER_LIMIT_S)
        if not isinstance(messages.FROM_CONTROLLER.decode(entered.line), messages.FilesWelcome):
            raise ProtocolError("it does not take files")

    def send(self, message: messages.FileRequest) -> None:
        """Send ``message``."""
        self._socket.sendall(messages.FROM_AGENT.encode(message))

    def receive(self) -> messages.FileReply:
        """Wait for the next answer and return it."""
        while not self._received:
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the controller closed the connection")
            self._received += self._lines.feed(data)
        return messages.FROM_CONTROLLER.decode(self._received.pop(0))

    def close(self) -> None:
        """Close the connection; a thread that waits in ``receive`` gets an error. Idempotent."""
        with suppress(OSError):  # the other side has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@dataclass
class _Run:
    """A run with workers on this machine.

    Attributes:
        spool: The folder by which its workers leave and request files.
        leaves: No worker is left here: once the controller has its files, the spool is removed.
        not_before: The controller has refused its files for now: the earliest time of the next try.
        tries: How often each file was sent in vain, by its ticket.
        marks: The mark of each checkpoint that was fetched (``Contents.mark``).
    """

    spool: Spool
    leaves: bool = False
    not_before: float = 0.0
    tries: dict[Path, int] = field(default_factory=dict)
    marks: dict[Path, str] = field(default_factory=dict)


class FileTransferClient:
    """Moves files between the workers of one machine and the controller, in a thread of its own.

    Its methods are for one other thread, that of the agent.

    Args:
        folder: Holds a spool for each run.
        notify: Called, from the thread of transfers, with a line for the person who looks after this machine.
    """

    def __init__(self, folder: Path, notify: Callable[[str], None] = lambda line: None) -> None:
        self._folder, self._notify = folder, logs.logged(__name__, notify)
        self._changing = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._address = self._token = ""
        self.moved_at = time.monotonic()  # when a file last moved
        self._closing = threading.Event()
        self._link: FilesLink | None = None
        self._used = ("", "")  # address and token of the link
        self._thread = threading.Thread(target=self._serve, name="mover", daemon=True)
        self._thread.start()

    # -- for the agent ------------------------------------------------------------------------------------------------

    def use(self, address: str, token: str) -> None:
        """Connect to the controller's files at ``address`` ("host:port") from now on."""
        with self._changing:
            self._address, self._token = address, token
            self.moved_at = time.monotonic()

    def spool_of(self, run: str) -> Path:
        """The folder in which workers of ``run`` leave and request files."""
        return self._folder / run

    def begin(self, run: str) -> None:
        """Prepare for a new worker of ``run``. Raises ``OSError``."""
        with self._changing:
            if run not in self._runs:
                spool = Spool(self.spool_of(run))
                spool.make()
                self._runs[run] = _Run(spool)
            self._runs[run].leaves = False

    def pending(self, run: str) -> bool:
        """Whether the controller still lacks files of ``run``."""
        state = self._runs.get(run)
        return state is not None and bool(state.spool.tickets())

    def leave(self, run: str) -> None:
        """Note that no worker of ``run`` is left on this machine."""
        with self._changing:
            if run in self._runs:
                self._runs[run].leaves = True

    def close(self) -> None:
        """Stop the thread and remove all spools. Idempotent."""
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
                if self._move_all():
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

    def _move_all(self) -> bool:
        """Move all files once. Return whether any moved. Requests of workers come first, because a worker waits."""
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
            if self._runs[name].leaves:  # no worker has started meanwhile
                shutil.rmtree(self._runs.pop(name).spool.at, ignore_errors=True)

    def _connected(self) -> FilesLink:
        with self._changing:
            address, token = self._address, self._token
        if self._link is None or self._used != (address, token):
            self._drop_link()
            self._link, self._used = FilesLink(address, token), (address, token)
        return self._link

    def _ask(self, message: messages.FileRequest) -> messages.FileReply:
        link = self._connected()
        link.send(message)
        return link.receive()

    # -- to the controller --------------------------------------------------------------------------------------------

    def _push(self, name: str, run: _Run, path: Path, ticket: Ticket) -> bool:
        """Offer a file, and send the part that the controller lacks. Return whether nothing is left to do for it."""
        file = run.spool.file_of(ticket)
        if not file.is_file() or file.stat().st_size != ticket.size:  # its writer has abandoned it
            run.spool.gone(path, ticket)
            return True
        answer = self._ask(messages.Offer(name, ticket.draft, ticket.name, ticket.size, ticket.sha256))
        if sent := isinstance(answer, messages.SendFrom):
            answer = self._send(file, ticket.size, answer.offset)
            run.tries[path] = run.tries.get(path, 0) + isinstance(answer, messages.Refused)
        match answer:
            case messages.FileTaken():
                self.moved_at = time.monotonic()
            case messages.Refused(again=True) if not sent or run.tries[path] < TRIES:
                run.not_before = time.monotonic() + AGAIN_S
                return False
            case messages.Refused(why=why):
                self._notify(f"the controller does not take {ticket.name} of {ticket.draft}: {why}")
            case _:
                raise ProtocolError(UNREQUESTED)
        run.tries.pop(path, None)
        run.spool.gone(path, ticket)
        return True

    def _send(self, file: Path, size: int, offset: int) -> messages.FileReply:
        """Send ``file`` from ``offset`` on, and return the controller's answer."""
        link = self._connected()
        with file.open("rb") as content:
            content.seek(offset)
            while offset < size:
                data = content.read(min(messages.PIECE_BYTES, size - offset))
                if not data:
                    raise ValueError(f"{file.name} has become shorter")
                link.send(messages.piece_of(data))
                offset += len(data)
                self.moved_at = time.monotonic()
        return link.receive()

    # -- from the controller ------------------------------------------------------------------------------------------

    def _grant(self, name: str, run: _Run, path: Path, wish: CheckpointRequest) -> bool:
        """Fetch the files that a worker requests, and answer it. Return whether the answer is written."""
        answer = self._ask(messages.Ask(name, wish.whose, wish.step, wish.before))
        match answer:
            case messages.Refused(again=True):
                run.not_before = time.monotonic() + AGAIN_S
                return False
            case messages.Refused(why=why):
                reply = CheckpointReply(error=why)
            case messages.Contents() if wish.step is None:
                reply = CheckpointReply(answer.step)
            case messages.Contents(step=step) if step != wish.step:
                reply = CheckpointReply(error=f"the controller has no checkpoint after step {wish.step}")
            case messages.Contents(step=step):
                self._fetch(name, run, wish, answer)
                reply = CheckpointReply(step)
            case _:
                raise ProtocolError(UNREQUESTED)
        run.spool.answer(path, reply)
        return True

    def _fetch(self, name: str, run: _Run, wish: CheckpointRequest, contents: messages.Contents) -> None:
        """Fetch the files of a checkpoint, unless they were fetched for another worker of this machine."""
        folder = run.spool.checkpoints(wish.whose)
        target, coming = run.spool.checkpoint(wish.whose, contents.step), folder / f".coming-{contents.step}"
        if run.marks.get(target) == contents.mark and target.is_dir():
            return
        shutil.rmtree(folder, ignore_errors=True)  # earlier checkpoints are not needed again
        coming.mkdir(parents=True)
        for file, size in contents.files.items():
            with (coming / file).open("wb") as content:
                for data in self._parts(messages.Fetch(name, wish.whose, contents.step, file, 0), size):
                    content.write(data)
        coming.rename(target)
        run.marks[target] = contents.mark

    def _parts(self, first: messages.Fetch, size: int) -> Iterator[bytes]:
        """Yield the content of a file of ``size`` bytes, in order. Several pieces are requested ahead."""
        link, requested, received = self._connected(), 0, 0
        while received < size:
            while requested < size and requested < received + FETCHES * messages.PIECE_BYTES:
                link.send(messages.Fetch(first.run, first.whose, first.step, first.name, requested))
                requested += messages.PIECE_BYTES
            answer = link.receive()
            if not isinstance(answer, messages.FilePiece):
                raise ConnectionError(answer.why if isinstance(answer, messages.Refused) else UNREQUESTED)
            data = messages.data_of(answer)
            if len(data) != min(messages.PIECE_BYTES, size - received):
                raise ConnectionError(f"{first.name} has changed meanwhile")
            received += len(data)
            self.moved_at = time.monotonic()
            yield data
