"""A run's state as one list of parts: each of them comes back by every way that state can take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastune.core.clock import SystemClock
from elastune.core.errors import UserError
from elastune.core.journal.records import Checkpointed, Record
from elastune.core.run import Position, Program, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group
from elastune.parallel.sync.registry import active_sync, prepare
from elastune.train.adaptation.adapter import Adapter
from elastune.train.checkpoints.checkpoint import complete, load
from elastune.train.checkpoints.run_state import RunState
from elastune.train.checkpoints.tree import Named, load_states, states_of
from elastune.train.data.sample_log import SampleLog
from elastune.train.progress import Progress, StepTimes
from elastune.train.step import StepTransaction
from elastune.train.training_state import TrainingState


class Outer:
    """A user's own part: what DiLoCo's outer optimizer would keep."""

    name = "outer"

    def __init__(self, value: float) -> None:
        self.momentum = torch.full((3,), value)
        self.rounds = int(value)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.momentum, self.rounds = state["momentum"].clone(), int(state["rounds"])


def run_state(
    out: Path, value: float, *parts: Any, resume: bool = False, send: Callable[[Record], None] = lambda record: None
) -> RunState:
    """Of a worker all of whose state is ``value``."""
    spec = RunSpec(Program(out / "none.py"), out, resume=resume)
    workers = WorkerGroup(Group())
    progress = Progress(StepTimes(SystemClock()))
    progress.position = Position(epoch=1, offset=2, step=int(value), samples=8)
    progress.metrics, progress.batch_size, progress.reports = {"loss": value}, int(value), 1
    progress.spans = [[0, 0, 8, 8, 1, int(value)]]
    transaction = StepTransaction(workers, progress, SampleLog(0, lambda record: None))
    adapter = Adapter(spec, workers, progress, lambda record: None, {})
    state = RunState(spec, {}, workers, progress, transaction, adapter, send, parts)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=value / 100)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
            p.grad = torch.ones_like(p)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sync = prepare(model, optimizer, spec.execution, workers.comms, control=7)
    state.trained = TrainingState(active_sync(sync, spec, 7, elastic=False), (schedule,), (value / 100,))
    other = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    other.last_epoch = int(value)
    state.trained.found_schedulers.search([optimizer], (schedule,))
    return state


def plain(state: RunState) -> str:
    """All of it, comparable."""
    states = {name: each for name, each in states_of(state.parts).items() if name != "built"}
    del states["progress"]["seconds"]
    return json.dumps(states, default=lambda t: t.tolist(), sort_keys=True)


def test_every_part_comes_back_from_another_worker(tmp_path: Path) -> None:
    one, other = run_state(tmp_path, 3.0, Outer(3)), run_state(tmp_path, 5.0, Outer(5))
    assert plain(one) != plain(other)
    header, tensors = one.pack()
    other.unpack((header, [t.clone() for t in tensors]))
    assert plain(one) == plain(other)


def test_every_part_comes_back_from_a_snapshot(tmp_path: Path) -> None:
    state = run_state(tmp_path, 3.0, Outer(3))
    header, tensors = state.pack()
    state.keep_snapshot((header, [t.clone() for t in tensors]))
    assert state.snapshot_step == 3
    later = run_state(tmp_path, 5.0, Outer(5))
    for _ in range(2):  # it may be needed again
        later.rewind(state.snapshot())
        assert plain(later) == plain(state)
        assert later.trained is not None
        with torch.no_grad():
            for p in later.trained.replica.params:
                p.zero_()


def test_every_part_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    run_state(tmp_path, 3.0, Outer(3)).save()
    later = run_state(tmp_path, 5.0, Outer(5), resume=True)
    later.begin()
    assert plain(later) == plain(run_state(tmp_path, 3.0, Outer(3)))
    (path,) = complete(tmp_path / "checkpoints")
    assert [*load(path).states] == [part.name for part in later.parts]


def test_saving_is_told_with_its_step(tmp_path: Path) -> None:
    sent: list[Record] = []
    run_state(tmp_path, 3.0, send=sent.append).save()
    assert [record.step for record in sent if isinstance(record, Checkpointed)] == [3]


def test_a_part_that_a_checkpoint_does_not_have_is_told(tmp_path: Path) -> None:
    run_state(tmp_path, 3.0).save()
    with pytest.raises(UserError, match="a checkpoint must fit the program .*, outer: 'outer'"):
        run_state(tmp_path, 5.0, Outer(5), resume=True).begin()


def test_a_part_that_does_not_fit_is_told_with_its_name() -> None:
    states = {"model": nn.Linear(2, 2).state_dict()}
    with pytest.raises(UserError, match=r"a checkpoint must fit the program \(got here, model: .*size mismatch"):
        load_states([Named("model", nn.Linear(3, 2))], states, "here")
