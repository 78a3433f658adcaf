"""The comparison of steps: bits, gradients of one pass and of several, and the program's own variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastune.train.proof import findings
from elastune.train.proof.compare import (
    Leaf,
    LossPart,
    PassRecord,
    RunRecord,
    StepRecord,
    changed_variables,
    distance,
    encode,
    explain_slots,
    first_difference,
    read_run,
)
from elastune.train.proof.recorder import Quiet, gradient_of, line_in, parts_of

SLOTS, SAMPLES = 4, 8
X = torch.arange(8.0 * SAMPLES).reshape(SAMPLES, 8).sin()
Y = torch.tensor([0, 1, -100, 1, -100, -100, 1, 0])


def leaf(*values: float) -> Leaf:
    return Leaf.of(torch.tensor(values))


def step(number: int = 1, *, loss: float = 1.0, weights: float = 0.5, lr: str = "0.1", **more: object) -> StepRecord:
    one = PassRecord(0, 0, 1.0, (3, 1), 7, (loss,))
    settings = {"lr of group 0": lr}
    record = StepRecord(number, 0, (one,), settings, {"w": leaf(1.0, 2.0)}, {"w": leaf(weights)})
    return replace(record, **more)  # type: ignore[arg-type]


def run(*steps: StepRecord) -> RunRecord:
    return RunRecord(steps)


def taken(loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor], slots: int) -> StepRecord:
    """A step of a small network in ``slots`` passes, as exact mode sums them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    size, passes, total = SAMPLES // slots, [], dict[str, torch.Tensor]()
    for slot in range(slots):
        part = slice(slot * size, (slot + 1) * size)
        value = loss(model, X[part], Y[part])
        gradient = gradient_of(value, model, None)
        (value / slots).backward()
        numbers = tuple(range(part.start, part.stop))
        passes.append(PassRecord(slot, 0, 1 / slots, numbers, 0, (float(value.detach()),), gradient))
    total = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradient = {name: Leaf.of(tensor) for name, tensor in total.items()}
    return StepRecord(1, 0, tuple(passes), {}, gradient, {})


@pytest.mark.parametrize(
    ("cause", "loss"),
    [
        ("same", lambda model, x, y: model(x).square().mean()),
        ("sum", lambda model, x, y: model(x).square().sum()),
        ("unequal mean", lambda model, x, y: F.cross_entropy(model(x), y, ignore_index=-100)),
        ("samples", lambda model, x, y: (model(x) @ model(x).T).square().mean()),
        ("samples", lambda model, x, y: model(x).var(0).mean()),
    ],
)
def test_the_gradient_of_slots_says_what_kind_of_loss_it_is(cause: str, loss: Callable[..., torch.Tensor]) -> None:
    explained = explain_slots(taken(loss, 1), taken(loss, SLOTS))
    if cause == "unequal mean":  # a slot with ignored samples alone has no mean
        explained = explain_slots(taken(loss, 1), taken(loss, 2))
        assert explained.shares == pytest.approx((3 / 5, 2 / 5), abs=1e-3)
    assert explained.cause == cause
    assert (explained.apart > 1e-3) == (cause != "same")
    if cause == "sum":
        assert explained.ratio == pytest.approx(SLOTS, rel=1e-5)


def test_a_mean_whose_elements_are_all_in_one_pass_is_no_sum() -> None:
    def masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = torch.isin(x[:, 0], X[:4, 0]).float()
        return (model(x).square().mean(1) * mask).sum() / mask.sum().clamp(min=1)

    explained = explain_slots(taken(masked, 1), taken(masked, 2))
    assert explained.cause == "unequal mean"
    assert explained.shares == pytest.approx((1.0, 0.0), abs=1e-3)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("beginning", step(before={"w": leaf(2.0)})),
        ("samples", step(passes=(PassRecord(0, 0, 1.0, (3, 2), 7, (1.0,)),))),
        ("content", step(passes=(PassRecord(0, 0, 1.0, (3, 1), 8, (1.0,)),))),
        ("loss", step(loss=1.5)),
        ("gradient", step(gradient={"w": leaf(1.0, 2.5)})),
        ("settings", step(lr="0.2")),
        ("weights", step(weights=0.6)),
        ("steps", step(number=2)),
    ],
)
def test_the_first_difference_is_named(what: str, other: StepRecord) -> None:
    one = step(before={"w": leaf(1.0)} if what == "beginning" else None)
    found = first_difference(run(one), run(other))
    assert found is not None
    assert (found.step, found.what) == (1, what)


def test_equal_runs_have_no_difference_and_a_shorter_one_has() -> None:
    assert first_difference(run(step(), step(2)), run(step(), step(2))) is None
    found = first_difference(run(step(), step(2)), run(step()))
    assert found is not None
    assert (found.step, found.what) == (2, "steps")
    near = run(step(weights=0.5000001))
    assert first_difference(run(step()), near) is not None, "all bits must be equal"
    assert first_difference(run(step()), near, most=1e-5) is None


def test_bits_that_were_not_recorded_count() -> None:
    values = torch.zeros(10_000)
    other = values.clone()
    other[9_999] = 1e-9
    assert distance({"w": Leaf.of(values)}, {"w": Leaf.of(values.clone())}) == 0.0
    assert distance({"w": Leaf.of(values)}, {"w": Leaf.of(other)}) > 0.0


def test_variables_that_differ_are_named_by_the_first_step() -> None:
    def with_variables(number: int, values: Mapping[str, object]) -> StepRecord:
        return step(number, variables=values)

    one = run(with_variables(1, {"train.i": 0, "train.x": 1.0}), with_variables(2, {"train.i": 1, "train.x": 2.0}))
    other = run(with_variables(1, {"train.i": 0, "train.x": 1.0}), with_variables(2, {"train.i": 7, "train.x": 3.0}))
    assert changed_variables(one, other) == {"train.i": ("1", "7"), "train.x": ("2.0", "3.0")}
    assert changed_variables(one, other, kinds=(int,)) == {"train.i": ("1", "7")}


def test_records_are_read_as_they_were_written_and_workers_together(tmp_path: Path) -> None:
    gradient = {"w": leaf(1.0)}
    parts = tuple(
        PassRecord(slot, slot, 0.5, (slot,), 1, (1.0 + slot,), gradient, (LossPart("sum", 3),)) for slot in (0, 1)
    )
    for rank in (1, 0):
        (tmp_path / f"{rank}.jsonl").write_text(encode(step(passes=(parts[rank],))) + "\n")
    (read,) = read_run(tmp_path).steps
    assert read.passes == parts
    assert read.numbers == (0, 1)
    assert read.loss == 1.5


def test_quiet_passes_draw_nothing_and_use_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.TransformerEncoderLayer(8, 2, 8))
    attention = nn.MultiheadAttention(8, 2, dropout=0.5)
    recurrent = nn.LSTM(8, 8, 2, dropout=0.5)

    def values(part: slice) -> torch.Tensor:
        noise = torch.randn(2, 8) + torch.rand_like(X[:2]) + torch.normal(torch.zeros(2, 8), torch.ones(2, 8))
        attended, _ = attention(X[part], X[part], X[part])
        summed: torch.Tensor = model(X[part])[:2] + recurrent(X[part])[0][:2] + attended[:2] + noise
        return summed

    with Quiet():
        assert torch.equal(values(slice(2)), values(slice(2)))
        assert torch.equal(F.dropout(X, 0.5), X)
        normalised = model[1](X)
    assert torch.allclose(normalised, X / (1 + 1e-5) ** 0.5)
    assert not torch.equal(values(slice(2)), values(slice(2)))


def test_lines_of_sums_are_found_in_the_graph() -> None:
    weight = torch.ones(8, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        line = line_in(__file__) + 1
        loss = (X * weight).square().sum() / 3
        other = F.mse_loss(X @ weight, torch.ones(SAMPLES), reduction="sum")
    assert parts_of(loss, __file__) == (LossPart("sum", line),)
    assert [part.kind for part in parts_of(other, __file__)] == ["sum"]
    assert parts_of(loss, "nowhere.py") == ()


TEXT = """
train_set, rest = random_split(data, [8, 2])
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
torch.manual_seed(3)
sampler = DistributedSampler(data)
best = 0
for epoch in range(3):
    seen += 1
    if accuracy > best:
        best = accuracy
"""


def test_candidates_are_found_by_their_syntax() -> None:
    assert findings.splits(TEXT) == [2]
    assert findings.schedulers(TEXT) == [3]
    assert findings.seeds(TEXT) == [4]
    assert findings.distributed_samplers(TEXT) == [5]
    assert findings.counters(TEXT) == [8, 10]
