"""What the journal is told of the routes that sums take, and why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from elastune.comm.comms import Comms, replicated
from elastune.comm.group import Group
from elastune.core.clock import SystemClock
from elastune.core.run import Means, Program, RunSpec
from elastune.core.topology import Topology
from elastune.journal.records import TopologyLaid
from elastune.train.adapt.routing import Routing
from elastune.train.progress import Progress
from elastune.train.timing import StepTimes

MEASURED = "links measured: that of host b is slow"


def two_hosts() -> Comms:
    both = replicated(Group(0, 2, backend="gloo"))
    return Comms(both.mesh, both.everyone, both.groups, both.batch, ("a", "b"))


def test_what_was_measured_of_workers_that_are_gone_is_no_reason() -> None:
    """Under auto: routes that measured links chose, and the backend's own when other workers come."""
    told: list[Any] = []
    spec = RunSpec(Program(Path("none.py")), Path("out"), means=Means(topology=Topology("auto")))
    routing = Routing(spec, cast(Any, SimpleNamespace()), Progress(StepTimes(SystemClock())), told.append)
    routing.lay(two_hosts())
    assert told == [], "auto is native until links were measured"
    routing.lay(two_hosts(), Topology("star"), MEASURED)
    routing.lay(two_hosts())
    assert all(isinstance(record, TopologyLaid) for record in told)
    assert [(record.topology, record.cause) for record in told] == [
        ("star", MEASURED),
        ("native", "the run's means: auto; links are not measured yet"),
    ]
