"""Buffers that workers moved apart: exact where they agree, and as tensors all the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastune.train.checkpoints.run_state import average


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    for folder in (here, here.parents[1] / "comm"):
        monkeypatch.syspath_prepend(str(folder))


def test_means_of_floats_and_rank_0s_of_anything_else() -> None:
    buffers = [torch.zeros(2), torch.tensor(0)]
    third = 1 / 3  # three of it, summed up and divided by three, are another number in float64
    rows = [torch.tensor([0.1 + rank, third, 7.0 + rank], dtype=torch.float64) for rank in range(3)]
    found = average(buffers, rows)
    assert found.tolist() == [pytest.approx(1.1, abs=1e-15), third, 7.0]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e300, -0.7])
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_a_mean_of_equal_numbers_is_not_rounded(value: float, workers: int) -> None:
    rows = [torch.tensor([value], dtype=torch.float64)] * workers
    assert average([torch.zeros(1)], rows).item() == value


def test_a_million_values_take_no_python_lists(tmp_path: Path) -> None:
    """Measured in the same process against the same values as lists of floats, in processor time."""
    from averaging_workers import average as act

    from elastune.testing.worker_processes import processes

    with processes(2, act, str(tmp_path)) as workers:
        for rank in range(2):
            moved_first, moved_last, equal, count = workers.receive(rank)
            assert (moved_first, moved_last) == (pytest.approx(0.6), pytest.approx(0.6))
            assert equal == torch.tensor(0.1).item()
            assert count == 3
            tensors_s, lists_s = workers.receive(rank)
            assert tensors_s < lists_s / 3, (tensors_s, lists_s)
