"""No monitor shows in what is trained: equal bits with and without each, in either mode, on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.soaked import soaked
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.adapt.monitors.registry import MONITORS
from elastune.core.journal.records import Decided, Measured, NotMeasured, PolicyFailed, Record
from elastune.core.run import Adapt, ExecutionSettings

COMPARING = frozenset({"noise_scale", "noise_scale_adam"})
SETS = {"none": (), **{name: (f"{name}:every=1",) for name in MONITORS}, "all": tuple(MONITORS)}
MEANS = {
    **{f"exact, {n} workers": ExecutionSettings(workers=n, mode="exact", num_slots=4) for n in (1, 3)},
    **{f"fast, {n} workers": ExecutionSettings(workers=n, mode="fast", num_slots=4) for n in (1, 3)},
    "exact, one slot": ExecutionSettings(mode="exact", num_slots=1),
    "exact, one slot in pieces": ExecutionSettings(mode="exact", num_slots=1, micro_batch=9),
    "exact, slots in pieces": ExecutionSettings(workers=2, mode="exact", num_slots=4, micro_batch=4),
    "fast, in pieces": ExecutionSettings(mode="fast", micro_batch=9, num_slots=4),
}

ONE_PASS = (MEANS["fast, 1 workers"], MEANS["exact, one slot"])


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


IN_CI = ("exact, 3 workers", "fast, 1 workers", "fast, 3 workers", "exact, slots in pieces")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", [*IN_CI, *soaked(*sorted(MEANS.keys() - set(IN_CI)))])
def test_equal_bits_with_and_without(where: str) -> None:
    from monitored_workers import train

    from elastune.testing.worker_processes import processes

    execution = MEANS[where]
    found: dict[str, set[str]] = {}
    sent: dict[str, list[Record]] = {}
    with processes(execution.workers, train, execution, SETS) as workers:
        for name in SETS:
            said: list[tuple[Any, ...]] = [workers.receive(rank) for rank in range(execution.workers)]
            found[name] = {sha for _, sha, _ in said}
            sent[name] = [record for *_, records in said for record in records]
    assert len(found["none"]) == 1, "all workers hold the same"
    assert {name for name, shas in found.items() if shas != found["none"]} == set()
    assert all(measured(MONITORS[name].gives, sent[name]) for name in MONITORS.keys() - COMPARING)
    for name in COMPARING:
        told = [record for record in sent[name] if isinstance(record, NotMeasured)]
        if execution in ONE_PASS:
            assert [(record.monitor, record.step) for record in told] == [(name, 1)], "said once"
            assert not measured(MONITORS[name].gives, sent[name])
        else:
            assert not told
            assert measured(MONITORS[name].gives, sent[name])


def measured(names: frozenset[str], sent: list[Record]) -> bool:
    """Whether one of the signals ``names`` was told."""
    return any(names & record.signals.keys() for record in sent if isinstance(record, Measured))


def test_a_policy_that_nothing_can_be_measured_for_does_nothing(tmp_path: Path) -> None:
    sent: list[Record] = []
    adapt = Adapt(policies=("gns:settle=1,factor=1,patience=1", "adascale:base_batch=2"))
    session = lone_session(
        tmp_path, execution=ExecutionSettings(mode="fast", num_slots=4), adapt=adapt, send=sent.append
    )
    model: nn.Module = nn.Linear(3, 2)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(2):
        for (x,) in session.batches(TensorDataset(torch.randn(40, 3)), batch_size=4):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    session.finish()
    assert session.step == 20
    (told,) = [record for record in sent if isinstance(record, NotMeasured)]
    assert told.monitor == "noise_scale"
    assert "--mode exact" in told.why
    assert not [record for record in sent if isinstance(record, Decided | PolicyFailed)]
