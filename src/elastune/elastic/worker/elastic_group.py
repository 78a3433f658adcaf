"""The workers of a run that elastune started: they come, go and die, and follow the coordinator's views.

``ViewComms`` forms the process groups of a view. ``ElasticWorkerGroup`` takes a worker from view to view.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NoReturn, cast

import torch
from torch._C._distributed_c10d import Store

from elastune.core.layout import Unrecoverable
from elastune.core.mesh import Mesh
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.wire.messages import Corrupt, Doing
from elastune.elastic.wire.view import View
from elastune.elastic.worker.client import CoordinatorClient, RunOver
from elastune.elastic.worker.group import CommitLog, LearnerAssignment, Leave, Rewind, WorkerGroup
from elastune.elastic.worker.recovery import RecoveryPlan, StateOwner
from elastune.parallel.comm.backends import BackgroundForming
from elastune.parallel.comm.group import Group, GroupBroken, drop
from elastune.parallel.comm.process_groups import Comms, GroupFactory, drop_all, form_comms, form_levels, replicated

# Forms the process groups of a worker's views, while the worker still trains, or computes a step that is lost.
#
# After a loss the members go on at once with direct connections. The hierarchical levels by which sums travel form a
# little later (``LateLevels``). ``MemberStore`` is their rendezvous, carried by the connection to the coordinator.

LOG = logging.getLogger(__name__)
BEGIN_AFTER, TAKEN_AFTER = 1, 4  # operations after a loss; without levels sums cost more bytes, and have equal bits
WAIT_LIMIT_S = 300.0  # for a value that another member publishes


class ViewComms:
    """Forms a worker's process groups, for one view at a time. Any thread may call it.

    The groups of a view form while its members still compute in the view before.

    Args:
        client: The connection to the coordinator, by which the members find each other.
        factory: Makes process groups.
        climbs: Whether sums travel by levels, see ``form_comms``.
    """

    def __init__(self, client: CoordinatorClient, factory: GroupFactory, *, climbs: bool) -> None:
        self._client, self._factory, self._climbs = client, factory, climbs
        self._store = MemberStore(client)
        self._lock = threading.Lock()
        self._newest = 0
        self._preparing: BackgroundForming[Comms] | None = None

    def alone(self) -> Group:
        """A group of this worker alone."""
        return self._factory.form(self._store, "alone", 0, 1)

    def view_installed(self, view: View) -> None:
        """Begin to form the groups of ``view`` if they can form while this worker trains, or computes a lost step."""
        if self._forms_early(view):
            self.begin(view)

    def is_ready_for(self, view: View) -> bool:
        """Whether this worker can enter ``view`` now: its groups have formed, or will only form once it is entered."""
        if not self._forms_early(view):
            return True
        self.begin(view)  # the connection's thread may not have begun it yet
        with self._lock:
            return view.number < self._newest or self._preparing is None or self._preparing.ended

    def begin(self, view: View) -> None:
        """Begin to form the groups of ``view``, if that has not begun, and give up those of an older view."""
        with self._lock:
            if view.number <= self._newest:
                return
            if self._preparing is not None:
                self._preparing.discard()
            self._newest = view.number
            self._preparing = BackgroundForming(partial(self._form, view), _drop)

    def take(self, view: View) -> Comms:
        """Hand over the groups of ``view`` to the caller; waits for them. Raises ``GroupBroken``."""
        self.begin(view)
        with self._lock:
            if view.number < self._newest or self._preparing is None:
                raise GroupBroken(f"view {view.number} is over")
            preparing, self._preparing = self._preparing, None
        return preparing.result()

    def late_levels(self, view: View, rank: int, completed: int) -> LateLevels | None:
        """The levels of ``view``, if they have not formed with it; see ``LateLevels``."""
        if not self._climbs or _climbs_at_once(view) or view.grid.replica > 1:
            return None
        form = partial(form_levels, self._factory, self._store, str(view.number), rank, view.hosts)
        return LateLevels(completed, partial(form, superseded=partial(self._client.superseded, view.number)))

    def handover(self, view: View) -> Group:
        """Form a group of the members of ``view``, and behind them the workers that leave with it.

        Raises ``GroupBroken``.
        """
        everybody = (*view.members, *view.leavers)
        name, rank = f"{view.number}/handover", everybody.index(self._client.worker)
        superseded = partial(self._client.superseded, view.number)
        return self._factory.form(self._store, name, rank, len(everybody), superseded=superseded)

    def _forms_early(self, view: View) -> bool:
        """Whether the groups of ``view`` form while this worker trains.

        Two active groups of NCCL may wait for each other, so only those of gloo do.
        """
        return self._client.worker in view.members and self._factory.backend == "gloo"

    def _form(self, view: View) -> Comms:
        superseded = partial(self._client.superseded, view.number)
        try:
            return form_comms(
                self._factory,
                self._store,
                str(view.number),
                view.ranks[self._client.worker],
                view.grid,
                view.hosts,
                climbs=self._climbs and _climbs_at_once(view),
                superseded=superseded,
            )
        except Exception as error:
            if view.scheduled and not superseded():
                # Without this report the others would wait for this worker, and all would train on as before.
                self._client.broken(view.number, str(error))
            raise


def let_go_of(comms: Comms) -> None:
    """Stop using ``comms``: operations that wait for them fail, and no operation writes to their buffers any more."""
    for group in comms.formed:
        group.abandon()
        group.drain()
        drop(group)


class LateLevels:
    """The groups of the hierarchical levels after a loss. They form in a thread of their own, while the workers go on.

    They begin to form once the operation that the loss has broken was repeated. All workers begin to use them at the
    same step boundary, and wait for them there.

    Args:
        completed: How many operations all workers have completed.
        form: Forms the groups.
    """

    def __init__(self, completed: int, form: Callable[[], tuple[Group, ...]]) -> None:
        self._completed, self._form = completed, form
        self._preparing: BackgroundForming[tuple[Group, ...]] | None = None

    def due(self, completed: int) -> bool:
        """Whether the groups are to be used from this step boundary on, with so many operations completed by all."""
        if self._preparing is None and completed >= self._completed + BEGIN_AFTER:
            self._preparing = BackgroundForming(self._form, drop_all)
        return completed >= self._completed + TAKEN_AFTER

    def result(self) -> tuple[Group, ...]:
        """The groups, once they are ``due``; blocks until they have formed. Raises ``GroupBroken``."""
        assert self._preparing is not None
        return self._preparing.result()

    def discard(self) -> None:
        """Give the groups up."""
        if self._preparing is not None:
            self._preparing.discard()


class MemberStore(Store):
    """The rendezvous store of a view's members, carried by their connections to the coordinator.

    Every key begins with the view's number and a slash, so use it through ``PrefixStore(str(view), store)``. Keep a
    reference to it: torch's own does not keep the Python methods. A wait raises as soon as the view is superseded.
    ``add`` and the rest of a ``Store`` are missing: no two members ever write the same key.
    """

    def __init__(self, client: CoordinatorClient) -> None:
        super().__init__()
        self._client = client

    def set(self, key: str, value: bytes | str) -> None:
        """Publish ``value`` under ``key`` to all members."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._client.publish(key, base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        """The value under ``key``; waits for it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values under ``keys``; waits for them."""
        return [base64.b64decode(value) for value in self._read(keys, None)]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all ``keys`` have values. Raises ``RuntimeError``."""
        self._read(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` have values."""
        return all(self._client.published(key) for key in keys)

    def _read(self, keys: list[str], timeout: timedelta | None) -> list[str]:
        limit_s = WAIT_LIMIT_S if timeout is None else timeout.total_seconds()
        try:
            values = self._client.read(keys, limit_s)
        except RunOver as error:
            raise RuntimeError(str(error)) from None
        if values is None:
            raise RuntimeError(f"nobody published {', '.join(keys)} within {limit_s:g} s")
        return values


def _climbs_at_once(view: View) -> bool:
    """Whether levels form with ``view``.

    After a loss all workers wait for its groups, and levels would double that time.
    """
    return view.scheduled or view.initial


def _drop(comms: Comms) -> None:
    drop_all(comms.formed)


# The group itself.
#
# At a step boundary a worker enters the next view, if all members have agreed on it in the reduction of a step. After
# a loss it meets the survivors at once. In both cases ``_form`` compares the members and brings each to the same
# state.

# No wait has to end by this limit: the coordinator notices a lost worker, and a worker that waited so long waits again.
# It bounds how long gloo keeps threads and memory of an operation whose group was given up.
LONG_S = 3600.0


class ElasticWorkerGroup(WorkerGroup):
    """The workers of a run that elastune started: they follow the views that the coordinator installs.

    Only the main thread uses it. ``synchronised`` is False while this worker builds what it will train, as a joiner or
    after a rewind. It is also False for the rest of a batch whose step was lost.

    Args:
        client: The connection to the coordinator.
        factory: Makes process groups.
        climbs: Whether sums travel by levels, see ``form_comms``.
    """

    elastic = True

    owner: StateOwner
    """This worker's training; the current session sets it."""

    def __init__(self, client: CoordinatorClient, factory: GroupFactory, *, climbs: bool = False) -> None:
        self._client = client
        self._forming = ViewComms(client, factory, climbs=climbs)
        super().__init__(self._forming.alone())
        self.synchronised = False
        self._current: View | None = None
        self._first: View | None = None
        self._agreed: View | None = None
        self._voted: View | None = None
        self._handover_group: Group | None = None  # in which state is being handed over
        self._levels: LateLevels | None = None
        self._dealing = LearnerAssignment()
        client.on_break, client.on_scheduled, client.on_bye = self._break, self._forming.view_installed, self._abandon
        client.where = lambda: ", ".join(filter(None, [self.where(), self.left]))

    # -- becoming a member --------------------------------------------------------------------------------------------

    @property
    def worker(self) -> int:
        return self._client.worker

    @property
    def view(self) -> int:
        return 0 if self._current is None else self._current.number

    @property
    def rank(self) -> int:
        return self._client.worker if self._current is None else self.group.rank

    @property
    def size(self) -> int:
        return self._client.worker + 1 if self._current is None else self.group.size

    @property
    def members(self) -> tuple[int, ...]:
        return () if self._current is None else self._current.members

    @property
    def planned(self) -> bool:
        return self._current is not None and self._current.scheduled

    @property
    def awaiting_first_view(self) -> bool:
        """Whether this worker is to ``start``: neither this worker nor any other one holds state."""
        return self._current is None and self._first is not None

    def start(self) -> None:
        """Enter the view that begins with this worker."""
        assert self._first is not None
        view, self._first = self._first, None
        self._log, self.synchronised = CommitLog(), True
        self._enter(view)

    def join(self) -> None:
        """As a joiner: report that all is built, wait for a view, and take over the members' state.

        Raises ``Rewind`` if there are no members left to take it from: all begin again.
        """
        if self._current is not None:
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
                LOG.warning("could not join view %d: %s", view.number, error)
                self._client.broken(view.number, str(error))
            else:
                self._client.running(view.number, self.owner.step, joins=True)
                LOG.info("joined view %d as rank %d of %d, step %d", view.number, self.rank, self.size, self.owner.step)
                if self._is_confirmed(view):
                    if plan.rewind_to is not None:
                        self._go_back(plan.rewind_to, plan.rewinds)
                    return
            self._let_go()
            self._current = None

    def _is_confirmed(self, view: View) -> bool:
        try:
            return self._client.await_confirmed(view.number)
        except RunOver:
            raise Leave from None

    # -- operations ---------------------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        return self.synchronised and self._current is not None and self._client.superseded(self._current.number)

    def gather_tensors(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        """As ``WorkerGroup.gather_tensors``; repeated with the survivors if a worker was lost."""
        self._client.refuse_fork()
        while self.synchronised:
            self.set_activity("gathering", self.owner.step, mine.nbytes, what)
            self.gathered_on = self.comms.mesh  # others may complete it on this mesh
            try:
                rows = self._gather_alike(mine, what)
                self._log.gathered(rows, self.owner.step)
            except GroupBroken as error:
                if not self.recover(error):
                    continue  # inside of a step, which is lost now, this worker is no longer synchronised
                assert self._log.rows is not None
                rows = self._log.rows
            self.set_activity("computing", self.owner.step)
            return rows
        self.gathered_on = self.comms.mesh
        return [mine]

    def begin_step(self) -> float:
        self._client.refuse_fork()
        next_view = None if self._current is None else self._client.pending(self._current.number)
        self._voted = next_view if next_view is not None and self._forming.is_ready_for(next_view) else None
        return float(self._voted is not None)

    def end_step(self, view_known: float, contributors: int, *, served: bool) -> None:
        if served:  # the step was counted when its result came, and its vote was about a view that is over
            return
        self._log.stepped()
        self._dealing.round_over(self._current)
        if view_known >= contributors:
            # A worker without samples of this batch had no vote and may receive the view only now.
            self._agreed = self._voted or self._client.await_pending(self.view)

    @property
    def assignment_view(self) -> int:
        return 0 if self._current is None else self._dealing.by(self._current).number

    @property
    def seat(self) -> tuple[int, int]:
        if self._current is None:
            return super().seat
        view = self._dealing.by(self._current)
        return len(view.members), view.ranks[self.worker]

    def learner_workers(self, assignment_view: int, learners: int) -> Mapping[int, int]:
        return self._dealing.learner_workers(assignment_view, learners)

    def report_round(self, step: int, learners: int, sync: SyncPlan, took_s: float) -> None:
        self._client.report_round(self.view, step, learners, sync, sync.most_carried(self.seat[0]), took_s)

    # -- change -------------------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        self._client.refuse_fork()
        if self._agreed is not None and not self.broken:
            view, self._agreed = self._agreed, None
            self.interruption.mark("noticed")
            if self.worker not in view.members:
                with suppress(GroupBroken):  # the others go on without this worker in any case
                    self._hand_over(view)
                self._client.left()
                raise Leave
            self._enter(view)
        elif self.broken:
            self.recover(GroupBroken("the view is over"))
        elif self._levels is not None and self.synchronised and self._levels.due(self._log.completed):
            self._climb()

    def _climb(self) -> None:
        """Reduce by levels from now on, as all members do from this step on."""
        assert self._levels is not None
        levels, self._levels = self._levels, None
        try:
            self.group.levels = levels.result()
        except GroupBroken as error:
            self.recover(error)
            return
        if self.broken:  # a new view came meanwhile, and nobody has abandoned these groups yet
            self.comms.abandon()
        self.owner.climb(self.comms)

    def _hand_over(self, view: View) -> None:
        if self.worker in view.leavers:
            self.set_activity("handing over", self.owner.step)
            with self._handover(view) as group:
                self.owner.hand_over(group, view)

    def recover(self, error: GroupBroken) -> bool:
        """Meet the survivors in the next view. Raises ``Rewind`` if the broken operation cannot be repeated."""
        assert self._current is not None
        LOG.warning("an operation of view %d failed: %s", self._current.number, error)
        self.interruption.mark("noticed")
        self.comms.abandon()
        self._client.broken(self._current.number, str(error))
        view = self._await_after(self._current)
        self.interruption.mark("view known")
        return self._enter(view)

    def restart(self, error: GroupBroken) -> None:
        self._log.lost = True
        self.recover(error)

    def resize(self, workers: int, why: str = "") -> None:
        if self.synchronised:  # every member asks: so one death does not lose the request
            self._client.resize(workers, why)

    def reshape(self, mesh: Mesh, why: str = "") -> None:
        if self.synchronised:
            self._client.reshape(str(mesh), why)

    def layers_found(self, layers: int) -> None:
        if layers and self.synchronised:  # a joiner reports nothing new
            self._client.layers_found(layers)

    def replace(self, rank: int) -> None:
        if self.rank == rank and self.synchronised:
            self._client.replace()

    def finish(self) -> None:
        self._client.refuse_fork()
        self._log.all_done = True
        self.set_activity("done", self.owner.step)
        self._client.done()
        while (view := self._client.await_bye(self.view)) is not None:
            self._serve(view)

    def _serve(self, view: View) -> None:
        """Enter ``view``, as another worker may need a result of this one."""
        if self.worker in view.members:
            self._enter(view)

    def _await_after(self, view: View) -> View:
        self.set_activity("forming", self.owner.step)
        return self._await(view.number)

    def _await(self, after: int) -> View:
        while True:
            try:
                return self._client.await_view(after, LONG_S)
            except TimeoutError:
                continue
            except RunOver:
                raise Leave from None

    def _enter(self, view: View) -> bool:
        """Form the group of ``view`` or of a later one, and reconcile.

        Returns whether that brought a missing result.
        """
        served = False
        while True:
            try:
                plan = self._form(view, joins=False)
                break
            except GroupBroken as error:
                served = served or self._log.served
                LOG.warning("view %d could not be formed: %s", view.number, error)
                self._client.broken(view.number, str(error))
                view = self._await_after(view)
                self.interruption.mark("formed anew")
        served = served or self._log.served
        self._client.running(view.number, plan.step)
        LOG.info("in view %d as rank %d of %d, first step %d", view.number, self.rank, self.size, plan.step)
        if plan.rewind_to is not None:
            self._go_back(plan.rewind_to, plan.rewinds)
        return served

    def _form(self, view: View, joins: bool) -> RecoveryPlan:
        """Try once to enter ``view``: form its group, compare the members, and carry out the plan."""
        self.set_activity("forming", self.owner.step)
        self._log.served = False
        before = self._current
        if self.worker not in view.members:
            raise Leave
        if before is not None and not view.scheduled:
            # Joiners count: even one that was not confirmed may have trained and evaluated with this worker.
            stayed = set(before.members) <= set(view.members)
            self._log.lost = self._log.lost or not stayed
        self._forming.begin(view)
        self._drop_levels()
        if not view.scheduled:
            self._let_go()
        self._current, self._agreed = view, None
        self.interruption.mark("old group left")
        self._dealing.entered(view)
        try:
            comms = self._forming.take(view)
        except BaseException:
            self._let_go()
            raise
        self.comms, last = comms, self.comms
        self.interruption.mark("connected")
        if self._client.superseded(view.number):  # a newer view came meanwhile; nobody has abandoned this group yet
            comms.abandon()
        try:
            plan = self._log.compare(self.group, self.owner, view, self._dealing, joins=joins)
            self._dealing.decided(plan.assignment_view)
        finally:
            let_go_of(last)  # for a planned view: only now have all members completed the last step before it
        self.interruption.mark("compared")
        self.set_activity("handing over", self.owner.step)
        began_s = time.monotonic()
        self._log.exchange(self.group, self.owner, plan)
        plan = self._move_state(view, comms, plan)
        LOG.debug("state of view %d compared and moved in %.3f s: %s", view.number, time.monotonic() - began_s, plan)
        self._log.lost = False
        completed = self._log.completed if plan.rewind_to is None else 0  # the count of all members from now on
        self._levels = self._forming.late_levels(view, comms.rank, completed)
        self.interruption.mark("state in place")
        return plan

    def _move_state(self, view: View, comms: Comms, plan: RecoveryPlan) -> RecoveryPlan:
        """Move each piece of state to the workers that are to hold it.

        Returns the plan, a changed one if state is lost.
        """
        try:
            if plan.rewind_to is not None:
                if plan.rewind_to >= 0:
                    self.owner.place_snapshot(comms)
            elif view.leavers:
                with self._handover(view) as handover_group:
                    self.owner.regroup(comms, handover_group)
            else:
                self.owner.regroup(comms, None)
        except Unrecoverable as error:
            self.owner.record_lost_state(error)
            rewinds = plan.rewinds + (plan.rewind_to is None)
            return replace(plan, rewind_to=-1, rewinds=rewinds)
        return plan

    @contextmanager
    def _handover(self, view: View) -> Iterator[Group]:
        """The group of the members of ``view``, and behind them the workers that leave with it."""
        group = self._forming.handover(view)
        self._handover_group = group
        try:
            if self._client.superseded(view.number):
                group.abandon()
            yield group
        finally:
            self._handover_group = None
            group.abandon()
            group.drain()
            drop(group)

    def lose(self, error: Unrecoverable) -> NoReturn:
        """Go on from the newest checkpoint: state was found to be lost, by all members alike."""
        self.owner.record_lost_state(error)
        self._go_back(-1, self._log.rewinds + 1)

    def go_back(self) -> NoReturn:
        self._go_back(-1, self._log.rewinds + 1)

    def take_corruptions(self) -> list[Corrupt]:
        return self._client.take_corruptions()

    def _go_back(self, to: int, rewinds: int) -> NoReturn:
        """Go back to the snapshot of step ``to``; -1: to the newest checkpoint."""
        LOG.warning("goes back to %s", f"the snapshot of step {to}" if to >= 0 else "the newest checkpoint")
        self._log.begin()
        self._log.rewinds = rewinds
        self.synchronised = self.restart_from_checkpoint = to < 0
        raise Rewind

    def _break(self, view: View) -> None:
        """End what the main thread waits for: ``view`` takes effect at once. Called in the client's thread."""
        if self._current is None or view.number > self._current.number:
            self._abandon()
            if self._current is not None:  # the main thread may be far from the reduction where it notices
                self._forming.view_installed(view)

    def _abandon(self) -> None:
        self.comms.abandon()
        if (group := self._handover_group) is not None:
            group.abandon()

    def _let_go(self) -> None:
        comms, self.comms = self.comms, replicated(self._forming.alone())
        let_go_of(comms)

    def _drop_levels(self) -> None:
        if self._levels is not None:
            self._levels.discard()
            self._levels = None

    def set_activity(self, doing: str, step: int, size_bytes: int = 0, what: str = "") -> None:
        self._step = step
        self._client.doing(cast(Doing, doing), step, size_bytes, self.view, self._log.completed, what)
