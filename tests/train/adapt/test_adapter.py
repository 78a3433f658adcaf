"""Policies in sessions of one worker: what does not need others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.adapt.policies.base import Policy
from elastune.core.errors import UserError
from elastune.core.journal.records import Decided, Entry, Measured, PolicyFailed, Record
from elastune.core.run import Adapt, Elastic, ExecutionSettings
from elastune.report.sample_ledger import ledger
from elastune.train.adaptation.adapter import MeanLoss
from elastune.train.session import Session

SAMPLES = 200
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Once(Policy):
    """One decision after step 3."""

    monitors = ("loss",)

    def __init__(self, batch: int = 0, micro: int = 0, lr: float = -1.0) -> None:
        self.batch, self.micro, self.lr = batch, micro, lr

    def after_step(self, run) -> None:
        if run.step == 3:
            if self.batch:
                run.set_batch_size(self.batch, lr="linear")
            if self.micro:
                run.set_micro_batch(self.micro)
            if self.lr >= 0:
                run.set_lr(self.lr)


def begin(out: Path, *policies: str, monitors: tuple[str, ...] = (), **spec: Any) -> tuple[Session, list[Record]]:
    results: list[Record] = []
    spec.setdefault("adapt", Adapt(policies, monitors))
    session = lone_session(out, send=results.append, policies={"Once": Once}, **spec)
    return session, results


def train(
    session: Session,
    *,
    epochs: int = 2,
    batch: int = 20,
    drop_last: bool = False,
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> list[tuple[int, float]]:
    """The size and learning rate of every step."""
    net = model or nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    net, rule = session.prepare(net, optimizer(net.parameters(), lr=0.1))
    steps, seen = [], 0
    for _ in session.epochs(epochs):
        for x, y in session.batches(TensorDataset(X, Y), batch_size=batch, drop_last=drop_last):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                rule.zero_grad()
                loss = F.cross_entropy(net(x), y)
                session.backward(loss)
                return loss

            seen += len(x)
            rate = rule.param_groups[0]["lr"]
            if isinstance(rule, torch.optim.LBFGS):
                rule.step(closure)
            else:
                closure()
                rule.step()
                rule.zero_grad()
            if session.ends_step:
                steps.append((seen, rate))
                seen = 0
    session.flush()
    session.finish()
    return steps


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_batch_and_rate_change_after_the_step_that_carried_the_decision(tmp_path: Path, mode: Any) -> None:
    session, result = begin(tmp_path, "Once:batch=50", execution=ExecutionSettings(mode=mode, num_slots=4))
    steps = train(session)
    assert steps[:6] == [(20, 0.1)] * 4 + [(50, 0.25)] * 2
    (decided,) = (r for r in result if isinstance(r, Decided))
    assert (decided.policy, decided.step, decided.outcome) == ("Once", 4, "applied")
    assert (decided.cause.step, decided.cause.batch_size, decided.cause.lr) == (3, 20, 0.1)
    assert {"loss"} <= set(decided.cause.signals)
    assert sum(size for size, _ in steps) == 2 * SAMPLES


def test_a_micro_batch_changes_nothing_but_the_passes(tmp_path: Path) -> None:
    plain, _ = begin(tmp_path / "a", execution=ExecutionSettings(mode="fast", num_slots=4))
    changed, result = begin(tmp_path / "b", "Once:micro=7", execution=ExecutionSettings(mode="fast", num_slots=4))
    assert train(plain) == train(changed)
    assert [r.outcome for r in result if isinstance(r, Decided)] == ["applied"]


def test_lbfgs_decides_once_a_step(tmp_path: Path) -> None:
    session, result = begin(tmp_path, "Once:lr=0.05", execution=ExecutionSettings(mode="fast", num_slots=4))
    steps = train(session, optimizer=torch.optim.LBFGS)
    assert [rate for _, rate in steps[:5]] == [0.1] * 4 + [0.05]
    assert [r.outcome for r in result if isinstance(r, Decided)] == ["applied"]


def test_lbfgs_refuses_a_micro_batch(tmp_path: Path) -> None:
    session, result = begin(tmp_path, "Once:micro=5", execution=ExecutionSettings(mode="fast", num_slots=4))
    # More iterations on one batch of random labels make the loss explode, and that ends a run.
    train(session, optimizer=partial(torch.optim.LBFGS, max_iter=2))
    assert [r.outcome for r in result if isinstance(r, Decided)] == ["refused"]


@pytest.mark.parametrize("batch", [150, 180])
def test_a_batch_that_outgrows_the_epoch_leaves_an_honest_ledger(tmp_path: Path, batch: int) -> None:
    """Of 200 samples, 80 are used when the batch becomes more than what is left."""
    session, outcome = begin(tmp_path, f"Once:batch={batch}")
    steps = train(session, drop_last=True)
    assert [size for size, _ in steps] == [20] * 4 + [batch]
    result = ledger(Entry(float(i), record) for i, record in enumerate(outcome))
    assert [(seen.length, seen.once, seen.missed) for seen in result.epochs] == [(80, 80, ()), (batch, batch, ())]


def test_curvature_of_fewer_samples_than_slots(tmp_path: Path) -> None:
    session, _ = begin(tmp_path, monitors=("curvature:every=1",))
    train(session, batch=3, epochs=1)
    assert session.signals["sharpness"].value > 0


def test_curvature_leaves_training_as_it_is(tmp_path: Path) -> None:
    prints = []
    for i, monitors in enumerate([(), ("curvature:every=2", "noise_scale", "performance")]):
        torch.manual_seed(0)
        session, _ = begin(tmp_path / str(i), monitors=monitors)
        train(session, model=nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)))
        assert session.trained is not None
        prints.append([p.clone() for p in session.trained.replica.params])
    assert all(torch.equal(a, b) for a, b in zip(*prints, strict=True))


def test_curvature_of_what_has_no_second_derivative(tmp_path: Path) -> None:
    class Crooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if torch.is_grad_enabled():  # as fused kernels do
                raise NotImplementedError("derivative is not implemented")
            return gradient

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Crooked.apply(x)

    session, _ = begin(tmp_path, monitors=("curvature:every=1",))
    with pytest.raises(UserError, match="differentiated twice"):
        train(session, model=nn.Sequential(nn.Linear(5, 8), Layer(), nn.Linear(8, 2)))


def test_adams_own_noise_scale_needs_adam(tmp_path: Path) -> None:
    session, _ = begin(tmp_path / "a", monitors=("noise_scale_adam",))
    train(session, optimizer=torch.optim.Adam)
    assert {"noise_scale_adam", "gradient_variance_adam"} <= set(session.signals)
    session, _ = begin(tmp_path / "b", monitors=("noise_scale_adam",))
    with pytest.raises(UserError, match="second moments"):
        train(session)


def test_the_end_is_measured(tmp_path: Path) -> None:
    session, result = begin(tmp_path, monitors=("loss",))
    train(session)
    newest = [r for r in result if isinstance(r, Measured)][-1]
    assert (newest.step, newest.samples) == (20, 2 * SAMPLES)


def test_a_run_without_policies_and_monitors_records_its_loss(tmp_path: Path) -> None:
    session, result = begin(tmp_path)
    train(session)
    records = [r for r in result if isinstance(r, Measured)]
    assert {name for record in records for name in record.signals} == {"loss"}
    assert records[-1].step == session.step, "the last record is of the end"
    assert all(record.signals["loss"][0] > 0 for record in records)


def test_a_mean_loss_counts_samples_since_it_was_taken() -> None:
    mean = MeanLoss()
    assert mean.take() == {}
    mean.add(2.0, 10)
    mean.add(1.0, 30)
    assert mean.take() == {"loss": (1.25, None)}
    assert mean.take() == {}


def test_wrong_texts_are_refused_before_anything_runs(tmp_path: Path) -> None:
    for adapt in (Adapt(("nonsense",)), Adapt(("gns:max_batch=many",)), Adapt((), ("noise",))):
        with pytest.raises(UserError):
            begin(tmp_path, adapt=adapt)


def test_more_workers_than_votes_add_up_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="256"):
        begin(tmp_path, "Once", elastic=Elastic(high=300))


def test_nothing_failed_in_all_this(tmp_path: Path) -> None:
    session, result = begin(tmp_path, "Once:batch=40")
    train(session)
    assert not [r for r in result if isinstance(r, PolicyFailed)]
