"""The loop over batches: its length, the index of a global batch, and loops that count slots instead of batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.train.session import Session

DATA = TensorDataset(torch.rand(22, 3, generator=torch.Generator().manual_seed(1)))
FOUR, ONE = ExecutionSettings(num_slots=4), ExecutionSettings(num_slots=1)


def prepared(session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, optimizer


def update(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    session.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def logs_by_index(session: Session) -> list[Any]:
    model, optimizer = prepared(session)
    seen = []
    for epoch in session.epochs(2):
        batches = session.batches(DATA, 8)
        seen.append(len(batches))
        for (x,) in batches:
            update(session, model, optimizer, x)
            if session.ends_step:
                seen.append((epoch, session.batch_index, session.step))
    return seen


@pytest.mark.parametrize("execution", [ONE, FOUR, ExecutionSettings(num_slots=2, micro_batch=3)])
def test_length_and_index_are_of_global_batches(tmp_path: Path, execution: ExecutionSettings) -> None:
    seen = logs_by_index(lone_session(tmp_path, execution=execution))
    assert seen == [3, (0, 0, 0), (0, 1, 1), (0, 2, 2), 3, (1, 0, 3), (1, 1, 4), (1, 2, 5)]


def test_the_length_is_the_loaders(tmp_path: Path) -> None:
    session = lone_session(tmp_path, execution=FOUR)
    prepared(session)
    next(iter(session.epochs(1)))
    sampler = torch.utils.data.BatchSampler(range(20), 6, drop_last=False)
    for loader in (
        DataLoader(DATA, 8),
        DataLoader(DATA, 8, drop_last=True),
        DataLoader(DATA, batch_sampler=sampler),
    ):
        session._passes_in_epoch = 0
        assert len(session.batches(loader)) == len(loader)
        assert len(session.batches(DataLoader(DATA, 8), train=False)) == 3


def test_a_stream_has_no_length(tmp_path: Path) -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.rand(8, 3))

    session = lone_session(tmp_path, execution=FOUR)
    prepared(session)
    next(iter(session.epochs(1)))
    with pytest.raises(TypeError, match="length of a stream"):
        len(session.batches(Stream(), 4))
    with pytest.raises(TypeError, match="length of a stream"):
        len(session.batches(Stream(), 4, train=False))


def test_the_index_counts_batches_and_not_turns(tmp_path: Path) -> None:
    session = lone_session(tmp_path, execution=ONE)
    model, optimizer = prepared(session)
    seen = []
    for _ in session.epochs(1):
        for (x,) in session.batches(DATA, 8, turns=2):
            update(session, model, optimizer, x)
            seen.append((session.batch_index, session.turn))
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def breaks_by_count(session: Session) -> None:
    model, optimizer = prepared(session)
    for _ in session.epochs(1):
        for i, (x,) in enumerate(session.batches(DATA, 8)):
            update(session, model, optimizer, x)
            if i == 3:
                break


def accumulates_by_count(session: Session) -> None:
    model, optimizer = prepared(session)
    for _ in session.epochs(1):
        for i, (x,) in enumerate(session.batches(DATA, 8)):
            session.backward(model(x).square().mean() / 4)
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()


def stops_by_a_count_of_its_own(session: Session) -> None:
    model, optimizer = prepared(session)
    steps = 0
    for _ in session.epochs(4):
        for (x,) in session.batches(DATA, 8):
            update(session, model, optimizer, x)
            steps += 1
        if steps >= 16:
            break


def takes_the_first(session: Session) -> None:
    model, optimizer = prepared(session)
    for _ in session.epochs(1):
        for (x,) in itertools.islice(session.batches(DATA, 8), 4):
            update(session, model, optimizer, x)


def saves_by_count(session: Session) -> None:
    model, optimizer = prepared(session)
    for _ in session.epochs(1):
        for i, (x,) in enumerate(session.batches(DATA, 8)):
            update(session, model, optimizer, x)
            if i % 2 == 0:
                session.save()


COUNTING: dict[Callable[[Session], None], str] = {
    breaks_by_count: r"got test_batch_loops.py:\d+: (i == 3|break)\)",
    accumulates_by_count: r"got test_batch_loops.py:\d+: \(i \+ 1\) % 4 == 0\): call it in each pass",
    stops_by_a_count_of_its_own: r"got test_batch_loops.py:\d+: steps >= 16\): count by session.batch_index",
    takes_the_first: r"got test_batch_loops.py:\d+: itertools.islice",
    saves_by_count: r"got test_batch_loops.py:\d+: i % 2 == 0\): count by session.batch_index",
}


@pytest.mark.parametrize("program", COUNTING)
@pytest.mark.parametrize("execution", [FOUR, ExecutionSettings(num_slots=1, micro_batch=2)])
def test_a_loop_that_counts_slots_is_refused_with_its_line(tmp_path: Path, program: Any, execution: Any) -> None:
    session = lone_session(tmp_path, execution=execution)
    with pytest.raises(UserError, match=COUNTING[program]):
        program(session)
    assert session.step == 0


def test_files_pictures_and_loops_of_its_own_by_a_count_are_left_alone(tmp_path: Path) -> None:
    """They touch nothing that is trained."""

    class Picture:
        def save(self, file: Path) -> None:
            file.write_bytes(b"")

        def resize(self, size: int) -> Picture:
            return self

    def program(session: Session) -> None:
        model, optimizer = prepared(session)
        for _ in session.epochs(1):
            for i, (x,) in enumerate(session.batches(DATA, 8)):
                update(session, model, optimizer, x)
                if i % 5 == 0:
                    Picture().resize(3).save(tmp_path / f"{i}.png")
                    torch.save(model.state_dict(), tmp_path / f"{i}.pt")
                    for row in x:
                        if row.sum() > 0:
                            break
                    largest = next(filter(lambda value: value > 0, x.flatten()), None)
                    assert largest is not None

    session = lone_session(tmp_path / "out", execution=FOUR)
    program(session)
    session.finish()
    assert session.step == 3
    assert {each.stem for each in tmp_path.glob("*.p*")} == {"0", "5", "10"}, "of 12 slots"


@pytest.mark.parametrize("program", [breaks_by_count, stops_by_a_count_of_its_own, takes_the_first])
@pytest.mark.parametrize("execution", [ONE, ExecutionSettings(mode="fast")])
def test_with_one_slot_it_is_the_plain_loop(tmp_path: Path, program: Any, execution: Any) -> None:
    session = lone_session(tmp_path, execution=execution)
    program(session)
    session.finish()
    assert session.step >= 3


def test_a_helper_that_leaves_between_slots_is_refused_at_the_end(tmp_path: Path) -> None:
    """The loop's source shows no break."""
    session = lone_session(tmp_path, execution=FOUR)
    model, optimizer = prepared(session)
    next(iter(session.epochs(1)))
    batches = iter(session.batches(DATA, 8))
    for _ in range(2):
        (x,) = next(batches)
        update(session, model, optimizer, x)
    del batches
    with pytest.raises(UserError, match="left inside of a step"):
        session.finish()
