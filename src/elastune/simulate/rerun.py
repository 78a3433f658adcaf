"""Runs that go on though their controller died: calculated again from where they began, to where its journal ends.

A simulated run depends on its settings, on when it began and on when it was asked to pause, all of which the journal
tells; so nothing but the journal is needed to have every run, and every plan, as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from elastune.cluster.base import Event, LeftRun, Message
from elastune.core.clock import VirtualClock
from elastune.journal.records import Regrouped, Reported
from elastune.simulate.handle import SimulatedHandle
from elastune.simulate.world import World


def run_again(left: Sequence[LeftRun], world: World[SimulatedHandle]) -> list[SimulatedHandle]:
    """The runs of ``left``, in the order in which they began, as they are now in ``world``, which has no others."""
    now, clock = world.clock.now(), world.clock
    runs = [SimulatedHandle(one.spec, world) for one in left]
    known: dict[SimulatedHandle, int] = {}
    todo: list[tuple[float, Callable[[], None]]] = []
    for run, one in zip(runs, left, strict=True):
        known[run] = sum(isinstance(record, Reported | Regrouped) for record in one.kept)
        todo.append((one.begun_at, run.begin))
        if one.stop_at is not None:
            todo.append((one.stop_at, run.stop))
    todo.sort(key=lambda planned: planned[0])
    world.clock = VirtualClock(now_s=todo[0][0] if todo else now)
    unheard: dict[SimulatedHandle, list[Event]] = {}
    heard: Counter[SimulatedHandle] = Counter()

    def listen(until: float) -> None:
        while True:
            world.go_on(until)
            if not world.news:
                return
            for run in list(world.news):
                for event in run.poll():
                    counts = isinstance(event, Message) and isinstance(event.record, Reported | Regrouped)
                    heard[run] += counts
                    if not counts or heard[run] > known[run]:
                        unheard.setdefault(run, []).append(event)

    for at, act in todo:
        listen(at)
        act()
    listen(now)
    world.clock = clock
    world.count_from_now()
    for run in [*unheard, *(run for run in runs if run not in unheard)]:
        run.come_back(unheard.get(run, []))
    return runs
