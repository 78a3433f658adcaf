"""The controller's end of the files' connections: a thread that takes what agents push, and sends what they ask for."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from elastune.cluster.transfer import messages
from elastune.cluster.transfer.inbox import Arrived, Inbox, NotWhole, Receiving, step_of_draft
from elastune.cluster.transfer.messages import (
    PIECE_BYTES,
    Ask,
    Fetch,
    FilePiece,
    FilesHello,
    FilesWelcome,
    FileTaken,
    Offer,
    Refused,
    SaidOfFiles,
    SendFrom,
    ToldOfFiles,
)
from elastune.core.errors import UserError
from elastune.elastic.coordinator.connection import Closed, Connection, Greeted, Heard
from elastune.elastic.coordinator.connections import ConnectionServer
from elastune.elastic.coordinator.refusals import refusal_line
from elastune.elastic.protocol.transport import WakeupPipe
from elastune.journal.records import Checkpointed, CheckpointFailed, NotLetIn

UNKNOWN_RUN = "this controller does not have that run"
LOOK_S = 5.0
CLOSE_LIMIT_S = 10.0
WHY_LIMIT = 1000  # characters


class _Run:
    """A run's inbox, which one thread at a time uses."""

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self.using = threading.Lock()


class FileServer:
    """Listens on a free port of ``host`` for agents with ``token``.

    ``ring``: is called, from its thread, when there is ``news``; ``tell``: with what is to be told, likewise. Raises
    ``UserError`` where it cannot listen.
    """

    def __init__(
        self,
        host: str,
        token: str,
        *,
        tls: ssl.SSLContext | None = None,
        ring: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._bell = WakeupPipe()
        try:
            self._hub = ConnectionServer(
                host,
                token,
                self._bell,
                purpose=messages.PURPOSE,
                tls=tls,
                greeting=FilesHello,
                decode=messages.decode_said,
            )
        except OSError as error:
            self._bell.close()
            rule = "the controller must be able to listen for agents' files"
            raise UserError(rule, f"{host}: {error.strerror}", "choose another address") from None
        self.port = self._hub.port
        self._ring, self._tell = ring, tell
        self._changing = threading.Lock()  # held for a moment: the controller's own thread takes it, too
        self._runs: dict[str, _Run] = {}
        self._over: set[str] = set()
        self._news: list[tuple[str, Checkpointed | CheckpointFailed]] = []
        self._receiving: dict[Connection, Receiving] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="files", daemon=True)
        self._thread.start()

    # -- for the controller -------------------------------------------------------------------------------------------

    def open_run(self, run: str, out: Path, parent: Path | None = None, *, goes_on: bool = False) -> None:
        """Take files of ``run`` into the folder ``out``. ``parent``: of the run that it begins with.

        ``goes_on``: what came of it for a controller before this one is still wanted.
        """
        inbox = Inbox(out, parent)
        if not goes_on:
            inbox.drop_drafts()
        with self._changing:
            self._runs[run] = _Run(inbox)

    def close_run(self, run: str) -> list[str]:
        """Take no more of it; what is to be told of checkpoints that are not complete."""
        with self._changing:
            own = self._runs.pop(run, None)
            self._over.add(run)
        if own is None:
            return []
        with own.using:
            missing = own.inbox.incomplete()
            own.inbox.drop_drafts()
            return missing

    def news(self) -> list[tuple[str, Checkpointed | CheckpointFailed]]:
        """What became of checkpoints since the last call, each with its run."""
        with self._changing:
            found, self._news = self._news, []
        return found

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
                            self._say(connection, FilesWelcome())
                        case Heard(connection, message, _):
                            self._hear(connection, message)
                        case Closed(connection, _):
                            self._let_go(connection)
                        case NotLetIn():
                            self._tell(refusal_line(event))
        finally:
            for connection in list(self._receiving):
                self._let_go(connection)
            self._hub.close()
            self._bell.close()

    def _hear(self, connection: Connection, message: SaidOfFiles) -> None:
        if isinstance(message, FilePiece):
            self._take(connection, message)
            return
        self._let_go(connection)
        asked = "" if isinstance(message, FilesHello) else message.run
        with self._changing:
            own, over = self._runs.get(asked), asked in self._over
        if own is None:
            self._say(connection, Refused(UNKNOWN_RUN, again=not over))
            return
        with own.using:
            try:
                self._answer(connection, own.inbox, message)
            except (OSError, ValueError) as error:
                self._say(connection, Refused(str(error)[:WHY_LIMIT], again=isinstance(message, Offer)))

    def _answer(self, connection: Connection, inbox: Inbox, message: SaidOfFiles) -> None:
        match message:
            case Offer():
                for other in [c for c, r in self._receiving.items() if _same(r.offer, message)]:
                    self._let_go(other)  # of a connection that is about to be found dead
                received = inbox.receive(message)
                if received is None:
                    self._say(connection, FileTaken())
                    return
                self._receiving[connection] = received
                self._say(connection, SendFrom(received.offset))
                if received.whole:
                    self._accept(connection, inbox, received)
            case Ask(whose=whose, step=step, before=before):
                self._say(connection, inbox.contents(whose, step, before))
            case Fetch(whose=whose, step=step, name=name, offset=offset):
                self._say(connection, messages.piece_of(inbox.read(whose, step, name, offset, PIECE_BYTES)))
            case _:
                self._say(connection, Refused("that is no request"))

    def _take(self, connection: Connection, piece: FilePiece) -> None:
        received = self._receiving.get(connection)
        if received is None:  # it was refused, and more of it was on its way
            return
        with self._changing:
            own = self._runs.get(received.offer.run)
        if own is None:
            self._refuse(connection, UNKNOWN_RUN)
            return
        with own.using:
            try:
                received.take(messages.data_of(piece))
            except (NotWhole, ValueError) as error:
                self._refuse(connection, str(error), again=True)
            except OSError as error:
                self._miss(connection, own.inbox, received, error)
            else:
                if received.whole:
                    self._accept(connection, own.inbox, received)

    def _accept(self, connection: Connection, inbox: Inbox, received: Receiving) -> None:
        try:
            arrived = inbox.accept(received)
        except NotWhole as error:
            self._refuse(connection, str(error), again=True)
            return
        except OSError as error:
            self._miss(connection, inbox, received, error)
            return
        self._let_go(connection)
        if isinstance(arrived, Arrived):  # before the agent hears of it: it may have nothing more to wait for then
            self._note(received.offer.run, Checkpointed(arrived.step, str(arrived.path)))
        self._say(connection, FileTaken())

    def _miss(self, connection: Connection, inbox: Inbox, received: Receiving, error: OSError) -> None:
        """There is no room here: nothing becomes of this checkpoint, and that is told."""
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
        self._say(connection, Refused(why, again))

    def _let_go(self, connection: Connection) -> None:
        if (received := self._receiving.pop(connection, None)) is not None:
            received.close()

    def _say(self, connection: Connection, message: ToldOfFiles) -> None:
        self._hub.send([connection], messages.encode(message))


def _same(offer: Offer, other: Offer) -> bool:
    return (offer.run, offer.draft, offer.name) == (other.run, other.draft, other.name)
