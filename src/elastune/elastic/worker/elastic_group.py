"""A crew whose workers come, go and die."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import cast

from elastune.comm.gloo import form
from elastune.comm.group import Group, GroupBroken, drop
from elastune.elastic.protocol.messages import Doing
from elastune.elastic.protocol.view import View
from elastune.elastic.worker.client import CoordinatorClient, RunOver
from elastune.elastic.worker.commit_log import CommitLog
from elastune.elastic.worker.group import Leave, Rewind, Rows, WorkerGroup
from elastune.elastic.worker.reconcile import RecoveryPlan
from elastune.elastic.worker.state_owner import StateOwner
from elastune.elastic.worker.store import MemberStore

# Nothing has to end by waiting: the coordinator notices who is lost, and who waited so long begins again. It bounds how
# long gloo keeps threads and memory of an operation that it forgot when its group was given up.
LONG_S = 3600.0
POLL_S = 0.001


class ElasticWorkerGroup(WorkerGroup):
    """Follows the versions that a coordinator proclaims. Used by the main thread alone.

    ``live`` is False while this worker builds what it will train: as a joiner that has not been admitted, or on its way
    back to where it was rewound to; and for the rest of a batch whose step was discarded. Its gathers then return its
    own values only.
    """

    elastic = True

    holder: StateOwner  # of the session at hand
    begins_again = False  # the run begins at its newest checkpoint, or at the start, once more

    def __init__(self, member: CoordinatorClient) -> None:
        super().__init__(Group())
        self.live = False
        self._member = member
        self._store = MemberStore(member)
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self._now: View | None = None
        self._first: View | None = None
        self._agreed: View | None = None
        self._voted: View | None = None
        self._done = CommitLog()
        member.on_break = self._break

    # -- becoming a member --------------------------------------------------------------------------------------------

    @property
    def worker(self) -> int:
        return self._member.worker

    @property
    def version(self) -> int:
        return 0 if self._now is None else self._now.number

    @property
    def rank(self) -> int:
        return self._member.worker if self._now is None else self.group.rank

    @property
    def size(self) -> int:
        return self._member.worker + 1 if self._now is None else self.group.size

    @property
    def members(self) -> tuple[int, ...]:
        return () if self._now is None else self._now.members

    @property
    def planned(self) -> bool:
        return self._now is not None and self._now.planned

    @property
    def outside(self) -> bool:
        """Whether this worker is to ``start``: it holds no state, and nobody has any for it."""
        return self._now is None and self._first is not None

    def start(self) -> None:
        """Enter the version that begins with this worker."""
        assert self._first is not None
        version, self._first = self._first, None
        self._done, self.live = CommitLog(), True
        self._enter(version)

    def admit(self) -> None:
        """As a joiner: say that all is built, wait to be taken in, take over the members' state.

        Raises ``Rewind`` where there are no members left to take it from: all begin again.
        """
        if self._now is not None:
            return
        self._member.ready()
        seen = 0
        while True:
            version = self._await(seen)
            seen = version.number
            if self.worker not in version.members:
                continue
            if version.fresh:
                self._first, self.begins_again = version, version.number > 1
                raise Rewind
            try:
                self._form(version, joins=True)
            except GroupBroken as error:
                self._member.broken(version.number, str(error))
            else:
                self._member.running(version.number, self.holder.step)
                if self._is_confirmed(version):
                    return
            self._let_go()
            self._now = None

    def _is_confirmed(self, version: View) -> bool:
        try:
            return self._member.await_confirmed(version.number)
        except RunOver:
            raise Leave from None

    # -- operations ---------------------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        return self.live and self._now is not None and self._member.superseded(self._now.number)

    def gather(self, values: Sequence[float]) -> Rows:
        """As ``WorkerGroup.gather``; done again with the survivors where a worker was lost."""
        if not self.live:
            return [list(values)]
        self.say("gathering", self.holder.step, 8 * len(values))
        while True:
            try:
                rows = self.group.gather_floats(values)
            except GroupBroken as error:
                if self.recover(error):
                    assert self._done.rows is not None
                    rows = self._done.rows
                    break
            else:
                self._done.gathered(rows)
                break
        self.say("computing", self.holder.step)
        return rows

    def recover_step(self, error: GroupBroken) -> bool:
        self._done.in_step = True
        try:
            return self.recover(error)
        finally:
            self._done.in_step = False

    def begin_step(self) -> float:
        self._voted = None if self._now is None else self._member.pending(self._now.number)
        return float(self._voted is not None)

    def end_step(self, heard: float, contributors: int, *, served: bool) -> None:
        if served:  # counted when it came; what was agreed in it was of a version that is over
            return
        self._done.stepped()
        if heard >= contributors:
            # A worker without samples of this batch had no vote and may hear of the version only now.
            self._agreed = self._voted or self._await_pending()

    def _await_pending(self) -> View | None:
        while not self.broken:
            if (version := self._member.pending(self.version)) is not None:
                return version
            time.sleep(POLL_S)
        return None

    # -- change -------------------------------------------------------------------------------------------------------

    def boundary(self) -> None:
        if self._agreed is not None and not self.broken:
            version, self._agreed = self._agreed, None
            if self.worker not in version.members:
                self._member.left()
                raise Leave
            self._enter(version)
        elif self.broken:
            self.recover(GroupBroken("the version is over"))

    def recover(self, error: GroupBroken) -> bool:
        """Meet the survivors in the next version. Raises ``Rewind`` where what broke cannot be done again."""
        assert self._now is not None
        self.group.abandon()
        self._member.broken(self._now.number, str(error))
        return self._enter(self._await_after(self._now))

    def restart(self, error: GroupBroken) -> None:
        self._done.lost = True
        self.recover(error)

    def resize(self, workers: int) -> None:
        if self.live:  # all that ask: whoever dies, it is heard
            self._member.resize(workers, "session.resize")

    def replace(self, rank: int) -> None:
        if self.rank == rank and self.live:
            self._member.replace()

    def finish(self) -> None:
        self._done.all_done = True
        self._member.done()
        while (version := self._member.await_bye(self.version)) is not None:
            self._serve(version)

    def _serve(self, version: View) -> None:
        """Another worker may need a result of this one's."""
        if self.worker in version.members:
            self._enter(version)

    def _await_after(self, version: View) -> View:
        self.say("forming", self.holder.step)
        return self._await(version.number)

    def _await(self, after: int) -> View:
        while True:
            try:
                return self._member.await_version(after, LONG_S)
            except TimeoutError:
                continue
            except RunOver:
                raise Leave from None

    def _enter(self, version: View) -> bool:
        """Form the group of ``version`` or of a later one, and settle; True if that brought a missing result."""
        served = False
        while True:
            try:
                settlement = self._form(version, joins=False)
                break
            except GroupBroken as error:
                served = served or self._done.served
                self._member.broken(version.number, str(error))
                version = self._await_after(version)
        served = served or self._done.served
        self._member.running(version.number, settlement.step)
        if settlement.rewind_to is not None:
            self._done.begin()
            self._done.rewinds = settlement.rewinds
            self.live = self.begins_again = settlement.rewind_to < 0
            raise Rewind
        return served

    def _form(self, version: View, joins: bool) -> RecoveryPlan:
        """One attempt at ``version``: its group, the table of standings, and what follows from it."""
        self.say("forming", self.holder.step)
        self._done.served = False
        before = self._now
        if self.worker not in version.members:
            raise Leave
        if before is not None and not version.planned:
            # Joiners count: one that was not confirmed may have trained, and evaluated, with this worker already.
            stayed = set(before.members) <= set(version.members)
            self._done.lost = self._done.lost or not stayed
        if not version.planned:
            self._let_go()
        self._now, self._agreed = version, None
        try:
            group = form(
                self._store,
                str(version.number),
                version.rank_of(self.worker),
                len(version.members),
                interface=self._interface,
                timeout_s=LONG_S,
                superseded=lambda: self._member.superseded(version.number),
            )
        finally:
            self._let_go()  # of a planned version: only now has everybody completed the last step with the group before
        self.group = group
        if self._member.superseded(version.number):  # it came between: nobody has abandoned this group yet
            group.abandon()
        settlement = self._done.compare(group, self.holder, joins=joins)
        self.say("handing over", self.holder.step)
        self._done.exchange(group, self.holder, settlement)
        self.holder.regroup(group)
        self._done.lost = False
        return settlement

    def _break(self, version: View) -> None:
        """In the member's thread: ``version`` takes effect at once, so what the main thread waits for must not last."""
        if self._now is None or version.number > self._now.number:
            self.group.abandon()

    def _let_go(self) -> None:
        group, self.group = self.group, Group()
        if group.size > 1:
            group.abandon()
            group.drain()
            drop(group)

    def say(self, doing: str, step: int, size_bytes: int = 0) -> None:
        self._member.doing(cast(Doing, doing), step, size_bytes)
