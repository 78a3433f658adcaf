"""The groups of a worker's views. Those of a scheduled one form while its members still train under the one before."""

from __future__ import annotations

import threading
from functools import partial

from elastune.comm.comms import Comms, GroupFactory, drop_all, form_comms, form_levels
from elastune.comm.group import Group, GroupBroken, drop
from elastune.comm.preparing import Preparing
from elastune.elastic.protocol.view import View
from elastune.elastic.worker.client import CoordinatorClient
from elastune.elastic.worker.late_levels import LateLevels
from elastune.elastic.worker.store import MemberStore


class ViewComms:
    """Forms the groups of one view at a time, with the others that ``member`` hears of. Any thread may call it.

    ``climbs``: see ``form_comms``.
    """

    def __init__(self, member: CoordinatorClient, factory: GroupFactory, *, climbs: bool) -> None:
        self._member, self._factory, self._climbs = member, factory, climbs
        self._store = MemberStore(member)
        self._lock = threading.Lock()
        self._newest = 0
        self._preparing: Preparing[Comms] | None = None

    def alone(self) -> Group:
        """This worker by itself."""
        return self._factory.form(self._store, "alone", 0, 1)

    def heard(self, view: View) -> None:
        """``view`` was scheduled: its groups can form from now on."""
        if self._forms_early(view):
            self.begin(view)

    def is_ready_for(self, view: View) -> bool:
        """Whether training on would bring nothing: the groups of ``view`` are there, or form once it is entered."""
        if not self._forms_early(view):
            return True
        self.begin(view)  # it may be that the thread that hears has not come to it
        with self._lock:
            return view.number < self._newest or self._preparing is None or self._preparing.ended

    def begin(self, view: View) -> None:
        """Have the groups of ``view`` formed, if that was not begun before; those of an older one are let go of."""
        with self._lock:
            if view.number <= self._newest:
                return
            if self._preparing is not None:
                self._preparing.discard()
            self._newest = view.number
            self._preparing = Preparing(partial(self._form, view), _drop)

    def take(self, view: View) -> Comms:
        """The groups of ``view``, the caller's from now on; waits for them. Raises ``GroupBroken``."""
        self.begin(view)
        with self._lock:
            if view.number < self._newest or self._preparing is None:
                raise GroupBroken(f"view {view.number} is over")
            preparing, self._preparing = self._preparing, None
        return preparing.result()

    def late_levels(self, view: View, rank: int, completed: int) -> LateLevels | None:
        """The levels of ``view``, where they have not formed with it; see ``LateLevels``."""
        if not self._climbs or _climbs_at_once(view) or view.grid.replica > 1:
            return None
        form = partial(form_levels, self._factory, self._store, str(view.number), rank, view.hosts)
        return LateLevels(completed, partial(form, superseded=partial(self._member.superseded, view.number)))

    def handover(self, view: View) -> Group:
        """The members of ``view``, and behind them those that leave with it; blocks. Raises ``GroupBroken``."""
        everybody = (*view.members, *view.leavers)
        name, rank = f"{view.number}/handover", everybody.index(self._member.worker)
        superseded = partial(self._member.superseded, view.number)
        return self._factory.form(self._store, name, rank, len(everybody), superseded=superseded)

    def _forms_early(self, view: View) -> bool:
        """Whether its groups form while this worker trains: two of NCCL's at work at once may wait for each other."""
        return view.scheduled and self._member.worker in view.members and self._factory.backend == "gloo"

    def _form(self, view: View) -> Comms:
        superseded = partial(self._member.superseded, view.number)
        try:
            return form_comms(
                self._factory,
                self._store,
                str(view.number),
                view.ranks[self._member.worker],
                view.grid,
                view.hosts,
                climbs=self._climbs and _climbs_at_once(view),
                superseded=superseded,
            )
        except Exception as error:
            if view.scheduled and not superseded():
                # Else the others would wait for this worker, and all train on as before.
                self._member.broken(view.number, str(error))
            raise


def _climbs_at_once(view: View) -> bool:
    """Whether levels form with the view. After a loss all wait for its groups, and levels take as long again."""
    return view.scheduled or view.initial


def let_go_of(comms: Comms) -> None:
    """Use ``comms`` no more: whatever waits for it fails, and nobody writes to its buffers any more."""
    for group in comms.formed:
        group.abandon()
        group.drain()
        drop(group)


def _drop(comms: Comms) -> None:
    drop_all(comms.formed)
