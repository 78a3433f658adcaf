"""What one worker has completed of the sequence that all members execute, and what it holds for those that have not."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial

import torch

from elastune.comm.group import Group
from elastune.elastic.protocol.view import View
from elastune.elastic.worker import state_transfer
from elastune.elastic.worker.open_round import Dealing, OpenRound, goes_on
from elastune.elastic.worker.reconcile import MemberStatus, RecoveryPlan, reconcile
from elastune.elastic.worker.state_owner import Packed, StateOwner

_ROWS = b"rows"  # what is sent is a gather's result


class CommitLog:
    """``completed`` operations, the newest of them a gather with the result ``rows``, completed after ``gathered_at``
    steps, or (None) a step.

    ``lost``: since the last reconciliation a member went without
    leaving, or what broke cannot be done again. ``served``: the newest exchange brought this worker a result.
    """

    def __init__(self) -> None:
        self.completed = 0
        self.rewinds = 0
        self.rows: list[torch.Tensor] | None = None
        self.gathered_at = 0
        self.lost = False
        self.served = False
        self.all_done = False  # there is no operation after the newest one

    def begin(self) -> None:
        """Nothing is completed: training begins, or begins again from a snapshot."""
        self.completed, self.rows, self.all_done = 0, None, False

    def gathered(self, rows: list[torch.Tensor], step: int) -> None:
        """A gather is completed here, after so many steps. Behind it this worker may load a checkpoint of another one,
        and be asked how far it is before others have the gather's result.
        """
        self.completed, self.rows, self.gathered_at = self.completed + 1, rows, step

    def stepped(self) -> None:
        """A step is completed here."""
        self.completed, self.rows = self.completed + 1, None

    def compare(self, group: Group, owner: StateOwner, view: View, dealing: Dealing, *, joins: bool) -> RecoveryPlan:
        """Tell the others how far this worker is, hear the same of them, and draw the conclusion that all draw.

        ``view``: whose ``group`` it is. ``dealing``: who has which learner of an open round.
        """
        status = MemberStatus(
            completed=self.completed,
            step=owner.step,
            unrepeatable=owner.unrepeatable and not joins,
            lost=self.lost,
            snapshot=owner.snapshot_step,
            rewinds=self.rewinds,
            joins=joins,
            done=self.all_done,
            round_steps=owner.round_steps if self.rows is None else owner.step - self.gathered_at,
        )
        told = [float(x) for x in (*astuple(status)[:-1], *astuple(owner.open_round))]
        rows = [_status(row) for row in group.gather_row(told)]
        dealt = partial(dealing.seats, members=view.members)
        return reconcile(rows, view.hosts, lambda rounds: goes_on(rounds, dealt, dealing.size_of))

    def exchange(self, group: Group, owner: StateOwner, plan: RecoveryPlan) -> None:
        """Send and receive what ``plan`` says. Raises ``GroupBroken``."""
        me = group.rank
        if plan.rewind_to is not None:
            if me == plan.rewind_source:
                for rank in plan.rewind_lacking:
                    state_transfer.send_packed(group, rank, owner.snapshot())
            elif me in plan.rewind_lacking and plan.rewind_source is not None:
                owner.keep_snapshot(state_transfer.receive_packed(group, plan.rewind_source))
        elif me in plan.lagging and plan.result_source is not None:
            self._take_result(group, owner, plan.result_source)
        elif me == plan.result_source:
            for rank in plan.lagging:
                self._give_result(group, owner, rank)
        received: Packed | None = None
        for joiner, source in plan.state_source.items():
            if me == source:  # a joiner passes on what it has received, at once
                state_transfer.send_floats(group, joiner, [float(self.completed), float(self.rewinds)])
                state_transfer.send_packed(group, joiner, received or owner.pack())
            elif me == joiner:
                completed, rewinds = state_transfer.receive_floats(group, source)
                self.completed, self.rewinds = int(completed), int(rewinds)
                received = state_transfer.receive_packed(group, source)
        if received is not None:
            owner.unpack(received)

    def _give_result(self, group: Group, owner: StateOwner, rank: int) -> None:
        if self.rows is not None:
            state_transfer.send_packed(group, rank, (_ROWS, self.rows))
            return
        for tensor in owner.last_result():
            group.send(tensor, rank)

    def _take_result(self, group: Group, owner: StateOwner, source: int) -> None:
        """What the worker at ``source`` has completed; both are at the same operation, so both know its kind."""
        if owner.reducing:
            result = owner.result_room()
            for tensor in result:
                group.receive(tensor, source)
            owner.adopt_result(result)
            self.stepped()
        else:
            self.gathered(state_transfer.receive_packed(group, source)[1], owner.step)
        self.served = True


def _status(row: list[float]) -> MemberStatus:
    completed, step, unrepeatable, lost, snapshot, rewinds, joins, done, steps, *of_round = (int(x) for x in row)
    said = bool(unrepeatable), bool(lost), snapshot, rewinds, bool(joins), bool(done), steps
    return MemberStatus(completed, step, *said, open=OpenRound(*of_round))
