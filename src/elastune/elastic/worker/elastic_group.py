"""A group whose workers come, go and die."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn, cast

import torch

from elastune.comm.comms import Comms, GroupFactory, form_comms, replicated
from elastune.comm.group import Group, GroupBroken, drop
from elastune.core.layout import Unrecoverable
from elastune.core.mesh import Mesh
from elastune.elastic.protocol.messages import Doing
from elastune.elastic.protocol.view import View
from elastune.elastic.worker.client import CoordinatorClient, RunOver
from elastune.elastic.worker.commit_log import CommitLog
from elastune.elastic.worker.group import Leave, Rewind, WorkerGroup
from elastune.elastic.worker.reconcile import RecoveryPlan
from elastune.elastic.worker.state_owner import StateOwner
from elastune.elastic.worker.store import MemberStore

# Nothing has to end by waiting: the coordinator notices who is lost, and who waited so long begins again. It bounds how
# long gloo keeps threads and memory of an operation that it forgot when its group was given up.
LONG_S = 3600.0
POLL_S = 0.001


class ElasticWorkerGroup(WorkerGroup):
    """Follows the views that a coordinator installs. Used by the main thread alone.

    ``synchronised`` is False while this worker builds what it will train: as a joiner, or on its way back to where it
    was rewound to; and for the rest of a batch whose step was lost.
    """

    elastic = True

    owner: StateOwner  # the current session's

    def __init__(self, client: CoordinatorClient, factory: GroupFactory) -> None:
        self._client = client
        self._factory = factory
        self._store = MemberStore(client)
        super().__init__(self._alone())
        self.synchronised = False
        self._now: View | None = None
        self._first: View | None = None
        self._agreed: View | None = None
        self._voted: View | None = None
        self._over: Group | None = None  # that state is being handed over in
        client.on_break = self._break
        client.where = lambda: ", ".join(filter(None, [self.where(), self.left]))

    # -- becoming a member --------------------------------------------------------------------------------------------

    @property
    def worker(self) -> int:
        return self._client.worker

    @property
    def view(self) -> int:
        return 0 if self._now is None else self._now.number

    @property
    def rank(self) -> int:
        return self._client.worker if self._now is None else self.group.rank

    @property
    def size(self) -> int:
        return self._client.worker + 1 if self._now is None else self.group.size

    @property
    def members(self) -> tuple[int, ...]:
        return () if self._now is None else self._now.members

    @property
    def planned(self) -> bool:
        return self._now is not None and self._now.scheduled

    @property
    def awaiting_first_view(self) -> bool:
        """Whether this worker is to ``start``: it holds no state, and no other worker has any for it."""
        return self._now is None and self._first is not None

    def start(self) -> None:
        """Enter the view that begins with this worker."""
        assert self._first is not None
        view, self._first = self._first, None
        self._log, self.synchronised = CommitLog(), True
        self._enter(view)

    def join(self) -> None:
        """As a joiner: say that all is built, wait to be taken in, take over the members' state.

        Raises ``Rewind`` where there are no members left to take it from: all begin again.
        """
        if self._now is not None:
            return
        self._client.ready()
        seen = 0
        while True:
            view = self._await(seen)
            seen = view.number
            if self.worker not in view.members:
                continue
            if view.initial:
                self._first, self.restart_from_checkpoint = view, view.number > 1
                raise Rewind
            try:
                plan = self._form(view, joins=True)
            except GroupBroken as error:
                self._client.broken(view.number, str(error))
            else:
                self._client.running(view.number, self.owner.step, self.owner.layers)
                if self._is_confirmed(view):
                    if plan.rewind_to is not None:
                        self._go_back(plan.rewind_to, plan.rewinds)
                    return
            self._let_go()
            self._now = None

    def _is_confirmed(self, view: View) -> bool:
        try:
            return self._client.await_confirmed(view.number)
        except RunOver:
            raise Leave from None

    # -- operations ---------------------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        return self.synchronised and self._now is not None and self._client.superseded(self._now.number)

    def gather_tensors(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        """As ``WorkerGroup.gather_tensors``; done again with the survivors if a worker was lost."""
        self._client.refuse_fork()
        while self.synchronised:
            self.say("gathering", self.owner.step, mine.nbytes, what)
            self.gathered_on = self.comms.mesh  # where others complete it they do so as they stand now
            try:
                rows = self._gather_alike(mine, what)
                self._log.gathered(rows)
            except GroupBroken as error:
                if not self.recover(error):
                    continue  # unless this is inside of a step, which is lost now: then this worker is out of step
                assert self._log.rows is not None
                rows = self._log.rows
            self.say("computing", self.owner.step)
            return rows
        self.gathered_on = self.comms.mesh
        return [mine]

    def begin_step(self) -> float:
        self._client.refuse_fork()
        self._voted = None if self._now is None else self._client.pending(self._now.number)
        return float(self._voted is not None)

    def end_step(self, heard: float, contributors: int, *, served: bool) -> None:
        if served:  # counted when it came; what was agreed in it was of a view that is over
            return
        self._log.stepped()
        if heard >= contributors:
            # A worker without samples of this batch had no vote and may hear of the view only now.
            self._agreed = self._voted or self._await_pending()

    def _await_pending(self) -> View | None:
        while not self.broken:
            if (view := self._client.pending(self.view)) is not None:
                return view
            time.sleep(POLL_S)
        return None

    # -- change -------------------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        self._client.refuse_fork()
        if self._agreed is not None and not self.broken:
            view, self._agreed = self._agreed, None
            if self.worker not in view.members:
                with suppress(GroupBroken):  # they go on without it, whatever happens
                    self._hand_over(view)
                self._client.left()
                raise Leave
            self._enter(view)
        elif self.broken:
            self.recover(GroupBroken("the view is over"))

    def _hand_over(self, view: View) -> None:
        if self.worker in view.leavers:
            self.say("handing over", self.owner.step)
            with self._handover(view) as group:
                self.owner.hand_over(group, view)

    def recover(self, error: GroupBroken) -> bool:
        """Meet the survivors in the next view. Raises ``Rewind`` where what broke cannot be done again."""
        assert self._now is not None
        self.comms.abandon()
        self._client.broken(self._now.number, str(error))
        return self._enter(self._await_after(self._now))

    def restart(self, error: GroupBroken) -> None:
        self._log.lost = True
        self.recover(error)

    def resize(self, workers: int, why: str = "") -> None:
        if self.synchronised:  # all that ask: whoever dies, it is heard
            self._client.resize(workers, why)

    def reshape(self, mesh: Mesh, why: str = "") -> None:
        if self.synchronised:
            self._client.reshape(str(mesh), why, self.owner.layers)

    def replace(self, rank: int) -> None:
        if self.rank == rank and self.synchronised:
            self._client.replace()

    def finish(self) -> None:
        self._client.refuse_fork()
        self._log.all_done = True
        self.say("done", self.owner.step)
        self._client.done()
        while (view := self._client.await_bye(self.view)) is not None:
            self._serve(view)

    def _serve(self, view: View) -> None:
        """Another worker may need a result of this one's."""
        if self.worker in view.members:
            self._enter(view)

    def _await_after(self, view: View) -> View:
        self.say("forming", self.owner.step)
        return self._await(view.number)

    def _await(self, after: int) -> View:
        while True:
            try:
                return self._client.await_version(after, LONG_S)
            except TimeoutError:
                continue
            except RunOver:
                raise Leave from None

    def _enter(self, view: View) -> bool:
        """Form the group of ``view`` or of a later one, and reconcile; True if that brought a missing result."""
        served = False
        while True:
            try:
                plan = self._form(view, joins=False)
                break
            except GroupBroken as error:
                served = served or self._log.served
                self._client.broken(view.number, str(error))
                view = self._await_after(view)
        served = served or self._log.served
        self._client.running(view.number, plan.step, self.owner.layers)
        if plan.rewind_to is not None:
            self._go_back(plan.rewind_to, plan.rewinds)
        return served

    def _form(self, view: View, joins: bool) -> RecoveryPlan:
        """One attempt at ``view``: its group, the table of statuses, and what follows from it."""
        self.say("forming", self.owner.step)
        self._log.served = False
        before = self._now
        if self.worker not in view.members:
            raise Leave
        if before is not None and not view.scheduled:
            # Joiners count: one that was not confirmed may have trained, and evaluated, with this worker already.
            stayed = set(before.members) <= set(view.members)
            self._log.lost = self._log.lost or not stayed
        if not view.scheduled:
            self._let_go()
        self._now, self._agreed = view, None
        try:
            comms = form_comms(
                self._factory,
                self._store,
                str(view.number),
                view.rank_of(self.worker),
                view.grid,
                superseded=lambda: self._client.superseded(view.number),
            )
        finally:
            self._let_go()  # of a planned view: only now has everybody completed the last step with the group before
        self.comms = comms = replace(comms, hosts=view.hosts)
        if self._client.superseded(view.number):  # it came between: nobody has abandoned this group yet
            comms.abandon()
        plan = self._log.compare(self.group, self.owner, joins=joins)
        self.say("handing over", self.owner.step)
        self._log.exchange(self.group, self.owner, plan)
        plan = self._move_state(view, comms, plan)
        self._log.lost = False
        return plan

    def _move_state(self, view: View, comms: Comms, plan: RecoveryPlan) -> RecoveryPlan:
        """Bring what workers hold to where it belongs; the plan, which is another one where something is lost."""
        try:
            if plan.rewind_to is not None:
                if plan.rewind_to >= 0:
                    self.owner.place_snapshot(comms)
            elif view.leavers:
                with self._handover(view) as over:
                    self.owner.regroup(comms, over)
            else:
                self.owner.regroup(comms, None)
        except Unrecoverable as error:
            self.owner.tell_lost(error)
            rewinds = plan.rewinds + (plan.rewind_to is None)
            return replace(plan, rewind_to=-1, rewinds=rewinds)
        return plan

    @contextmanager
    def _handover(self, view: View) -> Iterator[Group]:
        """The members of ``view``, and behind them those that leave with it."""
        everybody = (*view.members, *view.leavers)
        name, rank = f"{view.number}/handover", everybody.index(self.worker)
        superseded = partial(self._client.superseded, view.number)
        group = self._factory.form(self._store, name, rank, len(everybody), superseded=superseded)
        self._over = group
        try:
            if superseded():
                group.abandon()
            yield group
        finally:
            self._over = None
            group.abandon()
            group.drain()
            drop(group)

    def lose(self, error: Unrecoverable) -> NoReturn:
        """State was found to be lost, by all members alike: they go on from the newest checkpoint."""
        self.owner.tell_lost(error)
        self._go_back(-1, self._log.rewinds + 1)

    def _go_back(self, to: int, rewinds: int) -> NoReturn:
        """To the snapshot of step ``to``; -1: to the newest checkpoint."""
        self._log.begin()
        self._log.rewinds = rewinds
        self.synchronised = self.restart_from_checkpoint = to < 0
        raise Rewind

    def _break(self, view: View) -> None:
        """In the client's thread: ``view`` takes effect at once, so what the main thread waits for must not last."""
        if self._now is None or view.number > self._now.number:
            self.comms.abandon()
            if (over := self._over) is not None:
                over.abandon()

    def _alone(self) -> Group:
        """This worker by itself."""
        return self._factory.form(self._store, "alone", 0, 1)

    def _let_go(self) -> None:
        comms, self.comms = self.comms, replicated(self._alone())
        for group in comms.formed:
            group.abandon()
            group.drain()
            drop(group)

    def say(self, doing: str, step: int, size_bytes: int = 0, what: str = "") -> None:
        self._step = step
        self._client.doing(cast(Doing, doing), step, size_bytes, self.view, self._log.completed, what)
