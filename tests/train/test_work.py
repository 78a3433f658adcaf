"""A worker's life, in this process: every end becomes a record and an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastune.core.journal.records import (
    Checkpointed,
    Measured,
    Record,
    Reported,
    RunFailed,
    RunFinished,
    StepsCompleted,
    StepsPlanned,
    encode,
)
from elastune.core.run import Elastic, ExecutionSettings, Place, Program, RunSpec
from elastune.elastic.wire.transport import LINE_LIMIT_BYTES
from elastune.train.worker import EXIT_FAILED, EXIT_USER_ERROR, _factory, work

LOOP = """
import torch
from torch.utils.data import TensorDataset
def train(session):
    model = torch.nn.Linear(2, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(2):
        for (x,) in session.batches(TensorDataset(torch.ones(20, 2)), batch_size=10):
            session.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        session.report(loss=1.0)
"""


def lived(folder: Path, text: str, stop: bool = False, **changes) -> tuple[int, list[Record]]:
    path = folder / "mine.py"
    path.write_text(text)
    sent: list[Record] = []
    spec = RunSpec(Program(path), folder / "out", execution=ExecutionSettings(num_slots=2), **changes)
    return work(spec, Place(), sent.append, lambda: stop), sent


def kinds(sent: list[Record]) -> list[type]:
    return [type(record) for record in sent if not isinstance(record, Measured)]


def test_a_run_that_ends_well(tmp_path: Path) -> None:
    code, sent = lived(tmp_path, LOOP)
    assert code == 0
    assert isinstance(sent[1], Measured), "the loss of the first step; when others follow is a matter of time"
    written = [each.step for each in sent if isinstance(each, Checkpointed)]
    assert written == [2, 4], "the first is written in the background: when it is done is a matter of time"
    epoch = [StepsCompleted, Reported]
    assert [kind for kind in kinds(sent) if kind is not Checkpointed] == [StepsPlanned, *epoch, *epoch, RunFinished]
    assert sent[0] == StepsPlanned(4)
    end = sent[-1]
    assert isinstance(end, RunFinished)
    assert (end.steps, end.samples, end.workers, end.stopped) == (4, 40, 1, "complete")
    assert (end.metrics, end.grad_bytes, len(end.sha256)) == ({"loss": 1.0}, 12, 64)


def test_a_wish_to_stop_ends_after_a_step_with_a_checkpoint(tmp_path: Path) -> None:
    code, sent = lived(tmp_path, LOOP, stop=True)
    assert code == 0
    assert kinds(sent) == [StepsPlanned, StepsCompleted, Checkpointed, RunFinished]
    assert isinstance(sent[-1], RunFinished)
    assert (sent[-1].stopped, sent[-1].steps) == ("requested", 1)
    code, sent = lived(tmp_path, LOOP, resume=True)
    assert isinstance(sent[-1], RunFinished)
    assert (code, sent[-1].stopped, sent[-1].steps) == (0, "complete", 4)


def test_a_program_that_trains_nothing_is_a_run_too(tmp_path: Path) -> None:
    code, sent = lived(tmp_path, "def train(session): session.report(x=2)")
    assert code == 0
    assert isinstance(sent[-1], RunFinished)
    assert (sent[-1].steps, sent[-1].metrics) == (0, {"x": 2.0})


ERROR = (
    "from elastune.core.errors import UserError\ndef train(session): raise UserError('data must exist', 3, 'make it')"
)
UNORDERED = """def train(session):
    told = "grid_sampler_2d_backward_cuda does not have a deterministic implementation, but you set 'torch"
    raise RuntimeError(told)"""


@pytest.mark.parametrize(
    ("text", "reason", "code", "detail"),
    [
        ("def train(session):\n    x = 1\n    raise KeyError('k')", "exception", 1, "KeyError: 'k' (mine.py:3)"),
        ("import torch\ndef train(session):\n    torch.ones(2) @ torch.ones(3)", "exception", 1, "(mine.py:3)"),
        ("import json\ndef train(session):\n    json.loads('{')", "exception", 1, "(mine.py:3)"),
        ("def train(session): raise MemoryError('no')", "out_of_memory", 1, "MemoryError: no"),
        ("def train(session): raise RuntimeError('CUDA out of memory')", "out_of_memory", 1, "CUDA out of memory"),
        (UNORDERED, "user_error", 2, "add in one order (got grid_sampler_2d_backward_cuda): use another operation"),
        ("def train(session): session.report(loss=float('nan'))", "diverged", 1, "loss is nan"),
        (ERROR, "user_error", 2, "data must exist (got 3): make it"),
        ("raise OSError('gone')", "user_error", 2, "OSError: gone"),
        ("x = 3", "user_error", 2, "must define train"),
        ("def train(session): raise ValueError('two\\nlines')", "exception", 1, "two lines"),
        ("class E(Exception):\n    pass\ndef train(session): raise E", "exception", 1, "E (mine.py:3)"),
    ],
)
def test_every_bad_end_has_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, reason: str, code: int, detail: str
) -> None:
    result, sent = lived(tmp_path, text)
    (failure,) = [record for record in sent if not isinstance(record, Reported)]
    assert isinstance(failure, RunFailed)
    assert (result, failure.reason, failure.rank) == (code, reason, 0)
    assert result in (EXIT_FAILED, EXIT_USER_ERROR)
    assert detail in failure.detail
    assert "\n" not in failure.detail
    assert ("Traceback" in capfd.readouterr().err) == (reason in ("exception", "out_of_memory"))


def test_a_failure_of_any_length_keeps_its_reason(tmp_path: Path) -> None:
    _, (failure,) = lived(tmp_path, "def train(session): raise KeyError('x' * 2_000_000)")
    assert isinstance(failure, RunFailed)
    assert (failure.reason, failure.detail[:9]) == ("exception", "KeyError:")
    assert len(encode(failure)) < LINE_LIMIT_BYTES


def test_settings_that_the_program_lacks(tmp_path: Path) -> None:
    code, (failure,) = lived(tmp_path, "config = {'lr': 1}\ndef train(session): pass", config={"rl": 2})
    assert isinstance(failure, RunFailed)
    assert (code, failure.reason) == (2, "user_error")
    assert "rl" in failure.detail


def test_corrupt_checkpoints_are_the_users_to_fix(tmp_path: Path) -> None:
    _, sent = lived(tmp_path, LOOP)
    saved = [Path(record.path) for record in sent if isinstance(record, Checkpointed)]
    for path in saved[-2:]:
        (path / "state.json").write_text("{")
    code, (failure,) = lived(tmp_path, LOOP, resume=True)
    assert isinstance(failure, RunFailed)
    assert (code, failure.reason) == (2, "user_error")
    assert str(saved[-1]) in failure.detail


@pytest.mark.parametrize(
    ("device", "gpus", "most", "backend"),
    [
        ("auto", 4, 4, "nccl"),
        ("auto", 4, 5, "gloo"),  # two would share a GPU once the run has grown
        ("cuda:0", 4, 2, "gloo"),  # all use the one that was named
        ("auto", 0, 2, "gloo"),
    ],
)
def test_groups_are_formed_over_nccl_where_each_worker_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, most: int, backend: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    execution, elastic = ExecutionSettings(workers=2, device=device, num_slots=4), Elastic(high=most)
    spec = RunSpec(Program(Path("mine.py")), Path("out"), execution=execution, elastic=elastic)
    assert _factory(spec, Place(device="cuda:0" if gpus else "cpu")).backend == backend
