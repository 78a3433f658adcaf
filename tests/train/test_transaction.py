"""When a step counts: every event in every phase, and the gate that a step passes before it may count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from elastune.core.clock import SystemClock
from elastune.core.errors import UserError
from elastune.core.journal.records import StepsCompleted
from elastune.core.run import Position
from elastune.core.slots import shares
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.train.agreement import NO_MARKS
from elastune.train.data.fingerprint import PRIME
from elastune.train.data.sample_log import SampleLog
from elastune.train.data.source import StepPlan
from elastune.train.progress import Progress, StepTimes
from elastune.train.step import COUNTED, ControlVector, Phase, StepTransaction, check_committed_samples

PLAN = StepPlan(
    offset=16,
    size=8,
    slices=shares(8, 2, 1, 0, "exact", None),
    contributors=1,
    workers=1,
    checksum=12,
    length=40,
)
CONTROL = ControlVector(samples=8.0, checksum=12.0)
FIRST, LAST = PLAN.slices
LOSS = torch.ones(())
NO_WAY = "no way"


class FakeSync:
    """Sums what one worker has; ``breaks``: the reduction fails."""

    plan = SyncPlan()
    absent = ()

    def __init__(self) -> None:
        self.control: list[float] = []
        self.totals: list[float] = []
        self.breaks = False
        self.meets_after_step = False
        self.heard: list[str] = []

    def begin(self, share: Any, *, starts_step: bool) -> None:
        self.heard.append(f"begin {'step' if starts_step else 'slice'}")

    def backward(self, loss: torch.Tensor, share: Any) -> None:
        self.heard.append("backward")
        if self.breaks:
            raise GroupBroken("a worker is lost")
        self.totals = self.control

    def adopt_result(self, results: Any) -> None:
        self.heard.append("adopt")
        self.totals = self.control

    def abandon(self) -> None:
        self.heard.append("abandon")

    def after_step(self) -> None:
        self.heard.append("after step")
        if self.breaks:
            raise GroupBroken("a worker is lost")
        self.totals = self.control


class FakeWorkers(WorkerGroup):
    """Its survivors have the sum (``serves``), or not."""

    serves: Callable[[], None] | None = None

    def __init__(self) -> None:
        super().__init__(Group())
        self.ended: list[bool] = []

    def recover(self, error: GroupBroken) -> bool:
        if self.serves is not None:
            self.serves()
        return self.serves is not None

    def end_step(self, heard: float, contributors: int, *, served: bool) -> None:
        self.ended.append(served)


class World:
    """A transaction with all that it touches."""

    def __init__(self) -> None:
        self.sync, self.workers = FakeSync(), FakeWorkers()
        self.sent: list[Any] = []
        self.log = SampleLog(0, self.sent.append)
        self.progress = Progress(StepTimes(SystemClock()), position=Position(epoch=1, offset=16, step=5, samples=56))
        self.step = StepTransaction(self.workers, self.progress, self.log)

    def to(self, phase: Phase) -> World:
        step, self.sync.meets_after_step = self.step, phase is Phase.APART
        if phase is not Phase.BETWEEN:
            step.begin(PLAN, self.sync, CONTROL)
            step.begin_slice(FIRST)
        match phase:
            case Phase.REDUCED | Phase.APART:
                step.reduce(LOSS, 0)
                step.begin_slice(LAST)
                step.reduce(LOSS, 0)
            case Phase.LOST:
                step.abandon()
            case Phase.LEFT:
                step.leave()
        assert step.phase is phase
        self.sync.heard.clear()
        return self


EVENTS: dict[str, Callable[[World], Any]] = {
    "begin": lambda w: w.step.begin(PLAN, w.sync, CONTROL),
    "begin_slice": lambda w: w.step.begin_slice(LAST),
    "reduce": lambda w: w.step.reduce(LOSS, 0),
    "adopt_result": lambda w: w.step.adopt_result([]),
    "abandon": lambda w: w.step.abandon(),
    "commit": lambda w: w.step.commit(),
    "arrive": lambda w: w.step.arrive(),
    "leave": lambda w: w.step.leave(),
    "reject": lambda w: w.step.reject(),
    "meet": lambda w: w.step.meet(0, repeatable=True),
    "recover": lambda w: w.step.recover(GroupBroken("a worker is lost")),
}
COLUMNS = (Phase.BETWEEN, Phase.OPEN, Phase.APART, Phase.REDUCED, Phase.LOST, Phase.LEFT)
AFTER: dict[str, tuple[Phase | str, ...]] = {
    "begin": (Phase.OPEN, NO_WAY, NO_WAY, NO_WAY, Phase.OPEN, NO_WAY),
    "begin_slice": (NO_WAY, Phase.OPEN, NO_WAY, NO_WAY, NO_WAY, NO_WAY),
    "reduce": (NO_WAY, Phase.OPEN, NO_WAY, NO_WAY, NO_WAY, NO_WAY),
    "adopt_result": (NO_WAY, Phase.REDUCED, Phase.REDUCED, NO_WAY, NO_WAY, NO_WAY),
    "abandon": (NO_WAY, Phase.LOST, Phase.LOST, Phase.LOST, NO_WAY, NO_WAY),
    "commit": (NO_WAY, NO_WAY, NO_WAY, Phase.BETWEEN, NO_WAY, NO_WAY),
    "arrive": (Phase.BETWEEN, NO_WAY, NO_WAY, NO_WAY, Phase.BETWEEN, NO_WAY),
    "leave": (NO_WAY, Phase.LEFT, NO_WAY, NO_WAY, Phase.LEFT, NO_WAY),
    "reject": (NO_WAY, NO_WAY, NO_WAY, Phase.LEFT, NO_WAY, NO_WAY),
    "meet": (NO_WAY, NO_WAY, Phase.REDUCED, NO_WAY, NO_WAY, NO_WAY),
    "recover": (Phase.BETWEEN, Phase.LOST, Phase.LOST, Phase.REDUCED, Phase.LOST, Phase.LEFT),
}


@pytest.mark.parametrize("event", sorted(EVENTS))
@pytest.mark.parametrize("phase", COLUMNS)
def test_every_event_in_every_phase(phase: Phase, event: str) -> None:
    world = World().to(phase)
    expected = AFTER[event][COLUMNS.index(phase)]
    before = world.progress.position
    if expected is NO_WAY:
        with pytest.raises((RuntimeError, UserError)):
            EVENTS[event](world)
        assert (world.step.phase, world.progress.position) == (phase, before)
    else:
        EVENTS[event](world)
        assert world.step.phase is expected
    counted = 1 if (event, phase) == ("commit", Phase.REDUCED) else 0
    assert world.progress.position.step == before.step + counted


@pytest.mark.parametrize("phase", COLUMNS)
def test_what_each_phase_says(phase: Phase) -> None:
    step = World().to(phase).step
    assert step.completed_steps == 5 + (phase is Phase.REDUCED)
    assert step.more_to_come == (phase in (Phase.OPEN, Phase.LOST, Phase.LEFT))
    assert step.reducing == (phase is Phase.APART)
    assert step.owes_backward == (phase is Phase.OPEN)


def test_a_step_from_its_beginning_to_its_commit() -> None:
    world = World()
    step, heard = world.step, world.sync.heard
    step.arrive()
    step.begin(PLAN, world.sync, CONTROL)
    step.begin_slice(FIRST)
    assert step.more_to_come
    assert step.reduce(LOSS, 0) is None
    assert not step.owes_backward
    step.begin_slice(LAST)
    assert not step.more_to_come, "the last batch of a step may end it"
    assert step.reduce(LOSS, 0) == replace(CONTROL, marks=list(NO_MARKS), votes=[], times=[])
    assert heard == ["begin step", "backward", "begin slice", "backward"]
    assert world.workers.ended == [False]
    step.commit()
    assert world.progress.position == Position(epoch=1, offset=24, step=6, samples=64)
    assert world.progress.spans == [[1, 16, 24, 40, 6, 6]]
    world.log.flush()
    assert [(r.start, r.stop, r.first_step) for r in world.sent if isinstance(r, StepsCompleted)] == [(16, 24, 6)]


def test_steps_before_a_worker_joined_stay_those_of_the_member_that_took_them() -> None:
    sent: list[Any] = []
    member, joiner = SampleLog(0, sent.append), SampleLog(5, sent.append)
    member.add(Position(step=4, offset=32), 1, 8, 64, view=1, workers=1)
    joiner.load_state_dict(member.state_dict())
    joiner.add(Position(step=5, offset=40), 1, 8, 64, view=2, workers=2)
    joiner.flush()
    assert [(r.worker, r.version, r.first_step, r.last_step) for r in sent] == [(0, 1, 5, 5), (5, 2, 6, 6)]
    joiner.load_state_dict({"open": {**asdict(sent[0]), "version": 2}})  # another worker's checkpoint, in the same view
    joiner.add(Position(step=5, offset=40), 1, 8, 64, view=2, workers=2)
    joiner.flush()
    assert [(r.worker, r.first_step) for r in sent[2:]] == [(0, 5), (5, 6)]


def break_the_reduction(world: World) -> ControlVector | None:
    world.step.begin(PLAN, world.sync, CONTROL)
    world.step.begin_slice(FIRST)
    world.step.reduce(LOSS, 0)
    world.step.begin_slice(LAST)
    world.sync.breaks = True
    return world.step.reduce(LOSS, 0)


def test_a_broken_step_that_nobody_completed_is_lost_without_a_trace() -> None:
    world = World()
    assert break_the_reduction(world) is None
    assert world.step.phase is Phase.LOST
    assert world.sync.heard[-1] == "abandon"
    assert not world.workers.synchronised, "what the user's lines gather now is this worker's alone"
    assert world.workers.ended == []
    assert world.progress.position.step == 5
    world.step.arrive()
    assert world.workers.synchronised


def test_a_broken_step_that_a_survivor_completed_counts() -> None:
    world = World()

    def serve() -> None:
        assert world.step.reducing, "the survivors' result is one of a step"
        world.step.adopt_result([])

    world.workers.serves = serve
    assert break_the_reduction(world) is not None
    assert world.step.phase is Phase.REDUCED
    assert "abandon" not in world.sync.heard
    assert world.workers.synchronised
    assert world.workers.ended == [True]
    world.step.commit()
    assert world.progress.position.step == 6


def apart_and_broken() -> World:
    world = World().to(Phase.APART)
    assert world.workers.ended == [], "the round does not count yet"
    assert not world.step.more_to_come, "the user's lines may do what ends a step"
    world.sync.breaks = True
    return world


def test_a_round_whose_exchange_broke_is_lost_or_served() -> None:
    world = apart_and_broken()
    assert world.step.meet(0, repeatable=True) is None
    assert (world.step.phase, world.sync.heard) == (Phase.LOST, ["after step", "abandon"])
    served = apart_and_broken()
    served.workers.serves = lambda: served.step.adopt_result([])
    assert served.step.meet(0, repeatable=True) is not None
    assert (served.step.phase, served.workers.ended) == (Phase.REDUCED, [True])


def test_a_round_that_cannot_be_done_again_here_sends_all_back() -> None:
    world = apart_and_broken()
    world.step.unrepeatable = False
    with pytest.raises(GroupBroken):  # of workers that cannot begin again
        world.step.meet(0, repeatable=False)
    assert world.step.unrepeatable


def test_an_optimizer_that_evaluates_again_completes_one_step() -> None:
    world = World().to(Phase.REDUCED)
    with pytest.raises(UserError, match="belongs once"):
        world.step.reduce(LOSS, 0)
    world.step.reevaluates_loss = True
    assert world.step.reduce(LOSS, 0) is None
    assert world.workers.ended == [False], "once"
    world.step.commit()
    assert world.progress.position.step == 6


def test_what_cannot_be_repeated_is_forgotten_at_a_boundary() -> None:
    step = World().step
    assert step.unrepeatable, "what training begins with"
    step.arrive()
    assert not step.unrepeatable


@pytest.mark.parametrize(
    "result",
    [
        replace(CONTROL, samples=7.0),
        replace(CONTROL, samples=16.0),
        replace(CONTROL, checksum=11.0),
        replace(CONTROL, checksum=0.0),
        ControlVector(),
    ],
)
def test_the_gate_refuses_other_samples(result: ControlVector) -> None:
    with pytest.raises(RuntimeError, match="workers disagree about the data"):
        check_committed_samples(PLAN, result)


def test_the_gate_counts_the_samples_of_the_longest_rounds() -> None:
    """Of more samples than single precision tells apart, as two workers' control vectors add them up."""
    halves = 2**24 + 1, 2**24 + 2
    plan = replace(PLAN, size=sum(halves))
    vectors = [torch.tensor(ControlVector(samples=half % COUNTED, checksum=6.0).to_list()) for half in halves]
    result = ControlVector.of((vectors[0] + vectors[1]).tolist(), 0)
    check_committed_samples(plan, result)
    with pytest.raises(RuntimeError, match="modulo 4,096"):
        check_committed_samples(replace(plan, size=plan.size + 1), result)


def test_the_gate_lets_the_samples_of_all_workers_through() -> None:
    check_committed_samples(PLAN, CONTROL)
    check_committed_samples(PLAN, replace(CONTROL, checksum=12.0 + 3 * PRIME))


def test_a_wrong_sum_completes_no_step() -> None:
    world = World()
    world.step.begin(PLAN, world.sync, replace(CONTROL, checksum=13.0))
    world.step.begin_slice(FIRST)
    world.step.reduce(LOSS, 0)
    world.step.begin_slice(LAST)
    with pytest.raises(RuntimeError, match="workers disagree about the data"):
        world.step.reduce(LOSS, 0)
    assert world.workers.ended == []
