"""The coordinator after one that has died: its first workers are those that come back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace

from elastune.elastic.coordinator.adoption import Adoption, can_go_on, known, take_over
from elastune.elastic.coordinator.connection import Connection
from elastune.elastic.coordinator.coordinator import CLOSE_LIMIT_S, Coordinator
from elastune.elastic.coordinator.from_controller import CrewBounds, Entrance, Lookups, Timeouts
from elastune.elastic.protocol import messages
from elastune.elastic.protocol.messages import Event, Exit, Hello, InstallView, Message, Returned, RoundTaken


class AdoptingCoordinator(Coordinator):
    """A ``Coordinator`` that starts no workers: until ``adopt`` it takes in those that have outlived the one before it,
    at the same address and with the same token. They train on meanwhile; nothing is decided.
    """

    def __init__(self, bounds: CrewBounds, timeouts: Timeouts, entrance: Entrance, lookups: Lookups) -> None:
        self._adoption: Adoption | None = Adoption()
        self._unheard: list[tuple[Connection, Exit | RoundTaken, int]] = []  # said before the adoption
        super().__init__((), bounds, timeouts, entrance, lookups)

    @property
    def back(self) -> Mapping[int, Returned]:
        """Who has come back. Any thread may ask."""
        return {} if (adoption := self._adoption) is None else adoption.back

    def adopt(self, processes: Collection[int], next_worker: int) -> Mapping[int, Returned] | None:
        """Go on with those that are back, of ``processes``; who that is.

        None where they hold no state to go on with: all are told to end then, those too that come later.

        Who is not among ``processes`` cannot be ended from here, and is told to end itself. No worker below
        ``next_worker`` is ever started again.
        """
        done: Future[Mapping[int, Returned] | None] = Future()
        self._call(lambda: done.set_result(self._adopt(processes, next_worker)))
        return done.result(CLOSE_LIMIT_S)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _adopt(self, processes: Collection[int], next_worker: int) -> Mapping[int, Returned] | None:
        adoption = self._adoption
        assert adoption is not None
        back = known(processes, adoption.back)
        if not can_go_on(back):
            self._say(self._peers.connections(), messages.Bye())
            self._adoption, self._over = None, True
            return None
        for worker in set(adoption.back) - set(back):
            self._say_to(worker, messages.Bye())
            self._lose(worker, "its process is out of reach")
            self._roll.strike(worker)
        self._adoption = None
        self._state, instructions = take_over(replace(self._state, next_worker=next_worker), back, adoption.hosts)
        if (view := self._state.current) is not None and view.number:
            self._newest, self._untold = view, None
            self._say(self._peers.connections(), InstallView(view))
        for instruction in instructions:
            self._obey(instruction)
        if any(returned.stops for returned in back.values()):
            self._ask_to_stop()
        for asker, event in adoption.wishes:
            self._feed(asker, event)
        for connection, message, size in self._unheard:
            if not connection.dead:
                super()._hear(connection, message, size)
        return back

    def _greet(self, connection: Connection, hello: Hello) -> None:
        worker = hello.worker
        if self._adoption is None or worker is None or not hello.returns or worker in self._peers:
            super()._greet(connection, hello)
            return
        connection.worker = worker
        self._roll.add([worker])
        self._let_in(connection, worker, hello)

    def _hear(self, connection: Connection, message: Message, size: int) -> None:
        if isinstance(message, Returned) and self._adoption is not None and connection.worker is not None:
            peer = self._peers.get(connection.worker)
            self._adoption.comes(connection.worker, peer.host if peer is not None else "", message)
            self._board.begin(message.heard.number if message.heard is not None else 0)
            self._out.nudge()
        elif isinstance(message, Exit | RoundTaken) and self._adoption is not None:
            self._unheard.append((connection, message, size))  # it has to be taken over first
        else:
            super()._hear(connection, message, size)

    def _part(self, connection: Connection, why: str) -> None:
        if self._adoption is None:
            super()._part(connection, why)
        elif connection.worker is not None:
            self._lose(connection.worker, why)

    def _lose(self, worker: int, why: str) -> None:
        if self._adoption is None:
            super()._lose(worker, why)
        elif connection := self._peers.remove(worker):  # it may come again
            self._hub.end(connection)
            self._adoption.goes(worker)

    def _feed(self, worker: int | None, event: Event) -> None:
        if self._adoption is None:
            super()._feed(worker, event)
        else:
            self._adoption.hears(worker, event)
