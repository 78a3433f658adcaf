"""What is paid for of the hosts that have come."""

from __future__ import annotations

from typing import Any

from elastune.core.cost import ON_DEMAND, SPOT
from elastune.runtime.agents.hosts import AgentHost
from elastune.runtime.agents.messages import PreemptionNoticed
from elastune.runtime.clusters.hosts import rooms_paid, workers_held
from elastune.runtime.launcher import Bootstrap

HERE, THERE = "127.0.0.1:1", "127.0.0.1:2"


def host(kind: str, room: int, *coordinators: str, **more: Any) -> AgentHost:
    workers = {key: Bootstrap(key, address, "token") for key, address in enumerate(coordinators)}
    return AgentHost("a", room, connection=None, received_at=0.0, workers=workers, kind=kind, **more)  # type: ignore[arg-type]


def test_all_room_is_paid_for_and_workers_are_those_of_the_run() -> None:
    hosts = [
        host(SPOT, 4, HERE, HERE, THERE),
        host(SPOT, 2, HERE, notice=PreemptionNoticed(30.0, "it goes")),  # gets no more workers, and costs what it did
        host(ON_DEMAND, 1, THERE, unnamed=2),  # more than it has room for: kept from a controller before
    ]
    assert rooms_paid(hosts) == {SPOT: 6, ON_DEMAND: 3}
    assert workers_held(hosts, HERE) == {SPOT: 3}
    assert workers_held(hosts, THERE) == {SPOT: 1, ON_DEMAND: 1}
    assert rooms_paid([]) == workers_held([], HERE) == {}
