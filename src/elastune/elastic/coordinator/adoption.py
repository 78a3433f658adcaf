"""Workers that have outlived their controller go on under the next one: their reports become its state.

Nothing is read from files. The newest view that any worker knows is the one that counts. An older view is over. A
view that only lost workers knew never came into force, since all its members have to enter it. If all members run
the newest view, they train on. Otherwise it counts as broken: the members that hold the state meet in the next view
and complete or repeat their step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from elastune.elastic.coordinator import machine
from elastune.elastic.coordinator.controller_interface import ListenOptions, Timeouts, WorkerBounds, WorkerLookups
from elastune.elastic.coordinator.coordinator import CLOSE_LIMIT_S, Coordinator
from elastune.elastic.coordinator.machine import Confirm, Instruction, Membership, Outcome, Release, Stage, Worker
from elastune.elastic.wire import messages
from elastune.elastic.wire.messages import (
    Broken,
    Done,
    Event,
    Exit,
    Hello,
    InstallView,
    LayersFound,
    Message,
    Noticed,
    Ready,
    ReshapeAsked,
    ResizeAsked,
    Returned,
    RoundTaken,
    Running,
)
from elastune.elastic.wire.server import Connection
from elastune.elastic.wire.view import View

WHY = "its controller was lost"


@dataclass
class Adoption:
    """The workers that have come back so far, and the newest state of each.

    The coordinator's thread fills it; other threads may only read ``back``.

    Attributes:
        back: The state of each worker that is connected again, by its number.
        hosts: The host of each of these workers.
        wishes: Requests for another size or mesh, in order: the coordinator answers them after the adoption.
        noticed_s: The notice that an agent reported for a worker before that worker came back.
    """

    back: dict[int, Returned] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    wishes: list[tuple[int | None, Event]] = field(default_factory=list)
    noticed_s: dict[int, float] = field(default_factory=dict)

    def comes(self, worker: int, host: str, returned: Returned) -> None:
        """Note that ``worker`` is back, on ``host``."""
        self.hosts[worker] = host
        if worker in self.noticed_s:
            returned = replace(returned, noticed_s=self.noticed_s[worker])
        self.back = {**self.back, worker: returned}

    def goes(self, worker: int) -> None:
        """Note that ``worker`` has disconnected again."""
        self.back = {number: returned for number, returned in self.back.items() if number != worker}

    def note_event(self, worker: int | None, event: Event) -> None:
        """Note an ``event`` that arrived before the adoption."""
        if isinstance(event, ResizeAsked | ReshapeAsked):
            self.wishes.append((worker, event))
        elif isinstance(event, Noticed) and worker is not None and worker not in self.back:
            self.noticed_s[worker] = event.seconds
        elif worker is not None and worker in self.back:
            self.back = {**self.back, worker: _updated(self.back[worker], event)}


def _updated(state: Returned, event: Event) -> Returned:
    """The ``state`` of a worker that has sent ``event`` since it came back."""
    match event:
        case Ready():
            return replace(state, ready=True)
        case Running(view, step):
            return replace(state, version=view, step=step)
        case LayersFound(layers):
            return replace(state, layers=layers)
        case Broken(view):
            return replace(state, broken=view)
        case Done():
            return replace(state, done=True)
        case Noticed(seconds):
            return replace(state, noticed_s=seconds)
    return state


def newest_view(back: Mapping[int, Returned]) -> View | None:
    """The newest view that any of the workers knows."""
    return max(
        (r.latest_view for r in back.values() if r.latest_view is not None), key=lambda view: view.number, default=None
    )


def awaited(back: Mapping[int, Returned]) -> frozenset[int]:
    """The members of the newest view that are not back yet."""
    view = newest_view(back)
    return frozenset() if view is None else frozenset(view.members) - frozenset(back)


def can_go_on(back: Mapping[int, Returned]) -> bool:
    """Whether the workers that are back hold a state to go on with."""
    view = newest_view(back)
    if view is None:
        return False
    return any(_is_member(worker, returned, view, back) for worker, returned in back.items() if worker in view.members)


def take_over(empty: Membership, back: Mapping[int, Returned], hosts: Mapping[int, str]) -> Outcome:
    """Make the workers that are ``back`` the workers of a run.

    Workers that the others have left behind are released.

    Args:
        empty: The state of a run that has no workers yet.
        back: Each worker that is back, with its state; ``can_go_on`` is true of them.
        hosts: The host of each worker.

    Returns:
        The state of the run, and the instructions to the coordinator.
    """
    view = newest_view(back)
    assert view is not None
    whole, begins = _is_whole(view, back), _begins(view, back)
    # If the newest view never came into force, only the members of the view before it matter.
    current = view if whole else None if begins else replace(view, number=0)
    state = replace(
        empty,
        workers=tuple(_worker(number, hosts.get(number, ""), view, back) for number in sorted(back)),
        target=min(max(len(view.members), empty.low), empty.high),
        next_worker=max(empty.next_worker, 1 + max(back), 1 + max(view.members)),
        next_view=view.number + 1,
        current=current,
        proposed=view if begins else None,
        max_first_step=max(returned.step for returned in back.values()),
        stage=_stage(back),
    )
    for returned in back.values():
        state = replace(state, meshes=state.meshes.widened(returned.layers))
    instructions: list[Instruction] = []
    if whole:
        instructions += [Confirm(joiner, view.number) for joiner in view.joiners]
        for worker in [worker.number for worker in state.members if worker.number not in view.members]:
            state = state.without(worker)
            instructions.append(Release(worker))
    return machine.derive(state, tuple(instructions), not whole, WHY)


def _is_whole(view: View, back: Mapping[int, Returned]) -> bool:
    """Whether all members of ``view`` train under it."""
    return all(
        (returned := back.get(worker)) is not None and returned.version == view.number and returned.broken < view.number
        for worker in view.members
    )


def _begins(view: View, back: Mapping[int, Returned]) -> bool:
    """Whether ``view`` is a run's first view that not all members have entered: no step can have been taken in it."""
    return view.initial and any(back[worker].version != view.number for worker in view.members if worker in back)


def _is_member(number: int, returned: Returned, view: View, back: Mapping[int, Returned]) -> bool:
    """Whether this worker holds the run's state, or is to begin with the others of ``view``."""
    if number in view.members and (_is_whole(view, back) or _begins(view, back)):
        return True
    return returned.member and not _begins(view, back)


def _worker(number: int, host: str, view: View, back: Mapping[int, Returned]) -> Worker:
    returned, member = back[number], _is_member(number, back[number], view, back)
    return Worker(
        number,
        phase="member" if member else "ready" if returned.ready else "connected",
        preempted=returned.noticed_s is not None,
        done=returned.done and member,
        excluded=member and number not in view.members,
        host=host,
    )


def _stage(back: Mapping[int, Returned]) -> Stage:
    if any(returned.done for returned in back.values()):
        return "finishing"
    return "stopping" if any(returned.stops for returned in back.values()) else "open"


def known(processes: Collection[int], back: Mapping[int, Returned]) -> dict[int, Returned]:
    """Of the workers that are ``back``, those whose process this controller can end."""
    return {worker: returned for worker, returned in back.items() if worker in processes}


class AdoptingCoordinator(Coordinator):
    """A coordinator for workers that have outlived the coordinator before it. It starts no workers itself.

    It listens at the same address, with the same token. Until ``adopt`` it only collects the workers that come back:
    they train on meanwhile, and nothing is decided.
    """

    def __init__(
        self,
        bounds: WorkerBounds,
        timeouts: Timeouts,
        entrance: ListenOptions,
        lookups: WorkerLookups,
        run: str = "",
    ) -> None:
        self._adoption: Adoption | None = Adoption()
        self._deferred: list[tuple[Connection, Exit | RoundTaken, int]] = []  # sent before the adoption
        super().__init__((), bounds, timeouts, entrance, lookups, run)

    @property
    def back(self) -> Mapping[int, Returned]:
        """The workers that have come back, with the state of each. Any thread may read it."""
        return {} if (adoption := self._adoption) is None else adoption.back

    def adopt(self, processes: Collection[int], next_worker: int) -> Mapping[int, Returned] | None:
        """Go on with the workers that are back.

        Args:
            processes: The workers whose process this controller can end. Any other worker has to end itself.
            next_worker: No worker with a smaller number is ever started again.

        Returns:
            The adopted workers, with the state of each. None if they hold no state to go on with: then the coordinator
            tells all workers to end, also those that come back later.
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
            self._send(self._peers.connections(), messages.Bye())
            self._adoption, self._over = None, True
            return None
        for worker in set(adoption.back) - set(back):
            self._send_to(worker, messages.Bye())
            self._lose(worker, "its process is out of reach")
            self._registry.mark_gone(worker)
        self._adoption = None
        self._state, instructions = take_over(replace(self._state, next_worker=next_worker), back, adoption.hosts)
        if (view := self._state.current) is not None and view.number:
            self._newest, self._unsent = view, None
            self._send(self._peers.connections(), InstallView(view))
        for instruction in instructions:
            self._obey(instruction)
        if any(returned.stops for returned in back.values()):
            self._ask_to_stop()
        for worker, returned in back.items():
            if returned.noticed_s is not None:
                self._await_notice(worker, returned.noticed_s)
        for asker, event in adoption.wishes:
            self._feed(asker, event)
        for connection, message, size in self._deferred:
            if not connection.dead:
                super()._handle(connection, message, size)
        return back

    def _greet(self, connection: Connection, hello: Hello) -> None:
        worker = hello.worker
        if self._adoption is None or worker is None or not hello.returns or worker in self._peers:
            super()._greet(connection, hello)
            return
        connection.worker = worker
        self._registry.add([worker])
        self._let_in(connection, worker, hello)

    def _handle(self, connection: Connection, message: Message, size: int) -> None:
        if isinstance(message, Returned) and self._adoption is not None and connection.worker is not None:
            peer = self._peers.get(connection.worker)
            self._adoption.comes(connection.worker, peer.host if peer is not None else "", message)
            self._board.begin(message.latest_view.number if message.latest_view is not None else 0)
            self._out.nudge()
        elif isinstance(message, Exit | RoundTaken) and self._adoption is not None:
            self._deferred.append((connection, message, size))  # the worker has to be adopted first
        else:
            super()._handle(connection, message, size)

    def _part(self, connection: Connection, why: str) -> None:
        if self._adoption is None:
            super()._part(connection, why)
        elif connection.worker is not None:
            self._lose(connection.worker, why)

    def _lose(self, worker: int, why: str) -> None:
        if self._adoption is None:
            super()._lose(worker, why)
        elif connection := self._peers.remove(worker):  # the worker may come back again
            self._hub.end(connection)
            self._adoption.goes(worker)

    def _feed(self, worker: int | None, event: Event) -> None:
        if self._adoption is None:
            super()._feed(worker, event)
        else:
            self._adoption.note_event(worker, event)
