"""What leaves within a round of DiLoCo in fragments."""

from __future__ import annotations

import pytest
import torch

from elastune.core.sync_plan import SyncPlan
from elastune.parallel.comm.group import Group
from elastune.parallel.sync.local_sgd import StreamingDiLoCo


@pytest.mark.parametrize(("steps", "left"), [(12, [4, 8]), (9, [4]), (8, [4]), (5, []), (3, [])])
def test_nothing_leaves_that_a_round_ends_before(steps: int, left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragments leave after steps 4 and 8 and are adopted one step later; with the last step all is exchanged."""
    plan = SyncPlan.parse("diloco:learners=1,every=12,fragments=3,delay=1")
    values = [torch.zeros(4), torch.zeros(3), torch.zeros(2)]
    strategy, sent = StreamingDiLoCo(plan, values, Group()), []
    send = strategy._send

    def told(fragment: int, learners: dict[int, list[torch.Tensor]]) -> None:
        sent.append(taken)
        send(fragment, learners)

    monkeypatch.setattr(strategy, "_send", told)
    strategy.steps = steps
    strategy.begin(values)
    for taken in range(1, steps):
        strategy.mix({0: [value.clone() for value in values]}, taken - 1)
    strategy.finish()
    assert sent == left
