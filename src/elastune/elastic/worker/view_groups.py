"""Forms the process groups of a worker's views; those of a scheduled view form while its members train.

After a loss the members go on at once with direct connections. The hierarchical levels by which sums travel form
a little later (``LateLevels``). ``MemberStore`` is their rendezvous, carried by the connection to the coordinator.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import Store

from elastune.elastic.wire.view import View
from elastune.elastic.worker.client import CoordinatorClient, RunOver
from elastune.parallel.comm.forming import BackgroundForming
from elastune.parallel.comm.group import Group, GroupBroken, drop
from elastune.parallel.comm.process_groups import Comms, GroupFactory, drop_all, form_comms, form_levels

# [late levels] After a loss workers go on at once, everybody to everybody; the levels by which sums climb form a little later.

BEGIN_AFTER, TAKEN_AFTER = 1, 4  # operations: what goes without levels costs bytes, no bits


class LateLevels:
    """The groups that ``form`` makes, on a thread of its own; ``completed`` operations lie behind all workers.

    They begin to form once the operation that the loss has broken is done again, and not beside it. All take them up at
    the same step boundary, and wait for them there.
    """

    def __init__(self, completed: int, form: Callable[[], tuple[Group, ...]]) -> None:
        self._completed, self._form = completed, form
        self._preparing: BackgroundForming[tuple[Group, ...]] | None = None

    def due(self, completed: int) -> bool:
        """At a step boundary with so many operations behind all: whether they are to be taken up."""
        if self._preparing is None and completed >= self._completed + BEGIN_AFTER:
            self._preparing = BackgroundForming(self._form, drop_all)
        return completed >= self._completed + TAKEN_AFTER

    def result(self) -> tuple[Group, ...]:
        """The groups, once they are ``due``; waits for them. Raises ``GroupBroken``."""
        assert self._preparing is not None
        return self._preparing.result()

    def discard(self) -> None:
        """They are not wanted any more."""
        if self._preparing is not None:
            self._preparing.discard()


# [store] The rendezvous of a version's process group, carried by the members' connections to the coordinator.

DEFAULT_S = 300.0


class MemberStore(Store):
    """What the members of a version tell each other. Every key begins with the version's number and a slash, so it is
    used through ``PrefixStore(str(version), store)``. Keep a reference to it: torch's own does not keep the methods.

    A wait raises as soon as the version is superseded. ``add`` and the rest of a ``Store`` are not there: no two
    members ever write the same key.
    """

    def __init__(self, member: CoordinatorClient) -> None:
        super().__init__()
        self._member = member

    def set(self, key: str, value: bytes | str) -> None:
        """Tell everybody."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._member.publish(key, base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        """What somebody has told; waits for it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As ``get``, for each."""
        return [base64.b64decode(value) for value in self._read(keys, None)]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all are there. Raises ``RuntimeError``."""
        self._read(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(self._member.published(key) for key in keys)

    def _read(self, keys: list[str], timeout: timedelta | None) -> list[str]:
        limit_s = DEFAULT_S if timeout is None else timeout.total_seconds()
        try:
            values = self._member.read(keys, limit_s)
        except RunOver as error:
            raise RuntimeError(str(error)) from None
        if values is None:
            raise RuntimeError(f"nobody published {', '.join(keys)} within {limit_s:g} s")
        return values


# [view comms] The groups of a worker's views. Those of a scheduled one form while its members still train under the one before.


class ViewComms:
    """Forms the groups of one view at a time, with the others that ``member`` hears of. Any thread may call it.

    ``climbs``: see ``form_comms``.
    """

    def __init__(self, member: CoordinatorClient, factory: GroupFactory, *, climbs: bool) -> None:
        self._member, self._factory, self._climbs = member, factory, climbs
        self._store = MemberStore(member)
        self._lock = threading.Lock()
        self._newest = 0
        self._preparing: BackgroundForming[Comms] | None = None

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
            self._preparing = BackgroundForming(partial(self._form, view), _drop)

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
