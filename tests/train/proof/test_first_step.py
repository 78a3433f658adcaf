"""The proof in a run's first step: what it refuses, what it cannot tell, and that nothing of it shows in the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal.records import Proved, Record
from elastune.core.run import ExecutionSettings
from elastune.train.proof import first_step
from elastune.train.proof.first_step import FirstPasses, FirstStep
from elastune.train.session import Session

X = torch.arange(320.0).reshape(40, 8).sin()
DATA = TensorDataset(X, (X.sum(1) > 0).long())
HERE = Path(__file__)
Loss = Callable[[Session, nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork has longer to live here: a busy machine decides no test."""
    monkeypatch.setattr(first_step, "LIMIT_S", 30.0)


def mean(session: Session, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def summed(session: Session, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def compared(session: Session, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    similar: torch.Tensor = model(x) @ model(x).T
    return similar.square().mean() * 1e-3


def failing(session: Session, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if os.getpid() != session.config["process"]:
        raise ValueError("only in the fork")
    return mean(session, model, x, y)


def without_a_mean(session: Session, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if os.getpid() != session.config["process"] and len(x) == 4:
        return mean(session, model, x, y) * float("nan")  # a half without a target
    return mean(session, model, x, y)


def trained(folder: Path, loss: Loss = mean, *, proves: bool = True, **backward: Any) -> tuple[str, list[Proved], int]:
    """The hash, the proofs and the bodies of a run of 10 steps in four slots."""
    records: list[Record] = []
    execution = ExecutionSettings(num_slots=4)
    session = lone_session(folder, send=records.append, execution=execution, config={"process": os.getpid()})
    session.state.first_step = FirstStep(HERE) if proves else None
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    bodies = 0
    for _ in session.epochs(2):
        for x, y in session.batches(DATA, 8):
            bodies += 1
            session.backward(loss(session, model, x, y), **backward)
            optimizer.step()
            optimizer.zero_grad()
    session.finish()
    assert session.trained is not None
    digest = session.trained.fingerprint(session.state.workers)
    return digest, [each for each in records if isinstance(each, Proved)], bodies


def test_nothing_of_the_proof_shows_in_a_run(tmp_path: Path) -> None:
    plain, none, bodies = trained(tmp_path / "plain", proves=False)
    proved, (record,), same = trained(tmp_path / "proved")
    assert (none, bodies) == ([], same)
    assert proved == plain
    assert (record.proof, record.loss) == ("first_step", "mean")
    assert 0 < record.seconds < first_step.LIMIT_S


def test_a_sum_is_refused_with_its_line_and_goes_on_where_it_is_said(tmp_path: Path) -> None:
    line = summed.__code__.co_firstlineno + 1
    with pytest.raises(UserError, match=rf"test_first_step.py:{line}: twice the samples have 2 times.*--unchecked"):
        trained(tmp_path / "sum", summed)
    assert [each.loss for each in trained(tmp_path / "said", summed, reduction="sum")[1]] == ["unknown"]


@pytest.mark.parametrize(("loss", "kind"), [(compared, "samples"), (failing, "unknown"), (without_a_mean, "unknown")])
def test_what_is_no_certain_mistake_goes_on(tmp_path: Path, loss: Loss, kind: str) -> None:
    assert [each.loss for each in trained(tmp_path / "out", loss)[1]] == [kind]


def test_gradients_that_differ_between_workers_are_refused() -> None:
    proof = FirstStep(HERE)
    one = FirstPasses("mean", content=3, norms=(2.0, 0.5))
    assert proof.judge([one, one]) == "mean"
    assert proof.judge([one, FirstPasses()]) == "mean", "a worker that could not tell blames nobody"
    assert proof.judge([one, FirstPasses("mean", content=4, norms=(1.0, 1.0))]) == "mean", "other data: not this check"
    rounded = FirstPasses("mean", content=3, norms=(2.0000004, 0.5))
    assert proof.judge([one, rounded]) == "mean", "a processor of another kind rounds otherwise"
    for norms in ((2.0, 1.0), (4.0, 0.5), (2.0,)):
        with pytest.raises(UserError, match="the same gradient on all workers"):
            proof.judge([one, FirstPasses("mean", content=3, norms=norms)])


def test_lines_that_act_elsewhere_run_again_and_can_know_it(tmp_path: Path) -> None:
    """They run for each pass of the proof, and nothing under ``if session.ends_step:`` does."""
    seen, ends = tmp_path / "seen", tmp_path / "ends"

    def acting(session: Session, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for path, acts in ((seen, True), (ends, session.ends_step)):
            with path.open("a") as file:
                file.write(os.environ.get("ELASTUNE_PROOF", "-") * acts)
        return mean(session, model, x, y)

    _, _, bodies = trained(tmp_path / "out", acting)
    assert sorted(seen.read_text()) == ["-"] * bodies + ["1"] * first_step.PASSES
    assert ends.read_text() == "-" * 10
    assert "ELASTUNE_PROOF" not in os.environ


def test_without_room_for_a_fork_nothing_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    assert [each.loss for each in trained(tmp_path / "out")[1]] == ["unknown"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"lines": 3}', b'{"odd": 1, "lines": []}'])
def test_an_answer_that_was_cut_short_tells_nothing(data: bytes) -> None:
    assert FirstPasses.decode(data) == FirstPasses()
    whole = FirstPasses("sum", 2.0, (3,), 4, (5.0,), 0.5)
    assert FirstPasses.decode(whole.encode()) == whole
