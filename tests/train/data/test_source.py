"""What a pass goes through: the map-style one, and a stream, of which nobody knows the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal.records import RoundsShortened, StepsCompleted, StepsPlanned, SyncChangesUnreached
from elastune.core.run import ExecutionSettings, Position
from elastune.core.sync_plan import SyncPlan, SyncSchedule
from elastune.train.data.fingerprint import PRIME
from elastune.train.data.loading import LoaderOptions
from elastune.train.data.source import MapStyleSource, StepSource, plan_steps
from elastune.train.progress import PlannedSteps, steps_planned
from elastune.train.step import StopTraining


class Stream:
    turns = 1
    """Sample n is a function of n: what a reader of a stream gives that can begin at a place. It has no end."""

    def batches(self, offset: int, size: int) -> Iterator[range]:
        return (range(start, start + size) for start in itertools.count(offset, size))

    def length(self, offset: int, size: int) -> int:
        return 0

    def ends(self, place: int) -> bool:
        return False

    def checksum(self, places: range) -> int:
        return sum(places) % PRIME

    def fetch(self, parts: Iterator[range]) -> Iterator[Any]:
        for part in parts:
            x = torch.sin(torch.arange(part.start, part.stop, dtype=torch.float64)[:, None] * torch.arange(1, 7))
            yield x, x.sum(1, keepdim=True)

    def probe(self) -> range:
        return range(0)


def map_style(count: int, drop_last: bool = False) -> MapStyleSource:
    data = TensorDataset(torch.arange(count))
    return MapStyleSource(data, 3, 0, shuffle=True, drop_last=drop_last, loading=LoaderOptions())


@pytest.mark.parametrize("source", [Stream(), map_style(100)], ids=["stream", "map-style"])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_parts_are_the_batch(source: StepSource, workers: int) -> None:
    """Their places add up to the global batch, and so do their checksums, whatever the position is."""
    execution = ExecutionSettings(num_slots=6)
    plans = [
        list(itertools.islice(plan_steps(source, 12, Position(offset=24, step=2), execution, workers, rank), 3))
        for rank in range(workers)
    ]
    for same_step in zip(*plans, strict=True):
        places = sorted(place for plan in same_step for part in plan.own_parts for place in part)
        offset = same_step[0].offset
        assert places == list(range(offset, offset + 12))
        sums = [source.checksum(part) for plan in same_step for part in plan.own_parts]
        assert sum(sums) % PRIME == same_step[0].checksum
        assert {plan.contributors for plan in same_step} == {workers}


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_pass_ends_where_its_length_says(drop_last: bool) -> None:
    source = map_style(50, drop_last)
    sizes = [plan.size for plan in plan_steps(source, 16, Position(), ExecutionSettings(num_slots=4), 1, 0)]
    assert sizes == [16, 16, 16, *([] if drop_last else [2])]
    assert sum(sizes) == source.length(0, 16)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [16, 25, 60])
@pytest.mark.parametrize(("at", "epochs"), [(Position(), 3), (Position(1, 32, 7), 3), (Position(2, 48, 99), 3)])
def test_the_steps_of_a_run_are_known_beforehand(drop_last: bool, size: int, at: Position, epochs: int) -> None:
    source = map_style(50, drop_last)

    def steps(position: Position) -> int:
        return len(list(plan_steps(source, size, position, ExecutionSettings(num_slots=4), 1, 0)))

    expected = at.step + steps(at) + (epochs - at.epoch - 1) * steps(Position())
    assert steps_planned(source, at, size, epochs) == (expected if size <= 50 or not drop_last else None)
    assert steps_planned(source, at, size, 0) is None, "nobody knows how many epochs"
    assert steps_planned(Stream(), at, size, epochs) is None


def test_a_run_tells_its_steps_and_again_when_its_batch_changes(tmp_path: Path) -> None:
    sent: list[Any] = []
    session = lone_session(tmp_path, send=sent.append)
    model = nn.Linear(6, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.zeros(48, 6), torch.zeros(48, 1))
    for epoch in session.epochs(3):
        for x, y in session.batches(data, batch_size=12):
            session.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if (epoch, session.step) == (1, 5):
                session.change(batch_size=6)
    results = [record.steps for record in sent if isinstance(record, StepsPlanned)]
    assert results[0] == 12
    assert results[-1] == session.step > 12


def test_rounds_that_are_longer_than_a_pass_are_told_and_those_longer_than_training_refused() -> None:
    """A pass over 50 samples has 5 steps."""
    sent: list[Any] = []
    planned, begin = PlannedSteps(sent.append), Position()

    def tell(every: int, at: Position = begin, epochs: int = 2, source: Any = None) -> list[Any]:
        sent.clear()
        planned.report(source or map_style(50), at, 12, epochs, SyncPlan("local", 4, every))
        return [record for record in sent if isinstance(record, RoundsShortened)]

    assert tell(5) == []
    assert tell(6) == [RoundsShortened("local:learners=4,every=6", 5)]
    assert tell(6) == [], "it was told"
    assert tell(10) == [RoundsShortened("local:learners=4,every=10", 5)]
    with pytest.raises(UserError, match="longer than training .*every=11, 10 steps.*: use every=5 or less"):
        tell(11)
    with pytest.raises(UserError, match="longer than training"):
        tell(6, epochs=1)
    assert tell(11, Position(1, 0, 5)) == [RoundsShortened("local:learners=4,every=11", 5)], "a policy's, in mid-run"
    assert tell(99, epochs=0) == [RoundsShortened("local:learners=4,every=99", 5)], "nobody knows how many epochs"
    assert tell(99, source=Stream()) == []
    planned.report(map_style(50), begin, 12, 1, SyncPlan())


def test_changes_of_strategy_that_never_come_are_told_once(tmp_path: Path) -> None:
    """As soon as the number of steps is known, and where the run ends before them after all."""
    sent: list[Any] = []
    schedule = SyncSchedule.parse("3=local:learners=8,every=2; 10=allreduce; 40=allreduce")
    planned = PlannedSteps(sent.append, schedule)

    def told() -> list[Any]:
        results = [record for record in sent if isinstance(record, SyncChangesUnreached)]
        sent.clear()
        return results

    planned.report(map_style(50), Position(), 12, 2, SyncPlan())
    assert told() == [SyncChangesUnreached("10=allreduce; 40=allreduce", 10)]
    planned.report(map_style(50), Position(1, 0, 5), 12, 2, SyncPlan())
    assert told() == []
    planned.report(map_style(50), Position(1, 0, 5), 6, 2, SyncPlan())
    assert told() == [SyncChangesUnreached("40=allreduce", 14)], "a smaller batch takes more steps"
    planned.over(14)
    assert told() == []
    planned.over(9)
    assert told() == [SyncChangesUnreached("10=allreduce; 40=allreduce", 9)], "it was ended early"
    PlannedSteps(sent.append, schedule).over(50)
    assert told() == []
    stream = PlannedSteps(sent.append, schedule)
    stream.report(Stream(), Position(), 12, 2, SyncPlan())
    assert told() == [], "nobody knows its length"
    stream.over(12)
    assert told() == [SyncChangesUnreached("40=allreduce", 12)]
    longer = PlannedSteps(sent.append, SyncSchedule.parse("3=local:learners=8,every=11; 40=local:every=99"))
    with pytest.raises(UserError, match="longer than training .*every=11, 10 steps"):
        longer.report(map_style(50), Position(), 12, 2, SyncPlan())


@pytest.mark.parametrize("end", ["complete", "requested", "program"])
def test_changes_that_never_came_are_told_where_a_run_ends_for_good(tmp_path: Path, end: str) -> None:
    sent: list[Any] = []
    session = lone_session(
        tmp_path,
        send=sent.append,
        stop_requested=lambda: end == "requested" and session.step == 2,
        sync_schedule=SyncSchedule.parse("7=parameter_server"),
    )
    model = nn.Linear(6, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.zeros(24, 6), torch.zeros(24, 1))
    with suppress(StopTraining):
        for _ in session.epochs(4):
            for x, y in session.batches(data, batch_size=12):
                session.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if end == "program":
                session.stop("enough")
    session.finish()
    results = [record for record in sent if isinstance(record, SyncChangesUnreached)]
    assert results == ([SyncChangesUnreached("7=parameter_server", 2)] if end == "program" else [])
    assert session.step == {"complete": 8, "program": 2, "requested": 3}[end]


def test_a_stream_trains_stops_and_goes_on(tmp_path: Path) -> None:
    """In two parts, on steps that nobody counted beforehand, with the weights of one part."""

    def run(out: Path, steps: int) -> tuple[torch.Tensor, list[Any]]:
        sent: list[Any] = []
        session = lone_session(out, send=sent.append, max_steps=steps, resume=True, checkpoint_every_steps=None)
        model = nn.Linear(6, 1).double()
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for _ in session.epochs(1):
            for x, y in session._parts.loop.training_pass(lambda epoch: Stream(), 16, 1):
                session.backward(F.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        session.flush()
        assert (session.step, session.samples, session.stopped) == (steps, 16 * steps, "max_steps")
        return model.weight.detach().clone(), [r for r in sent if isinstance(r, StepsCompleted)]

    whole, _ = run(tmp_path / "whole", 9)
    run(tmp_path / "parts", 4)
    parts, result = run(tmp_path / "parts", 9)
    assert torch.equal(parts, whole)
    assert [(r.start, r.stop, r.first_step, r.last_step) for r in result] == [(64, 144, 5, 9)]


def test_checksums_tell_samples_apart_and_add_up() -> None:
    """They are sums over the samples that are drawn, modulo a prime."""

    def over(*order: int) -> MapStyleSource:
        data = TensorDataset(torch.zeros(70_001))
        return MapStyleSource(data, 3, 0, shuffle=False, drop_last=False, loading=LoaderOptions(), sampler=order)

    one, other = over(5, 900, 70_000, 900), over(5, 901, 70_000, 900)
    whole = one.checksum(range(4))
    assert whole == (5 + 900 + 70_000 + 900) % PRIME != other.checksum(range(4))
    assert (one.checksum(range(1)) + one.checksum(range(1, 4))) % PRIME == whole
    assert one.checksum(range(2, 2)) == 0


def test_whole_batches_are_the_rows_of_any_tensors() -> None:
    """Copies, with the layout that indexing gives."""
    images = torch.randn(9, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors = images, torch.arange(9), torch.randn(9, 5) > 0, torch.randn(5, 9).T, torch.arange(9).to(torch.uint16)
    source = MapStyleSource(TensorDataset(*tensors), 3, 0, shuffle=True, drop_last=False, loading=LoaderOptions())
    (batch,) = source.fetch(iter([range(2, 7)]))
    places = source._order[2:7]
    for result, tensor in zip(batch, tensors, strict=True):
        assert torch.equal(result, tensor[places])
        assert result.stride() == tensor[places].stride()
        assert result.data_ptr() != tensor.data_ptr()
