"""What one worker has completed of the sequence that all members execute, and what it holds for those that have not."""

from __future__ import annotations

from dataclasses import astuple

from elastune.comm.group import Group
from elastune.elastic.worker import state_transfer as handover
from elastune.elastic.worker.group import Rows
from elastune.elastic.worker.reconcile import MemberStatus, RecoveryPlan, settle
from elastune.elastic.worker.state_owner import StateOwner


class CommitLog:
    """``completed`` operations, the newest of them a gather with the result ``rows``, or (None) a step.

    ``in_step``: the operation at hand is a step's reduction. ``lost``: since members last settled one has gone without
    leaving, or what broke cannot be done again. ``served``: the newest exchange brought this worker a result.
    """

    def __init__(self) -> None:
        self.completed = 0
        self.rewinds = 0
        self.rows: Rows | None = None
        self.in_step = False
        self.lost = False
        self.served = False
        self.all_done = False  # there is no operation after the newest one

    def begin(self) -> None:
        """Nothing is completed: training begins, or begins again from a snapshot."""
        self.completed, self.rows, self.all_done = 0, None, False

    def gathered(self, rows: Rows) -> None:
        """A gather is completed here."""
        self.completed, self.rows = self.completed + 1, rows

    def stepped(self) -> None:
        """A step is completed here."""
        self.completed, self.rows = self.completed + 1, None

    def compare(self, group: Group, holder: StateOwner, *, joins: bool) -> RecoveryPlan:
        """Tell the others how far this worker is, hear the same of them, and draw the conclusion that all draw."""
        standing = MemberStatus(
            completed=self.completed,
            step=holder.step,
            dirty=holder.dirty and not joins,
            lost=self.lost,
            snapshot=holder.snapshot_step,
            rewinds=self.rewinds,
            joins=joins,
            done=self.all_done,
        )
        return settle([_standing(row) for row in group.gather_floats([float(x) for x in astuple(standing)])])

    def exchange(self, group: Group, holder: StateOwner, settlement: RecoveryPlan) -> None:
        """Hand on what ``settlement`` says, and take what it says. Raises ``GroupBroken``."""
        me = group.rank
        if settlement.rewind_to is not None:
            if me == settlement.rewind_source:
                for rank in settlement.rewind_lacking:
                    handover.send_packed(group, rank, holder.snapshot())
            elif me in settlement.rewind_lacking and settlement.rewind_source is not None:
                holder.keep_snapshot(handover.receive_packed(group, settlement.rewind_source))
        elif me in settlement.lagging and settlement.held_source is not None:
            self._take_result(group, holder, settlement.held_source)
        elif me == settlement.held_source:
            for rank in settlement.lagging:
                self._give_result(group, holder, rank)
        for joiner, source in settlement.state_source.items():
            if me == source:
                handover.send_floats(group, joiner, [float(self.completed), float(self.rewinds)])
                handover.send_packed(group, joiner, holder.pack())
            elif me == joiner:
                completed, rewinds = handover.receive_floats(group, source)
                self.completed, self.rewinds = int(completed), int(rewinds)
                holder.unpack(handover.receive_packed(group, source))

    def _give_result(self, group: Group, holder: StateOwner, rank: int) -> None:
        if self.rows is None:
            for tensor in holder.held():
                group.send(tensor, rank)
            return
        handover.send_floats(group, rank, [float(len(row)) for row in self.rows])
        for row in self.rows:
            handover.send_floats(group, rank, row)

    def _take_result(self, group: Group, holder: StateOwner, source: int) -> None:
        """What the worker at ``source`` has completed; both are at the same operation, so both know its kind."""
        if self.in_step:
            result = holder.held_like()
            for tensor in result:
                group.receive(tensor, source)
            holder.take_held(result)
            self.stepped()
        else:
            count = len(handover.receive_floats(group, source))
            self.gathered([handover.receive_floats(group, source) for _ in range(count)])
        self.served = True


def _standing(row: list[float]) -> MemberStatus:
    completed, step, dirty, lost, snapshot, rewinds, joins, done = (int(x) for x in row)
    return MemberStatus(completed, step, bool(dirty), bool(lost), snapshot, rewinds, bool(joins), bool(done))
