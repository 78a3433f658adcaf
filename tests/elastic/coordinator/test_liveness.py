"""Who is silent, and who is only slow: tables of times and of what the system says of a process."""

from __future__ import annotations

from typing import cast

import pytest

from elastune.elastic.coordinator.liveness import BEATS_A_SECOND, ProcessStatus, WorkerConnections, beat_every_s
from elastune.elastic.wire.messages import Beat
from elastune.elastic.wire.server import Connection

BEAT_S = 4.0
NOBODYS = cast(Connection, None)


def silent_at(states: str, cpu_s: list[float] | None, *, loading: bool = False) -> tuple[list[float], list[str]]:
    """When a worker of those states (one a second; the last stays) that says nothing after second 0 counts as silent,
    looked at each tenth of a second for a minute, and what is told of it."""
    at = 0.0

    def look(_worker: int) -> ProcessStatus | None:
        second = int(at)
        if cpu_s is None:
            return None
        return ProcessStatus(states[min(second, len(states) - 1)], cpu_s[min(second, len(cpu_s) - 1)])

    peers = WorkerConnections(BEAT_S, 30.0, look)
    peers.add(0, NOBODYS, "", 0.0)
    peers.message_received(0, 0.0, Beat(doing="loading" if loading else "computing"))
    results: list[float] = []
    values: list[str] = []
    for tenth in range(600):
        at = tenth / 10
        if not results and peers.silent(at, at):
            results.append(at)
        values += [slow.line for slow in peers.take_excused()]
    return results, values


@pytest.mark.parametrize("cpu_s", [None, [3.0]])
def test_who_does_nothing_is_silent_after_a_heartbeat(cpu_s: list[float] | None) -> None:
    assert silent_at("S", cpu_s) == ([4.0], [])


def test_a_stopped_process_is_silent_whatever_it_had_done() -> None:
    assert silent_at("RRRT", [float(n) for n in range(60)]) == ([4.0], [])


@pytest.mark.parametrize("states", ["R", "D", "S"])
def test_a_process_that_works_is_waited_for_and_told_once(states: str) -> None:
    result, outcome = silent_at(states, [float(n) for n in range(61)])
    assert not result
    (line,) = outcome
    assert "--heartbeat" in line
    assert "worker 0 has been silent for 4.0 s" in line


def test_once_it_works_no_more_it_is_silent_a_heartbeat_later() -> None:
    working = [float(n) for n in range(10)]
    result, outcome = silent_at("S", working)
    assert len(outcome) == 1
    assert 12.0 <= result[0] <= 16.0


def test_who_is_silent_is_told_with_its_host_where_there_are_several() -> None:
    for hosts, result in ((("n1", "n1"), "it has been"), (("n1", "n2"), "host n2: it has been")):
        peers = WorkerConnections(BEAT_S, 30.0)
        for worker, host in enumerate(hosts):
            peers.add(worker, NOBODYS, host, 0.0)
        assert peers.why_silent(1) == f"{result} silent for {BEAT_S:g} s (--heartbeat)"


def test_who_waits_where_others_can_do_without_it_may_not_be_silent_for_long() -> None:
    peers = WorkerConnections(BEAT_S, 30.0)
    for worker in (0, 1, 2):
        peers.add(worker, NOBODYS, "", 0.0)
        peers.message_received(worker, 0.0, Beat(doing="computing"))
    assert peers.silent(0.1, 0.1) == []  # and not to be asked again for a while
    peers.waits(0.25, 1, 6, 0.5, 0.2)
    peers.waits(0.25, 2, 6, 0.5, 0.2)
    peers.message_received(2, 0.3, Beat(doing="computing"))  # its round is over
    peers.message_received(0, 1.0, Beat(6, doing="reducing"))
    assert peers.silent(1.2, 1.2) == []
    assert peers.silent(1.3, 1.3) == [1]
    assert "1.25 s at the end of a round" in peers.why_silent(1)
    assert "4 s (--heartbeat)" in peers.why_silent(2)


def test_who_beats_oftener_is_missed_sooner() -> None:
    """Each by its own pace: one that has not been in such a round yet beats as all workers do. One whose process cannot
    be seen has as long as these."""
    peers = WorkerConnections(BEAT_S, 30.0, lambda worker: None if worker == 3 else ProcessStatus("T", 1.0))
    for worker, every_s in enumerate((0.0, 0.1, 0.0, 0.1)):
        peers.add(worker, NOBODYS, "", 0.0)
        peers.message_received(worker, 0.0, Beat(6, "reducing", every_s=every_s))
        peers.beaten(worker, Beat(6, "reducing", every_s=every_s), 0.0)
        peers.waits(0.5, worker, 6, 0.1, 0.0)
    results = {}
    for at in (twentieth / 20 for twentieth in range(1, 41)):
        peers.message_received(0, at, Beat(6, "reducing"))
        results |= {worker: at for worker in peers.silent(at, at) if worker not in results}
    assert results == {1: 0.4, 2: 1.6, 3: 1.6}


def test_a_grace_that_has_become_longer_counts_before_the_pace_does() -> None:
    peers = WorkerConnections(BEAT_S, 30.0, lambda worker: ProcessStatus("T", 1.0))
    for worker in (0, 1):
        peers.add(worker, NOBODYS, "", 0.0)
        peers.message_received(worker, 0.0, Beat(6, "reducing", every_s=0.05))
        peers.beaten(worker, Beat(6, "reducing", every_s=0.05), 0.0)
        peers.waits(0.5, worker, 6, 0.4, 0.0)
    results = []
    for at in (twentieth / 20 for twentieth in range(1, 41)):
        peers.message_received(0, at, Beat(6, "reducing"))
        results += [at for worker in peers.silent(at, at) if worker == 1]
    assert results[0] == 1.6


def test_who_is_silent_and_has_not_come_where_others_wait_is_given_up_a_beat_later() -> None:
    """One that is heard has its time; so has one that works, if in one long call. Who is not stopped, and silent, is
    looked at twice, and not at once: it may be seen once a second."""
    now = 0.0
    peers = WorkerConnections(
        BEAT_S, 30.0, lambda worker: ProcessStatus("T" if worker == 2 else "S", now if worker == 3 else 1.0)
    )
    for worker in range(5):
        peers.add(worker, NOBODYS, "", 0.0)
        peers.message_received(worker, 0.0, Beat(doing="computing"))
    assert peers.silent(0.1, 0.1) == []  # and not to be asked again for a while
    now = 1.9
    peers.message_received(1, 1.8, Beat(doing="computing"))
    peers.message_received(0, 1.9, Beat(6, doing="reducing"))
    for worker in (*range(5), 9):  # 9 has gone
        peers.waits(0.25, worker, 6, 0.5, 1.9)
    now = 2.2
    assert peers.silent(2.2, 2.2) == [2]
    peers.remove(2)
    peers.message_received(1, 2.3, Beat(doing="computing"))  # it is not there, and lives
    peers.message_received(0, 2.9, Beat(6, doing="reducing"))
    for now in (2.9, 3.3):
        assert peers.silent(now, now) == []
    now = 3.5
    assert peers.silent(now, now) == [4]
    (result,) = peers.take_excused()
    assert result.worker == 3
    assert "longer than 1.25 s (grace)" in result.line


@pytest.mark.parametrize("others", [Beat(9, "computing"), Beat(9, "reducing")])
def test_when_the_exchange_is_over_nobody_is_hurried(others: Beat) -> None:
    """The last that was heard of worker 1 is that it waits; meanwhile it may be in one long call of the program."""
    peers = WorkerConnections(BEAT_S, 30.0)
    for worker in (0, 1):
        peers.add(worker, NOBODYS, "", 0.0)
        peers.message_received(worker, 0.0, Beat(6, "reducing"))
        peers.waits(0.25, worker, 6, 0.5, 0.0)
    silent = []
    for tenth in range(1, 43):
        peers.message_received(0, tenth / 10, others)
        silent.append((tenth / 10, peers.silent(tenth / 10, tenth / 10)))
    assert [at for at, who in silent if who == [1]] == [4.0]


def test_nobody_is_hurried_where_all_are_silent_and_all_are_where_one_is_heard_that_waits() -> None:
    peers = WorkerConnections(BEAT_S, 30.0)
    for worker in (0, 1, 2):
        peers.add(worker, NOBODYS, "", 0.0)
        peers.message_received(worker, 0.0, Beat(6, "reducing"))
        peers.waits(0.25, worker, 6, 0.5, 0.0)
    assert peers.silent(1.3, 1.3) == []
    peers.message_received(2, 1.4, Beat(6, "forming"))  # of those two one was lost
    peers.next_silence = 0.0
    assert peers.silent(1.5, 1.5) == [0, 1]


def waiting(*, pause_s: float) -> WorkerConnections:
    """Workers that wait at the end of a round that can do without them, and may be silent for 1.25 s."""
    peers = WorkerConnections(BEAT_S, 30.0, lambda worker: ProcessStatus("S", 1.0), pause_s=pause_s)
    for worker in (0, 1, 2):
        peers.add(worker, NOBODYS, "", 0.0)
        peers.message_received(worker, 0.0, Beat(6, "reducing"))
        peers.waits(0.25, worker, 6, 0.5, 0.0)
    return peers


def test_a_pause_of_the_network_or_of_this_process_is_not_the_fault_of_those_who_wait() -> None:
    peers = waiting(pause_s=30.0)
    assert [peers.silent(tenth / 10, tenth / 10) for tenth in range(35)] == [[]] * 35, "nobody at all was heard"
    peers = waiting(pause_s=0.0)
    assert peers.silent(2.0, 0.5) == [], "asked 1.5 s late: what they said may not be here yet"
    assert peers.silent(2.2, 2.2) == [], "halfway, their processes are looked at"
    peers.message_received(2, 3.6, Beat(6, "reducing"))
    assert peers.silent(3.8, 3.8) == [0, 1]


def test_who_loads_its_program_may_take_longer() -> None:
    assert silent_at("S", [1.0], loading=True)[0] == [30.0]


def lost(vitals: dict[int, str], *, speaks: int | None = None, pause_s: float = 30.0) -> dict[int, float]:
    """When each worker (of this state; "": not seen) counts as silent, if only ``speaks`` says anything after 0 s."""
    peers = WorkerConnections(
        BEAT_S, 30.0, lambda worker: ProcessStatus(vitals[worker], 1.0) if vitals[worker] else None, pause_s=pause_s
    )
    for worker in vitals:
        peers.add(worker, NOBODYS, "", 0.0)
        peers.message_received(worker, 0.1 * worker, Beat(doing="computing"))
    results: dict[int, float] = {}
    for tenth in range(600):
        at = tenth / 10
        if speaks is not None:
            peers.message_received(speaks, at, Beat(doing="computing"))
        for worker in peers.silent(at, at):
            results.setdefault(worker, at)
            peers.remove(worker)
    return results


def test_when_nobody_at_all_is_heard_it_is_a_pause_of_the_network() -> None:
    result = lost({0: "S", 1: "S", 2: "S"})
    assert min(result.values()) >= 30.0
    assert min(lost({0: "", 1: ""}).values()) >= 30.0, "elsewhere, where nobody sees them"
    assert lost({0: "S"})[0] >= 30.0


def test_a_pause_excuses_nobody_who_is_seen_not_to_live_and_nobody_alone_whom_nobody_sees() -> None:
    result = lost({0: "S", 1: "T", 2: "Z"})
    assert result[1] < 6.0
    assert result[2] < 6.0
    assert result[0] >= 30.0
    assert lost({0: ""})[0] == 4.0


def test_while_one_is_heard_there_is_no_pause() -> None:
    assert lost({0: "S", 1: "S"}, speaks=0) == {1: pytest.approx(4.2, abs=0.15)}


@pytest.mark.parametrize(
    ("heartbeat_s", "workers", "every_s"),
    [(5.0, 1, 0.5), (1.0, 1, 0.2), (5.0, 3000, 3000 / BEATS_A_SECOND), (5.0, 8192, 1.0)],
)
def test_more_workers_beat_more_seldom_but_five_times_in_a_heartbeat(
    heartbeat_s: float, workers: int, every_s: float
) -> None:
    assert beat_every_s(heartbeat_s, workers) == every_s
