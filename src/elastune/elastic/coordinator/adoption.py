"""Workers that have outlived their controller go on under the next one: what they say of themselves becomes its state.

Nothing is read from files. The newest view that any of them knows is the one that counts: an older one is over for
good, and one that only lost workers knew never came into force, since all of its members have to come to it. Where all
its members run it, they train, and nothing has to be done. Else it counts as broken: those who hold the state meet in
the view after it, and complete or repeat the step that they are in. A view by which nobody has begun yet begins again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from elastune.elastic.coordinator import machine
from elastune.elastic.coordinator.machine import Outcome
from elastune.elastic.coordinator.membership import Membership, Stage, Worker
from elastune.elastic.protocol.instructions import Confirm, Instruction, Release
from elastune.elastic.protocol.messages import (
    Broken,
    Done,
    Event,
    LayersFound,
    Noticed,
    Ready,
    ReshapeAsked,
    ResizeAsked,
    Returned,
    Running,
)
from elastune.elastic.protocol.view import View

WHY = "its controller was lost"


@dataclass
class Adoption:
    """Who has come back until now, and what each has said since. Used by the coordinator's thread; others may read."""

    back: dict[int, Returned] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    wishes: list[tuple[int | None, Event]] = field(default_factory=list)
    noticed_s: dict[int, float] = field(default_factory=dict)  # of workers whose agents came back before them

    def comes(self, worker: int, host: str, returned: Returned) -> None:
        """``worker`` is back."""
        self.hosts[worker] = host
        if worker in self.noticed_s:
            returned = replace(returned, noticed_s=self.noticed_s[worker])
        self.back = {**self.back, worker: returned}

    def goes(self, worker: int) -> None:
        """``worker`` is away again."""
        self.back = {number: returned for number, returned in self.back.items() if number != worker}

    def hears(self, worker: int | None, event: Event) -> None:
        """``event`` came before it was known who comes back."""
        if isinstance(event, ResizeAsked | ReshapeAsked):
            self.wishes.append((worker, event))
        elif isinstance(event, Noticed) and worker is not None and worker not in self.back:
            self.noticed_s[worker] = event.seconds
        elif worker is not None and worker in self.back:
            self.back = {**self.back, worker: _after(self.back[worker], event)}


def _after(returned: Returned, event: Event) -> Returned:
    """Where a worker stands that has said ``event`` since it came back."""
    match event:
        case Ready():
            return replace(returned, ready=True)
        case Running(version, step):
            return replace(returned, version=version, step=step)
        case LayersFound(layers):
            return replace(returned, layers=layers)
        case Broken(version):
            return replace(returned, broken=version)
        case Done():
            return replace(returned, done=True)
        case Noticed(seconds):
            return replace(returned, noticed_s=seconds)
    return returned


def newest_view(back: Mapping[int, Returned]) -> View | None:
    """The newest view that any of them knows."""
    return max((r.heard for r in back.values() if r.heard is not None), key=lambda view: view.number, default=None)


def awaited(back: Mapping[int, Returned]) -> frozenset[int]:
    """The members of the newest view that are not back yet."""
    view = newest_view(back)
    return frozenset() if view is None else frozenset(view.members) - frozenset(back)


def can_go_on(back: Mapping[int, Returned]) -> bool:
    """Whether those who are back hold a state to go on with."""
    view = newest_view(back)
    if view is None:
        return False
    return any(_is_member(worker, returned, view, back) for worker, returned in back.items() if worker in view.members)


def take_over(empty: Membership, back: Mapping[int, Returned], hosts: Mapping[int, str]) -> Outcome:
    """The state after ``empty``, which has no workers yet, once those who are ``back`` were taken over.

    They ``can_go_on``. Workers whose state the others have gone on without are released.
    """
    view = newest_view(back)
    assert view is not None
    whole, begins = _is_whole(view, back), _begins(view, back)
    # Only its members matter of the view before one that never came into force.
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
    told: list[Instruction] = []
    if whole:
        told += [Confirm(joiner, view.number) for joiner in view.joiners]
        for worker in [worker.number for worker in state.members if worker.number not in view.members]:
            state = state.without(worker)
            told.append(Release(worker))
    return machine.derive(state, tuple(told), not whole, WHY)


def _is_whole(view: View, back: Mapping[int, Returned]) -> bool:
    """Whether all members of ``view`` train under it."""
    return all(
        (returned := back.get(worker)) is not None and returned.version == view.number and returned.broken < view.number
        for worker in view.members
    )


def _begins(view: View, back: Mapping[int, Returned]) -> bool:
    """Whether nobody can have taken a step in ``view``, by which a state comes to be: not all have come to it."""
    return view.initial and any(back[worker].version != view.number for worker in view.members if worker in back)


def _is_member(number: int, returned: Returned, view: View, back: Mapping[int, Returned]) -> bool:
    """Whether it holds the state, or is to begin with the others of ``view``."""
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
    """Of those who are ``back`` the ones whose process can be ended from here."""
    return {worker: returned for worker, returned in back.items() if worker in processes}
