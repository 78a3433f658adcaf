"""What the journal is told of the routes that sums take, and why; how workers settle them after a loss."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastune.core.clock import SystemClock
from elastune.core.communication import Topology
from elastune.core.journal.records import TopologyChanged
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.core.sync_plan import SyncPlan
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.comm.process_groups import Comms, replicated
from elastune.train.adaptation import routing as routing_module
from elastune.train.adaptation.routing import Routing
from elastune.train.progress import Progress, StepTimes

MEASURED = "links measured: that of host b is slow"


def two_hosts(rank: int = 0) -> Comms:
    both = replicated(Group(rank, 2, backend="gloo"))
    return Comms(both.mesh, both.everyone, both.groups, both.batch, ("a", "b"))


def test_what_was_measured_of_workers_that_are_gone_is_no_reason() -> None:
    """Under auto: routes that measured links chose, and the backend's own when other workers come."""
    told: list[Any] = []
    spec = RunSpec(Program(Path("none.py")), Path("out"), execution=ExecutionSettings(topology=Topology("auto")))
    routing = Routing(spec, cast(Any, SimpleNamespace()), Progress(StepTimes(SystemClock())), told.append)
    routing.lay(two_hosts())
    assert told == [], "auto is native until links were measured"
    routing.lay(two_hosts(), Topology("star"), MEASURED)
    routing.lay(two_hosts())
    assert all(isinstance(record, TopologyChanged) for record in told)
    assert [(record.topology, record.cause) for record in told] == [
        ("star", MEASURED),
        ("native", "the run's settings: auto; links are not measured yet"),
    ]


class Meeting:
    """Gathers of two workers. One of them completes the ``lost``-th; the other is served its rows, in a new view."""

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.names: tuple[list[str], list[str]] = ([], [])
        self._rows: list[Sequence[float]] = [(), ()]
        self._both = threading.Barrier(2, timeout=20)

    def gather(self, rank: int, values: Sequence[float], what: str) -> list[list[float]]:
        self.names[rank].append(what)
        self._rows[rank] = values
        self._both.wait()
        rows, names = [list(row) for row in self._rows], [own[-1] for own in self.names]
        self._both.wait()
        assert names[0] == names[1], "workers do different things"
        return rows


class Worker:
    """As much of a worker's group as its routing sees. Worker 1 hears of the new view at once, worker 0 in its next
    gather.
    """

    synchronised, size = True, 2

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.view = meeting, rank, 1
        self.comms = two_hosts(rank)
        spec = RunSpec(
            Program(Path("none.py")), Path("out"), execution=ExecutionSettings(workers=2, topology=Topology("auto"))
        )
        self.routing = Routing(spec, cast(Any, self), Progress(StepTimes(SystemClock())), lambda record: None)
        self.routing.lay(self.comms)

    def gather(self, values: Sequence[float], what: str) -> list[list[float]]:
        rows = self.meeting.gather(self.rank, values, what)
        if self.view == 1 and len(self.meeting.names[self.rank]) == self.meeting.lost + (self.rank == 0):
            self.view = 2
            self.routing.lay(self.comms)
        return rows

    @property
    def assignment_view(self) -> int:
        return self.view

    def set_activity(self, doing: str, step: int, size_bytes: int, what: str) -> None:
        assert (doing, what) == ("gathering", routing_module.SETTLING)

    def settle(self) -> None:
        sync = SimpleNamespace(regroup=lambda comms: None, plan=SyncPlan())
        self.routing.settle(cast(Any, SimpleNamespace(sync=sync, gradient_bytes=1 << 20)))
        self.meeting.gather(self.rank, (), "the next step")


@pytest.mark.parametrize(("tried", "used"), [([0.1, 0.098], "native"), ([0.1, 0.09], "star")])
def test_what_is_proposed_is_used_where_it_is_seen_to_take_less(
    monkeypatch: pytest.MonkeyPatch, tried: list[float], used: str
) -> None:
    monkeypatch.setattr(routing_module, "time_routes", lambda group, ways, numel, num_slots: tried)
    monkeypatch.setattr(routing_module, "probe_links", lambda group, hosts: [0.0, 1e6, 0.0, 1e6])
    monkeypatch.setattr(routing_module, "adds_up", lambda group: True)
    proposed = Topology("star"), {"star": 0.1, "native": 0.2}
    monkeypatch.setattr(routing_module, "best_topology", lambda sums, links, now: proposed)
    meeting = Meeting(lost=99)
    two = [Worker(meeting, rank) for rank in (0, 1)]
    threads = [threading.Thread(target=worker.settle) for worker in two]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [str(worker.routing._auto) for worker in two] == [used] * 2
    assert [worker.routing._probed for worker in two] == [1, 1], "not measured again until something changes"


def test_who_breaks_off_a_trial_begins_again_in_the_next_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """And while a round goes on without the lost one nothing is settled at all."""
    tries: list[int] = []

    def broken(group: Group, ways: Any, numel: int, num_slots: int) -> list[float]:
        tries.append(alone.view)
        if len(tries) == 1:
            alone.view = 2
            alone.routing.lay(alone.comms)
            raise GroupBroken("a worker has died")
        return [0.2, 0.1]

    monkeypatch.setattr(routing_module, "time_routes", broken)
    monkeypatch.setattr(routing_module, "unlike", lambda rows: {})
    monkeypatch.setattr(routing_module, "probe_links", lambda group, hosts: [0.0, 1e6, 0.0, 1e6])
    monkeypatch.setattr(routing_module, "adds_up", lambda group: True)
    proposed = Topology("star"), {"star": 0.1, "native": 0.2}
    monkeypatch.setattr(routing_module, "best_topology", lambda sums, links, now: proposed)

    class Alone(Worker):
        assignment_view = 0

        def gather(self, values: Sequence[float], what: str) -> list[list[float]]:
            return [list(values)] * 2

    alone = Alone(Meeting(lost=99), 0)
    sync = SimpleNamespace(regroup=lambda comms: None, plan=SyncPlan())
    trained = cast(Any, SimpleNamespace(sync=sync, gradient_bytes=1 << 20))
    alone.routing.settle(trained)
    assert (tries, alone.routing._probed) == ([], -1)
    Alone.assignment_view = 1
    alone.routing.settle(trained)
    assert (tries, alone.routing._probed, str(alone.routing._auto)) == ([1, 2], 2, "star")


@pytest.mark.parametrize("lost", [1, 2, 3, 4, 5])
def test_who_has_and_who_lacks_a_gathers_result_settle_the_routes_of_the_new_view(
    monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """Links are measured in gathers 1 and 2, routes are tried in 3 and checked in 4 and 5."""
    monkeypatch.setattr(routing_module, "time_routes", lambda group, ways, numel, num_slots: [0.2, 0.1])
    monkeypatch.setattr(routing_module, "probe_links", lambda group, hosts: [0.0, 1e6, 0.0, 1e6])
    monkeypatch.setattr(routing_module, "adds_up", lambda group: True)
    star, seconds = Topology("star"), {"star": 0.1, "native": 0.2}
    monkeypatch.setattr(routing_module, "best_topology", lambda sums, links, now: (star, seconds))
    meeting = Meeting(lost)
    two, wrong = [Worker(meeting, rank) for rank in (0, 1)], list[BaseException]()

    def run(worker: Worker) -> None:
        try:
            worker.settle()
        except BaseException as error:  # noqa: BLE001 - told below
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in two]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert meeting.names[0] == meeting.names[1]
    if lost < 5:  # with the last one both go on as the one did that had it: the step is lost, and all come here again
        assert [worker.routing._probed for worker in two] == [2, 2]
        assert [worker.routing._unchecked for worker in two] == [False, False]
