"""What a worker does not send it owes: nothing of a gradient is lost but with a worker that dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastune.testing.worker_processes import processes

KINDS = ["powersgd:rank=2", "topk:ratio=0.05"]


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_was_put_is_in_the_sums_or_owed(kind: str) -> None:
    """Whatever a step that was lost had put; and all have the same sums."""
    import owing_workers

    with processes(3, owing_workers.all_is_sent_or_owed, kind) as them:
        ends = [them.receive(rank) for rank in range(3)]
    for _, off, owed, given, _ in ends:
        assert off < 1e-4
        assert owed > 0.1, "something is owed, so this tests something"
        assert torch.equal(given, ends[0][3])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_goes_through_once(kind: str) -> None:
    import owing_workers

    with processes(2, owing_workers.nothing_finite_once, kind) as them:
        for rank in range(2):
            assert them.receive(rank)[1] == [True, False, True, True]


@pytest.mark.parametrize("kind", ["topk:ratio=1", "powersgd:rank=1", "int8", "bf16"])
def test_a_bucket_may_have_no_numbers(kind: str) -> None:
    """As that of a parameter without elements has, behind one that has filled its bucket."""
    import owing_workers

    with processes(2, owing_workers.nothing_in_a_bucket, kind) as them:
        for rank in range(2):
            for at, (full, empty, beside) in enumerate(them.receive(rank)[1]):
                torch.testing.assert_close(full, torch.full((8, 4), 2.0 + 2 * at), atol=0.01, rtol=0.01)
                assert empty.shape == (0, 3)
                assert beside.item() == 2.0 + 2 * at


@pytest.mark.parametrize("kind", ["powersgd:rank=1", "topk:ratio=0.05"])
def test_what_a_leaver_owes_another_one_owes(kind: str) -> None:
    """The last worker, which sends nothing, has it in its next gradient, once."""
    import owing_workers

    with processes(3, owing_workers.one_leaves, kind) as them:
        first, second, third = (them.receive(rank)[1] for rank in range(3))
    of_three, of_two = [first[0], second[0], third[0]], [first[1], second[1]]
    assert all(bool(debt.any()) for debt in of_three)
    torch.testing.assert_close(sum(of_two), sum(of_three))
    torch.testing.assert_close(first[3], first[2] + second[2])
    assert not first[4].any(), "nothing is owed any more"
    torch.testing.assert_close(first[5], first[3])
