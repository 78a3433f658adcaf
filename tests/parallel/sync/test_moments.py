"""Optimizers' states, of which one learner may lack what another has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from elastune.core.errors import UserError
from elastune.parallel.comm.group import Group
from elastune.parallel.sync.rounds import StateEntry, completed, entries_of, numbers_of, united
from elastune.testing.kits.sync import same
from elastune.testing.worker_processes import processes


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def reference(name: str) -> dict[str, torch.Tensor]:
    """Learners written out in plain PyTorch; a state that an optimizer has not got is zeros."""
    import skipping_workers as program

    model = program.Skips()
    optimizer = program.optimizer_of(model, name)
    for at in range(len(program.REACHES)):
        crowd = [copy.deepcopy((model, optimizer)) for _ in range(program.PLAN.learners)]
        for number, (own, its) in enumerate(crowd):
            for step in range(program.PLAN.every):
                x, y = program.batch(at, step)
                part = slice(number * program.OWN, (number + 1) * program.OWN)
                its.zero_grad()
                F.cross_entropy(own(x[part]), y[part]).backward()
                its.step()
        names = {key for each in crowd for key in program.told(*each)}
        for key, p in model.named_parameters():
            mean(p.data, [dict(own.named_parameters())[key].data for own, _ in crowd])
            there = [dict(program.state_of(its, dict(own.named_parameters())[key])) for own, its in crowd]
            for kept in sorted(each.partition(":")[2] for each in names if each.startswith(f"{key}:")):
                known = next(state[kept] for state in there if kept in state)
                rows = [state.get(kept, torch.zeros_like(known)) for state in there]
                mean(optimizer.state[p].setdefault(kept, torch.zeros_like(known)), rows)
    return program.told(model, optimizer)


def mean(target: torch.Tensor, rows: list[torch.Tensor]) -> None:
    """Along the canonical tree of three."""
    target.copy_(((rows[0] + rows[1]) + rows[2]) / 3)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_layer_that_one_learner_alone_has_used(name: str) -> None:
    """On one worker, and on two, of which the first has no learner that used it."""
    import skipping_workers

    alone = skipping_workers.trained(Group(), name)
    expected = reference(name)
    assert any(key.startswith("some.weight:") for key in alone)
    assert not any(key.startswith("never.weight:") for key in alone), "what nobody uses has no state"
    assert alone.keys() == expected.keys()
    for key, value in alone.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-12)
    with processes(2, skipping_workers.work, name) as them:
        for rank in range(2):
            same(them.receive(rank)[1], alone)
        for rank in range(2):
            them.send(rank, "end")


P = [torch.zeros(2, 3), torch.zeros(4)]


def test_what_is_missing_is_zero_in_the_order_of_all() -> None:
    step, average = torch.tensor(3.0), torch.ones(2, 3)
    some: list[dict[str, Any]] = [{"step": step, "average": average, "count": 2}, {}]
    others: list[dict[str, Any]] = [{}, {"rate": 0.5, "empty": None}]
    entries = united(entries_of(each, P) for each in (some, others))
    assert [(each.place, each.name) for each in entries] == [(0, "step"), (0, "average"), (0, "count"), (1, "rate")]
    full = completed(others, entries, P)
    assert [value.tolist() for value in numbers_of(full)] == [0.0, [[0.0] * 3] * 2, [0.0], [0.5]]
    assert (full[0]["count"], full[1]["empty"]) == (0, None)
    assert completed(some, entries, P)[0]["average"] is average
    assert entries_of(full, P) == entries_of(completed(some, entries, P), P) == entries


def test_what_has_no_mean_is_refused() -> None:
    for value in (torch.zeros(2, dtype=torch.int64), True, "text"):
        with pytest.raises(UserError, match="must be of numbers"):
            entries_of([{"it": value}, {}], P)
    with pytest.raises(UserError, match="alike states"):
        united([[StateEntry(0, "it", "float")], [StateEntry(0, "it", "torch.float32", (2,))]])
