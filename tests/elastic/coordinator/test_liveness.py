"""Who is silent, and who is only slow: tables of times and of what the system says of a process."""

from __future__ import annotations

from typing import cast

import pytest

from elastune.elastic.coordinator.connections import Connection
from elastune.elastic.coordinator.liveness import Vitals, WorkerConnections
from elastune.elastic.protocol.messages import Beat

BEAT_S = 4.0
NOBODYS = cast(Connection, None)


def silent_at(states: str, cpu_s: list[float] | None, *, loading: bool = False) -> tuple[list[float], list[str]]:
    """When a worker of those states (one a second; the last stays) that says nothing after second 0 counts as silent,
    looked at each tenth of a second for a minute, and what is told of it."""
    at = 0.0

    def look(_worker: int) -> Vitals | None:
        second = int(at)
        if cpu_s is None:
            return None
        return Vitals(states[min(second, len(states) - 1)], cpu_s[min(second, len(cpu_s) - 1)])

    peers = WorkerConnections(BEAT_S, 30.0, look)
    peers.add(0, NOBODYS, "", 0.0)
    peers.heard(0, 0.0, Beat(doing="loading" if loading else "computing"))
    found: list[float] = []
    told: list[str] = []
    for tenth in range(600):
        at = tenth / 10
        if not found and peers.silent(at, at):
            found.append(at)
        told += [slow.line for slow in peers.take_excused()]
    return found, told


@pytest.mark.parametrize("cpu_s", [None, [3.0]])
def test_who_does_nothing_is_silent_after_a_heartbeat(cpu_s: list[float] | None) -> None:
    assert silent_at("S", cpu_s) == ([4.0], [])


def test_a_stopped_process_is_silent_whatever_it_had_done() -> None:
    assert silent_at("RRRT", [float(n) for n in range(60)]) == ([4.0], [])


@pytest.mark.parametrize("states", ["R", "D", "S"])
def test_a_process_that_works_is_waited_for_and_told_once(states: str) -> None:
    found, told = silent_at(states, [float(n) for n in range(61)])
    assert not found
    (line,) = told
    assert "--heartbeat" in line
    assert "worker 0 has been silent for 4.0 s" in line


def test_once_it_works_no_more_it_is_silent_a_heartbeat_later() -> None:
    working = [float(n) for n in range(10)]
    found, told = silent_at("S", working)
    assert len(told) == 1
    assert 12.0 <= found[0] <= 16.0


def test_who_loads_its_program_may_take_longer() -> None:
    assert silent_at("S", [1.0], loading=True)[0] == [30.0]


def lost(vitals: dict[int, str], *, speaks: int | None = None, pause_s: float = 30.0) -> dict[int, float]:
    """When each worker (of this state; "": not seen) counts as silent, if only ``speaks`` says anything after 0 s."""
    peers = WorkerConnections(
        BEAT_S, 30.0, lambda worker: Vitals(vitals[worker], 1.0) if vitals[worker] else None, pause_s=pause_s
    )
    for worker in vitals:
        peers.add(worker, NOBODYS, "", 0.0)
        peers.heard(worker, 0.1 * worker, Beat(doing="computing"))
    found: dict[int, float] = {}
    for tenth in range(600):
        at = tenth / 10
        if speaks is not None:
            peers.heard(speaks, at, Beat(doing="computing"))
        for worker in peers.silent(at, at):
            found.setdefault(worker, at)
            peers.remove(worker)
    return found


def test_when_nobody_at_all_is_heard_it_is_a_pause_of_the_network() -> None:
    found = lost({0: "S", 1: "S", 2: "S"})
    assert min(found.values()) >= 30.0
    assert min(lost({0: "", 1: ""}).values()) >= 30.0, "elsewhere, where nobody sees them"
    assert lost({0: "S"})[0] >= 30.0


def test_a_pause_excuses_nobody_who_is_seen_not_to_live_and_nobody_alone_whom_nobody_sees() -> None:
    found = lost({0: "S", 1: "T", 2: "Z"})
    assert found[1] < 6.0
    assert found[2] < 6.0
    assert found[0] >= 30.0
    assert lost({0: ""})[0] == 4.0


def test_while_one_is_heard_there_is_no_pause() -> None:
    assert lost({0: "S", 1: "S"}, speaks=0) == {1: pytest.approx(4.2, abs=0.15)}
