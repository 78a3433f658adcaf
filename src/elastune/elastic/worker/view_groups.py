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

BEGIN_AFTER, TAKEN_AFTER = 1, 4  # operations after a loss; without levels sums cost more bytes, and have equal bits
WAIT_LIMIT_S = 300.0  # for a value that another member publishes


class ViewComms:
    """Forms a worker's process groups, for one view at a time. Any thread may call it.

    The groups of a scheduled view form while its members still train in the view before.

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

    def view_scheduled(self, view: View) -> None:
        """Begin to form the groups of ``view``, which was scheduled, if they can form while this worker trains."""
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
        return view.scheduled and self._client.worker in view.members and self._factory.backend == "gloo"

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
