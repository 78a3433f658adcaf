"""What is done to a run, and when: against a clock that a test moves, and a handle that only notes."""

from __future__ import annotations

import signal
from itertools import islice
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.records import FaultInjected, Reported
from elastune.core.mesh import Mesh
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.base import ElasticHandle, Event
from elastune.runtime.job.fault_injection import Injector, Planned, arrivals, parse_chaos


class Clock:
    time = 50.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


class NotingHandle(ElasticHandle):
    def __init__(self, workers: int = 3, low: int = 1, high: int = 4) -> None:
        self.spec = RunSpec(
            Program(Path("none.py")),
            Path("out"),
            execution=ExecutionSettings(workers=workers),
            elastic=Elastic(low, high),
        )
        self.living = {n: 1000 + n for n in range(workers)}
        self.asked: list[int] = []
        self.shapes: list[str] = []
        self.killed: list[int] = []
        self.at = 0

    pids = property(lambda self: dict(self.living))  # type: ignore[assignment]
    members = property(lambda self: list(self.living))  # type: ignore[assignment]
    step = property(lambda self: self.at)  # type: ignore[assignment]
    alive = property(lambda self: len(self.living))  # type: ignore[assignment]

    def poll(self) -> list[Event]:
        return []

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def resize(self, workers: int, why: str = "") -> None:
        self.asked.append(workers)

    def reshape(self, mesh: Mesh, why: str = "") -> None:
        self.shapes.append(str(mesh))

    def kill_worker(self, worker: int) -> None:
        self.killed.append(worker)

    def corrupt(self, worker: int, what: str, *, once: bool, seed: int) -> None:
        raise AssertionError("no fault of these tests is silent")


def injector(text: str, clock: Clock, **more: object) -> tuple[Injector, list[tuple[int, int]]]:
    signals: list[tuple[int, int]] = []
    made = Injector(
        parse_chaos(text),
        3,
        clock=clock,
        send_signal=lambda process, number: signals.append((process, number)),
        **more,  # type: ignore[arg-type]
    )
    return made, signals


def test_words_become_rates_and_points() -> None:
    chaos = parse_chaos("kill:0.5/s, stop,kill@40%,join@step:120")
    assert chaos.rates == {"kill": 0.5, "stop": 0.05}
    assert chaos.planned == (Planned("kill", part=0.4), Planned("join", step=120))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "boom",
        "kill:",
        "kill:0/s",
        "kill:1",
        "kill@",
        "kill@0%",
        "kill@101%",
        "kill@step:x",
        "kill,kill",
        "kill:1e9/s",
        "kill:1.1.1/s",
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--chaos|number"):
        parse_chaos(text)


def test_arrivals_are_seeded_and_come_at_their_rate() -> None:
    chaos = parse_chaos("kill:2/s,stop:1/s")
    found = list(islice(arrivals(chaos, 7), 3000))
    assert found == list(islice(arrivals(chaos, 7), 3000))
    assert found != list(islice(arrivals(chaos, 8), 3000))
    assert found == sorted(found)
    assert found[-1][0] == pytest.approx(1000, rel=0.1)
    assert sum(kind == "kill" for _, kind in found) == pytest.approx(2000, rel=0.1)


def test_each_fault_comes_in_its_time() -> None:
    clock, handle = Clock(), NotingHandle()
    made, _ = injector("kill:1/s", clock)
    assert made.act(handle) == []
    (first, _), (second, _) = islice(arrivals(parse_chaos("kill:1/s"), 3), 2)
    clock.time += first - 0.001
    assert made.act(handle) == []
    assert 0 < made.wait_s() <= 0.0011
    clock.time += 0.002
    assert made.act(handle) == [FaultInjected("kill", handle.killed[0])]
    clock.time += second
    made.act(handle)
    assert len(set(handle.killed)) == 2, "no worker is struck twice"


def test_the_last_healthy_member_is_spared_and_a_newcomer_is_not() -> None:
    clock, handle = Clock(), NotingHandle(workers=2)
    made, _ = injector("kill@step:1,kill@step:2,notice@step:3", clock)
    handle.at = 2
    assert len(made.act(handle)) == 1
    handle.living = {n: p for n, p in handle.living.items() if n not in handle.killed}
    handle.at = 3
    assert made.act(handle) == []
    assert made.not_injected == dict.fromkeys(("kill@step:2", "notice@step:3"), "the last healthy worker is spared")
    assert made.planned_missing


def test_a_frozen_worker_goes_on_after_two_heartbeats() -> None:
    clock, handle = Clock(), NotingHandle()
    made, signals = injector("stop@step:1,stop@step:1", clock)
    handle.at = 1
    stopped = [fault.worker for fault in made.act(handle)]
    assert signals == [(1000 + n, signal.SIGSTOP) for n in stopped]
    del handle.living[stopped[0]]  # it was ended meanwhile: its number may be another's
    clock.time += 9.9
    made.act(handle)
    assert len(signals) == 2
    clock.time += 0.2
    made.act(handle)
    assert signals[2:] == [(1000 + stopped[1], signal.SIGCONT)]


def test_sizes_stay_within_bounds() -> None:
    clock, handle = Clock(), NotingHandle(workers=3, low=2, high=4)
    made, _ = injector("join@step:1,join@step:1,leave@step:2,leave@step:2,leave@step:2", clock)
    handle.at = 1
    assert made.act(handle) == [FaultInjected("join")]
    handle.at = 2
    assert len(made.act(handle)) == 2
    assert handle.asked == [4, 3, 2]


def test_a_notice_is_a_signal() -> None:
    handle = NotingHandle()
    made, signals = injector("notice@step:0", Clock())
    (fault,) = made.act(handle)
    assert signals == [(1000 + fault.worker, signal.SIGTERM)]


def test_a_part_of_the_run_needs_its_length() -> None:
    clock, handle = Clock(), NotingHandle()
    by_steps, _ = injector("kill@40%", clock, max_steps=100)
    handle.at = 39
    assert by_steps.act(handle) == []
    handle.at = 40
    assert len(by_steps.act(handle)) == 1
    by_epochs, _ = injector("join@40%", clock, epochs=5)
    assert by_epochs.act(handle) == []
    by_epochs.observe(Reported(1, 20, 0, 0.0, {}))
    assert len(by_epochs.act(handle)) == 1
    unknown, _ = injector("kill@40%", clock)
    assert unknown.act(handle) == []
    assert unknown.not_injected == {"kill@40%": "the run ended before its time"}
    assert unknown.planned_missing


def test_a_rate_that_brought_nothing_is_told_and_one_that_brought_something_is_not() -> None:
    clock, handle = Clock(), NotingHandle(workers=3, low=3, high=3)
    made, _ = injector("kill:1/s,join:1/s,stop:0.001/s", clock)
    made.act(handle)
    clock.time += 5
    assert {fault.fault for fault in made.act(handle)} == {"kill"}
    assert made.not_injected == {
        "stop": "none fell due at 0.001 a second",
        "join": "--workers allows no other number",
    }
    assert not made.planned_missing, "a rate promises an average"
