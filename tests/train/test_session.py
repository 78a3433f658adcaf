"""The session in one process: the user's loop, its rules, saving and going on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import Dataset, TensorDataset

from elastune.core.divergence import Divergence
from elastune.core.errors import Diverged, UserError
from elastune.core.journal.records import Reported
from elastune.core.mesh import Mesh
from elastune.core.run import Adapt, ExecutionSettings
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.train.checkpoints.checkpoint import complete
from elastune.train.session import Session
from elastune.train.step import StopTraining

OPTIMIZERS = {
    cls.__name__: cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    if cls.__name__ not in ("Optimizer", "LBFGS", "SparseAdam")
}


def samples(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()


def loop(
    session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, *schedulers: Any, epochs: int = 2
) -> None:
    """An ordinary training loop."""
    model, optimizer, *schedulers = session.prepare(model, optimizer, *schedulers)
    for _ in session.epochs(epochs):
        for x, y in session.batches(samples(), batch_size=16):
            optimizer.zero_grad()
            session.backward(F.mse_loss(model(x.double()), y.double()))
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session, *schedulers: Any) -> None:
    """The same in plain PyTorch: whole batches, in the session's order of samples."""
    from elastune.train.rng import epoch_order

    data = samples()
    for epoch in range(2):
        for index in epoch_order(len(data), session.seed, epoch).split(16):
            x, y = data[index]
            optimizer.zero_grad()
            F.mse_loss(model(x.double()), y.double()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_any_optimizer_equals_the_plain_loop(tmp_path: Path, name: str, mode: Any, micro_batch: int | None) -> None:
    """Eight slots or micro-batches of three change nothing but rounding; each epoch ends with a partial batch."""
    ours, plain = network(), network()
    session = lone_session(tmp_path, execution=ExecutionSettings(mode=mode, num_slots=8, micro_batch=micro_batch))
    loop(session, ours, OPTIMIZERS[name](ours.parameters(), lr=0.01))
    plain_loop(plain, OPTIMIZERS[name](plain.parameters(), lr=0.01), session)
    assert torch.allclose(weights(ours), weights(plain), rtol=1e-6, atol=1e-9)
    assert session.step == 8
    assert session.samples == 100


SCHEDULES = {
    "step": lambda o: StepLR(o, 2, 0.5),
    "milestones": lambda o: MultiStepLR(o, [2, 5], 0.3),
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=9),
    "sequence": lambda o: SequentialLR(o, [StepLR(o, 1, 0.5), StepLR(o, 2, 0.9)], [3]),
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_schedulers_inside_the_loop_step_once_a_step(tmp_path: Path, name: str) -> None:
    ours, plain = network(), network()
    session = lone_session(tmp_path, execution=ExecutionSettings(num_slots=8))
    sgd, plain_sgd = torch.optim.SGD(ours.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    loop(session, ours, sgd, SCHEDULES[name](sgd))
    plain_loop(plain, plain_sgd, session, SCHEDULES[name](plain_sgd))
    assert sgd.param_groups[0]["lr"] == plain_sgd.param_groups[0]["lr"]
    assert torch.allclose(weights(ours), weights(plain), rtol=1e-6, atol=1e-9)


def test_a_scheduler_that_is_made_in_the_loop_is_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = lone_session(tmp_path, execution=ExecutionSettings(num_slots=4))
    session.prepare(model, optimizer)
    with pytest.raises(UserError, match="make schedulers before session.epochs"):
        for _ in session.epochs(1):
            scheduler = StepLR(optimizer, 1, 0.5)
            for x, y in session.batches(samples(), batch_size=16):
                session.backward(F.mse_loss(model(x.double()), y.double()))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def test_plateau_steps_with_the_mean_metric(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = lone_session(tmp_path)
    _, _, plateau = session.prepare(model, optimizer, ReduceLROnPlateau(optimizer, factor=0.5, patience=0))
    for metric in (1.0, torch.tensor([2.0, 4.0]), 0.5):
        plateau.step(metric)
    assert plateau.best == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_lbfgs_evaluates_its_closure_on_the_whole_batch(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
    session = lone_session(tmp_path, execution=ExecutionSettings(mode="fast", num_slots=4))
    model, optimizer = session.prepare(model, optimizer)
    losses = []
    for _ in session.epochs(3):
        for x, y in session.batches(samples(), batch_size=50):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x.double()), y.double())
                session.backward(loss)
                return loss

            losses.append(float(optimizer.step(closure).detach()))
            optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    with pytest.raises(UserError, match="LBFGS"):
        lone_session(tmp_path).prepare(network(), torch.optim.LBFGS(network().parameters()))


def test_saving_in_the_batch_loop_counts_the_step_at_hand(tmp_path: Path) -> None:
    def run(out: Path, stop_at: int | None) -> torch.Tensor:
        model = network()
        session = lone_session(out, resume=True)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in session.epochs(1):
            for x, y in session.batches(samples(), batch_size=16):
                optimizer.zero_grad()
                session.backward(F.mse_loss(model(x.double()), y.double()))
                optimizer.step()
                if session.ends_step and session.step + 1 == stop_at:
                    session.save()
                    assert session.step == stop_at
                    return weights(model)
        return weights(model)

    expected = run(tmp_path / "whole", None)
    run(tmp_path / "parts", 2)
    assert torch.equal(run(tmp_path / "parts", None), expected)


class Breaking(WorkerGroup):
    """Its next reduction fails, and nobody has the result."""

    elastic = True

    def recover(self, error: GroupBroken) -> bool:
        return False


def test_a_discarded_step_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's lines that are not under ``ends_step`` run once more, and nobody hears of it."""
    sent: list[Any] = []
    monkeypatch.setattr("tests.support.sessions.WorkerGroup", Breaking)
    session = lone_session(tmp_path, send=sent.append, execution=ExecutionSettings(mode="fast", num_slots=4))
    model = network()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sync = session.trained.sync if session.trained is not None else None
    assert sync is not None
    ended = []
    for _ in session.epochs(1):
        for i, (x, y) in enumerate(session.batches(samples(), batch_size=16)):
            with monkeypatch.context() as patch:
                if i == 1:
                    patch.setattr(sync, "backward", broken)
                session.backward(F.mse_loss(model(x.double()), y.double()))
            optimizer.step()
            optimizer.zero_grad()
            session.report(step=session.step)
            session.save()
            ended.append(session.ends_step)
        float(x.sum())  # a pass has a last batch
    assert ended == [True, False, True, True, True]
    assert [record.metrics["step"] for record in sent if isinstance(record, Reported)] == [0, 1, 2, 3]
    assert session.samples == 50


def test_a_step_that_is_lost_between_its_slices_begins_again(tmp_path: Path) -> None:
    """As where the user evaluates between them, and a worker is lost meanwhile."""
    session = lone_session(tmp_path, execution=ExecutionSettings(num_slots=2))
    model = network()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ended = []
    for _ in session.epochs(1):
        for i, (x, y) in enumerate(session.batches(samples(), batch_size=16)):
            session.backward(F.mse_loss(model(x.double()), y.double()))
            if i == 2:
                session._parts.transaction.abandon()
            optimizer.step()
            optimizer.zero_grad()
            ended.append(session.ends_step)
    assert ended == [False, True, False, *[False, True] * 3]
    assert (session.step, session.samples) == (4, 50)


def broken(loss: torch.Tensor, share: Any) -> None:
    raise GroupBroken("a worker is lost")


def test_going_on_after_every_step_ends_where_an_undisturbed_run_does(tmp_path: Path) -> None:
    def run(out: Path, until: int | None, resume: bool) -> tuple[Session, str]:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        cycle = OneCycleLR(optimizer, 0.1, total_steps=20)
        session = lone_session(out, max_steps=until, resume=resume, checkpoint_every_steps=None)
        loop(session, model, optimizer, cycle, epochs=3)
        assert session.trained is not None
        return session, session.trained.fingerprint(WorkerGroup(Group()))

    _, expected = run(tmp_path / "whole", None, False)
    for until in range(1, 12):
        session, _ = run(tmp_path / "parts", until, True)
        assert session.step == until
    session, digest = run(tmp_path / "parts", None, True)
    assert (session.step, digest) == (12, expected)
    assert len(complete(tmp_path / "parts" / "checkpoints")) == 2


@pytest.mark.parametrize(("most", "reports"), [(4, [4]), (6, [4, 6]), (8, [4, 8]), (12, [4, 8, 12])])
def test_at_its_step_limit_a_run_reports_each_epoch_once(tmp_path: Path, most: int, reports: list[int]) -> None:
    told: list[Any] = []

    def run(resume: bool) -> Session:
        session = lone_session(tmp_path, max_steps=most, checkpoint_every_steps=None, resume=resume, send=told.append)
        model = network()
        model, rule = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in session.epochs(3):  # of four steps
            for x, y in session.batches(samples(), batch_size=16):
                session.backward(F.mse_loss(model(x.double()), y.double()))
                rule.step()
                rule.zero_grad()
            session.report(loss=1.0)
        return session

    session = run(resume=False)
    assert [record.step for record in told if isinstance(record, Reported)] == reports
    assert (session.step, session.stopped) == (most, "complete" if most == 12 else "max_steps")
    if most % 4 == 0:
        told.clear()
        again = run(resume=True)
        assert (again.step, again.stopped) == (most, session.stopped)
        assert not [record for record in told if isinstance(record, Reported)], "the last epoch was reported"


def test_a_wish_to_stop_saves_and_leaves_the_loop(tmp_path: Path) -> None:
    model = network()
    wishes = iter([False, False, True])
    session = lone_session(tmp_path, stop_requested=lambda: next(wishes))
    with pytest.raises(StopTraining):
        loop(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (session.step, session.stopped) == (3, "requested")
    assert complete(tmp_path / "checkpoints")[-1].name == "step-0000000003"


def test_resuming_with_another_meaning_is_refused(tmp_path: Path) -> None:
    model = network()
    loop(
        lone_session(tmp_path, checkpoint_every_steps=None, config={"lr": 1}),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    for change in ({"seed": 9}, {"config": {"lr": 2}}, {"execution": ExecutionSettings(num_slots=8)}):
        session = lone_session(tmp_path, resume=True, **{"config": {"lr": 1}, **change})
        model = network()
        with pytest.raises(UserError, match="it was begun with"):
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Adds noise to every sample."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(2), index


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_augmentation_depends_on_sample_and_epoch_alone(tmp_path: Path, loader_workers: int) -> None:
    def seen(execution: ExecutionSettings) -> Iterator[tuple[int, int, float]]:
        model = nn.Linear(2, 1)
        session = lone_session(tmp_path, execution=execution)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in session.epochs(2):
            for x, index in session.batches(Augmented(), batch_size=8, loader_workers=loader_workers):
                yield from ((epoch, int(i), float(row[0])) for i, row in zip(index, x, strict=True))
                session.backward(model(x).mean())
                optimizer.zero_grad()

    one = list(seen(ExecutionSettings(mode="fast", num_slots=4)))
    assert sorted(one) == sorted(seen(ExecutionSettings(num_slots=8)))
    noise = {(epoch, index): value for epoch, index, value in one}
    assert len(noise) == 40
    assert len(set(noise.values())) == 40


def test_evaluation_sees_every_sample_once_in_order(tmp_path: Path) -> None:
    session = lone_session(tmp_path)
    data = TensorDataset(torch.arange(23))
    seen = [int(i) for (batch,) in session.batches(data, batch_size=5, train=False) for i in batch]
    assert seen == list(range(23))


def test_metrics_are_reported_and_test_metrics_too(tmp_path: Path) -> None:
    sent: list[Any] = []
    session = lone_session(tmp_path, send=sent.append)
    session.report(accuracy=torch.tensor(0.5), test_accuracy=0.25)
    (report,) = sent
    assert isinstance(report, Reported)
    assert report.metrics == {"accuracy": 0.5, "test_accuracy": 0.25}
    with pytest.raises(Diverged, match="loss is nan"):
        session.report(loss=math.nan)
    for wrong in ({}, {"seconds": 1.0}):
        with pytest.raises(UserError, match="report needs metrics"):
            session.report(**wrong)


def test_a_report_of_many_metrics_compares_each_name_a_few_times(tmp_path: Path) -> None:
    compared = 0

    class Counted(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    sent: list[Any] = []
    session = lone_session(tmp_path, send=sent.append)
    session.report(**{Counted(f"metric {at}"): at for at in range(400)})
    assert sent[0].metrics == {f"metric {at}": at for at in range(400)}
    assert compared < 10 * 400


def test_a_report_tells_on_how_many_samples_its_metrics_were_measured(tmp_path: Path) -> None:
    session = lone_session(tmp_path)
    session.report(accuracy=0.5, loss=0.7, evaluated_on=400)
    session.report(test_accuracy=0.25, train_loss=0.6, evaluated_on={"test_accuracy": 10_000})
    assert session.progress.evaluated_on == {"accuracy": 400, "loss": 400, "test_accuracy": 10_000}
    for wrong in (0, 2.5, True, {"accuracy": 400}, {"loss": -1}):
        with pytest.raises(UserError, match="evaluated_on must be a number of samples"):
            session.report(loss=0.5, evaluated_on=wrong)  # type: ignore[arg-type]


def test_sums_and_means_take_numbers_tensors_and_lists(tmp_path: Path) -> None:
    session = lone_session(tmp_path)
    assert session.sum([0.1] * 10) == 1.0
    assert session.mean([torch.tensor([1.0, 2.0]), 6]) == 3.0
    assert session.mean(0.1) == 0.1
    assert math.isnan(session.sum([math.nan, 1.0]))


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_loss_that_explodes_is_divergence_found_by_the_mean_over_the_global_batch(
    tmp_path: Path, mode: Literal["exact", "fast"], slots: int
) -> None:
    def lose(session: Session, scales: Sequence[float]) -> int:
        model = network()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in session.epochs(100):
            for x, y in session.batches(samples(), batch_size=16, drop_last=True):
                session.backward(scales[session.step] * F.mse_loss(model(x.double()), y.double()))
                optimizer.step()
                optimizer.zero_grad()
                if session.ends_step and session.step + 1 == len(scales):
                    return session.step + 1
        return session.step

    execution = ExecutionSettings(mode=mode, num_slots=slots)
    spike = [1.0] * 15 + [1e6] * 4 + [1.0] * 15
    exploding = [1.0] * 15 + [1e6] * 15
    assert lose(lone_session(tmp_path, execution=execution), spike) == len(spike)
    with pytest.raises(Diverged, match="at step 20, its median over 10 is"):
        lose(lone_session(tmp_path, execution=execution), exploding)
    off = lone_session(tmp_path, execution=execution, divergence=Divergence(None))
    assert lose(off, exploding) == len(exploding)
    guarded = lone_session(tmp_path, execution=execution, adapt=Adapt(("divergence:tries=0",)))
    assert lose(guarded, exploding[:20]) == 20, "a policy handles it"


def test_what_divergence_is_judged_by_goes_on_with_a_run(tmp_path: Path) -> None:
    one = lone_session(tmp_path, divergence=Divergence(10.0, ("loss",)))
    for _ in range(3):
        one.report(loss=0.1)
    other = lone_session(tmp_path, divergence=Divergence(10.0, ("loss",)))
    other._parts.progress.load_state_dict(json.loads(json.dumps(one._parts.progress.state_dict())))
    other.report(loss=1.1)
    with pytest.raises(Diverged, match="loss is 1.1 after|loss is 1.1, its median over 3"):
        other.report(loss=1.1)


def test_a_loss_that_is_not_finite_is_divergence(tmp_path: Path) -> None:
    model = network()
    session = lone_session(tmp_path)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = session.batches(samples(), batch_size=16)
    next(batches)
    with pytest.raises(Diverged, match="loss is inf at step 1"):
        session.backward(torch.tensor(math.inf, requires_grad=True))


def test_misuse_is_told_in_one_line(tmp_path: Path) -> None:
    model = network()
    session = lone_session(tmp_path)
    with pytest.raises(UserError, match="session.prepare must come before"):
        next(session.batches(samples(), batch_size=16))
    session = lone_session(tmp_path)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match="or is torch's IterableDataset"):
        session.batches(iter(range(9)), batch_size=16)
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(UserError, match="batch_size"):
            session.batches(samples(), batch_size=wrong)
    with pytest.raises(UserError, match="must hold samples"):
        session.batches(samples(0), batch_size=1)
    with pytest.raises(UserError, match="belongs once into each training batch"):
        session.backward(torch.ones((), requires_grad=True))
    with pytest.raises(UserError, match="needs session.backward"):
        for x, _ in session.batches(samples(), batch_size=16):
            model(x.double()).sum().backward()
    with pytest.raises(UserError, match="once"):
        session.prepare(model, optimizer)


def test_leftover_gradients_are_refused(tmp_path: Path) -> None:
    model = network()
    session = lone_session(tmp_path)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match="zero_grad"):
        for x, y in session.batches(samples(), batch_size=16):
            session.backward(F.mse_loss(model(x.double()), y.double()))
            optimizer.step()


def test_bf16_runs_inside_and_returns_fp32(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    session = lone_session(tmp_path, execution=ExecutionSettings(precision="bf16", num_slots=4))
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 6)
    out = model(x)
    assert out.dtype == torch.float32
    assert torch.equal(out, out.bfloat16().float())
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 5))
    assert not torch.is_autocast_enabled("cpu")


def test_unused_parameters_keep_no_gradient(tmp_path: Path) -> None:
    """As in plain PyTorch: an optimizer then leaves them alone, weight decay included."""
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    before = model[1].weight.detach().clone()
    session = lone_session(tmp_path)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    for x, y in session.batches(samples(), batch_size=16):
        session.backward(F.mse_loss(model[0](x), y))
        assert model[1].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model[1].weight, before)


def test_leaving_the_loop_inside_of_a_step_is_told(tmp_path: Path) -> None:
    model = network()
    session = lone_session(tmp_path)
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match="between steps only"):
        for _ in session.epochs(2):
            batches = iter(session.batches(samples(), batch_size=16))
            x, y = next(batches)
            session.backward(F.mse_loss(model(x.double()), y.double()))
            del batches


@pytest.mark.parametrize("what", ["sum", "mean", "report"])
def test_what_all_workers_do_together_is_refused_inside_of_a_step(tmp_path: Path, what: str) -> None:
    """They take different numbers of batches a step, so a collective there would hang."""
    model = network()
    session = lone_session(tmp_path)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = session.batches(samples(), batch_size=16)
    next(batches)
    call = getattr(session, what)
    with pytest.raises(UserError, match=f"session.{what} belongs between steps"):
        call(loss=1.0) if what == "report" else call(1.0)


def test_leaving_the_loop_between_steps_is_fine(tmp_path: Path) -> None:
    model = network()
    sent: list[Any] = []
    session = lone_session(tmp_path, send=sent.append)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(3):
        for x, y in session.batches(samples(), batch_size=16):
            loss = F.mse_loss(model(x.double()), y.double())
            session.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                session.report(loss=loss)
                break
    assert [record.step for record in sent if isinstance(record, Reported)] == [0, 1, 2]
    assert (session.epoch, session.step) == (3, 3)


def test_a_wish_to_stop_is_heard_in_epochs_without_batches(tmp_path: Path) -> None:
    wishes = iter([False, True])
    session = lone_session(tmp_path, stop_requested=lambda: next(wishes))
    seen = []
    with pytest.raises(StopTraining):
        seen.extend(session.epochs(5))
    assert session.stopped == "requested"
    assert session.epoch == 2


def test_numbers_are_of_those_who_gathered_them(tmp_path: Path) -> None:
    """A worker may have died since, and this one have got the rows from another that stands as the rest do now."""
    session = lone_session(tmp_path)
    workers = session._parts.workers
    for stood, stands in ((Mesh(data=2, tensor=2), Mesh(data=3)), (Mesh(data=2), Mesh(data=2, tensor=2))):
        workers.comms = replace(workers.comms, mesh=stands)
        workers.gathered_on = stood
        rows = [[float(rank)] for rank in range(stood.workers)]
        workers.gather = lambda values, what, rows=rows: rows  # type: ignore[method-assign]
        speakers = [rank for rank in range(stood.workers) if stood.speaks(rank)]
        assert session.sum(1.0) == sum(speakers)
