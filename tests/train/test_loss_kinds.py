"""Losses that are sums, or means over a number of elements that varies: the plain loop's gradients in several slots."""

from __future__ import annotations

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
from elastune.core.run import Adapt, ExecutionSettings
from elastune.train.session import Session

IGNORED = -100


def samples() -> TensorDataset:
    """Rows of which the first quarter of each batch of 8 has no target at all."""
    stream = torch.Generator().manual_seed(1)
    x, y = torch.rand(24, 6, 3, generator=stream), torch.randint(0, 4, (24, 6), generator=stream)
    kept = torch.rand(24, 6, generator=stream) < torch.linspace(0.4, 1.0, 24)[:, None]
    kept[::8] = kept[1::8] = False
    return TensorDataset(x, torch.where(kept, y, IGNORED))


def mean_over_targets(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)
    return loss, {"count": (y != IGNORED).sum()}


def masked_by_hand(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    mask = (y != IGNORED).float()
    each = model(x).square().mean(2)
    return (each * mask).sum() / mask.sum(), {"count": float(mask.sum())}


def summed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    return model(x).square().sum(), {"reduction": "sum"}


KINDS: list[Callable[..., tuple[torch.Tensor, dict[str, Any]]]] = [mean_over_targets, masked_by_hand, summed]
EXECUTIONS = {
    "one slot": ExecutionSettings(num_slots=1),
    "four slots": ExecutionSettings(num_slots=4),
    "three slots": ExecutionSettings(num_slots=3),
    "pieces": ExecutionSettings(num_slots=2, micro_batch=3),
    "fast pieces": ExecutionSettings(mode="fast", micro_batch=3),
    "shares": ExecutionSettings(num_slots=4, mechanism="zero"),
}


def begun(out: Path, execution: ExecutionSettings, **spec: Any) -> tuple[Session, nn.Module, Any, Any]:
    session = lone_session(out, execution=execution, **spec)
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    next(iter(session.epochs(1)))
    return session, model, optimizer, session.batches(samples(), 8, shuffle=False)


def trained(out: Path, kind: Any, execution: ExecutionSettings, **spec: Any) -> tuple[list[float], list[float]]:
    """The losses of the steps, and the weights."""
    session, model, optimizer, batches = begun(out, execution, **spec)
    losses = []
    for x, y in batches:
        loss, options = kind(model, x, y)
        session.backward(loss, **options)
        session.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if session.ends_step:
            losses.append(session.loss)
    session.finish()
    return losses, [*model.state_dict()["weight"].flatten().tolist()]


def plain(kind: Any) -> tuple[list[float], list[float]]:
    """The plain loop's."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = samples().tensors
    losses = []
    for start in range(0, len(x), 8):
        loss, _ = kind(model, x[start : start + 8], y[start : start + 8])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.weight.flatten().tolist()


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=list(EXECUTIONS))
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_weights_are_those_of_the_plain_loop(tmp_path: Path, kind: Any, execution: Any) -> None:
    losses, weights = trained(tmp_path, kind, execution)
    expected = plain(kind)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert weights == pytest.approx(expected[1], rel=1e-6)
    if execution.num_slots == 1 and execution.micro_batch is None:
        assert weights == expected[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_loss_decides_something(tmp_path: Path, kind: Any) -> None:
    """Without its arguments each of them trains otherwise in four slots."""

    def without(*args: Any) -> Any:
        loss, _ = kind(*args)
        return loss.nan_to_num(), {}

    losses, _ = trained(tmp_path, without, ExecutionSettings(num_slots=4))
    assert losses != pytest.approx(plain(kind)[0], rel=1e-2)


def test_learners_that_meet_after_each_step_train_on_the_global_sum(tmp_path: Path) -> None:
    from elastune.core.sync_plan import SyncPlan

    def rough(*args: Any) -> Any:
        loss, options = summed(*args)
        return loss / 100, options

    def trained_by(**spec: Any) -> list[float]:
        session, model, optimizer, batches = begun(tmp_path, ExecutionSettings(num_slots=4), **spec)
        for x, y in batches:
            loss, options = rough(model, x, y)
            session.backward(loss, **options)
            optimizer.step()
            optimizer.zero_grad()
        session.finish()
        return model.state_dict()["weight"].flatten().tolist()

    assert trained_by(sync=SyncPlan.parse("local:learners=2,every=1")) == pytest.approx(trained_by(), rel=1e-6)


def test_a_learner_takes_the_mean_over_its_own_elements(tmp_path: Path) -> None:
    from elastune.core.sync_plan import SyncPlan

    session, model, optimizer, batches = begun(
        tmp_path, ExecutionSettings(num_slots=4), sync=SyncPlan.parse("local:learners=2,every=1")
    )
    begin = [p.detach().clone() for p in model.parameters()]
    for i, (x, y) in enumerate(batches):
        loss, options = mean_over_targets(model, x, y)
        session.backward(loss, **options)
        optimizer.step()
        optimizer.zero_grad()
        if i == 3:
            break
    session.save()
    after = []
    x, y = samples().tensors
    for rows in (slice(0, 4), slice(4, 8)):
        alone = nn.Linear(3, 4)
        with torch.no_grad():
            for p, value in zip(alone.parameters(), begin, strict=True):
                p.copy_(value)
        mean_over_targets(alone, x[rows], y[rows])[0].backward()
        after.append(alone.weight.detach() - 0.01 * alone.weight.grad)
    assert torch.allclose(model.weight, (after[0] + after[1]) / 2, rtol=1e-6, atol=1e-8)


def test_noise_and_norms_are_of_the_loss_that_is_trained(tmp_path: Path) -> None:
    """A count that is the same everywhere is no count."""
    seen = []
    for options in ({}, {"count": 2 * 3}):
        session, model, optimizer, batches = begun(
            tmp_path, ExecutionSettings(num_slots=4), adapt=Adapt(monitors=("noise_scale",))
        )
        for x, _ in batches:
            session.backward(model(x).square().mean(), **options)
            optimizer.step()
            optimizer.zero_grad()
        seen.append([session.loss, *(signal.value for signal in session.signals.values())])
    assert len(seen[0]) > 1
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


def test_a_learner_without_elements_takes_a_step_of_zeros(tmp_path: Path) -> None:
    from elastune.core.sync_plan import SyncPlan

    session, model, optimizer, batches = begun(
        tmp_path, ExecutionSettings(num_slots=4), sync=SyncPlan.parse("local:learners=4,every=1")
    )
    begin = model.weight.detach().clone()
    for x, y in batches:
        loss, options = mean_over_targets(model, x, y)
        session.backward(loss, **options)
        optimizer.step()
        optimizer.zero_grad()
        if session.ends_step or not options["count"]:
            break
    assert options["count"] == 0
    assert torch.equal(model.weight, begin)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"reduction": "none"}, "a mean or a sum"),
        ({"reduction": "sum", "count": 3}, "a sum has no count"),
        ({"count": -1}, "number of elements"),
        ({"count": float("nan")}, "number of elements"),
        ({"count": torch.ones(2)}, "number of elements"),
        ({"count": "3"}, "number of elements"),
    ],
)
def test_other_arguments_are_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    session, model, _, batches = begun(tmp_path, ExecutionSettings(num_slots=2))
    x, _ = next(batches)
    with pytest.raises(UserError, match=told):
        session.backward(model(x).mean(), **options)


def test_a_count_belongs_to_all_losses_of_a_batch(tmp_path: Path) -> None:
    session, model, _, batches = begun(tmp_path, ExecutionSettings(num_slots=2))
    x, _ = next(batches)
    session.backward(model(x).mean(), more=True)
    with pytest.raises(UserError, match="one count is for all"):
        session.backward(model(x).mean(), count=3)


def test_a_count_with_a_loss_that_follows_is_refused(tmp_path: Path) -> None:
    """The following loss would be divided by it as well."""
    session, model, _, batches = begun(tmp_path, ExecutionSettings(num_slots=2))
    x, _ = next(batches)
    with pytest.raises(UserError, match="one count is for all.*count with more=True"):
        session.backward(model(x).mean(), count=3, more=True)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_the_optimizer_of_a_learner_without_samples_finds_no_gradient(tmp_path: Path, mode: Any) -> None:
    """Neither momentum nor decay moves it; and the copy that it runs moves no buffer."""
    from elastune.core.sync_plan import SyncPlan

    def ended(mode: Any, num_slots: int) -> list[float]:
        out, execution = tmp_path / f"{mode}{num_slots}", ExecutionSettings(mode=mode, num_slots=num_slots)
        session = lone_session(out, execution=execution, sync=SyncPlan.parse("local:learners=2,every=1"))
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(3, 3), Counting(), nn.Linear(3, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
        model, optimizer = session.prepare(model, sgd)
        for _ in session.epochs(1):
            for (x,) in session.batches(TensorDataset(torch.arange(27.0).reshape(9, 3) / 9), 8, shuffle=False):
                session.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        session.finish()
        return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]

    class Counting(nn.Module):
        """Has a buffer that the mean of each pass moves, however the pass is cut."""

        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.detach().mean(0)
            return x

    # The second learner has none of the last batch's one sample. A learner's two slots are summed, its one is not.
    assert ended(mode, 2) == pytest.approx(ended("exact", 4), rel=1e-5)


@pytest.mark.parametrize("execution", [ExecutionSettings(mode="fast", micro_batch=2, compress="topk")])
def test_a_count_is_refused_where_sums_cannot_be_divided(tmp_path: Path, execution: ExecutionSettings) -> None:
    session, model, _, batches = begun(tmp_path, execution)
    x, _ = next(batches)
    with pytest.raises(UserError, match="count=3 with compressed gradients"):
        session.backward(model(x).mean(), count=3)


def test_a_count_belongs_to_all_slots_of_a_batch(tmp_path: Path) -> None:
    session, model, _, batches = begun(tmp_path, ExecutionSettings(num_slots=2))
    x, _ = next(batches)
    session.backward(model(x).mean(), count=3)
    x, _ = next(batches)
    with pytest.raises(UserError, match="50% of it has one"):
        session.backward(model(x).mean())


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=list(EXECUTIONS))
def test_a_global_batch_without_elements_is_a_step_of_zero_gradients(
    tmp_path: Path, execution: Any, clamped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on any layout, however the program divides by zero."""
    x, y = samples().tensors
    y[8:16] = IGNORED
    monkeypatch.setitem(globals(), "samples", lambda: TensorDataset(x, y))

    def mean(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        count = (y != IGNORED).sum()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss / (count.clamp(min=1) if clamped else count), {"count": count}

    losses, weights = trained(tmp_path, mean, execution)
    assert losses[1] == 0.0
    clamped = True
    expected = plain(mean)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert weights == pytest.approx(expected[1], rel=1e-6)
