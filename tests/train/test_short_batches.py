"""What plain PyTorch trains, we train: BatchNorm needs two samples a pass, and short batches have few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastune.core.slots import Mode


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


CASES: list[tuple[Mode, int, int]] = [
    (mode, samples, batch)
    for mode in ("exact", "fast")
    for samples, batch in ((64 + 9, 64), (64 + 3, 64), (16, 8), (22, 11))  # of 9 samples 7 slots had one each
]


def ends(workers: int) -> list[list[tuple[Any, ...]]]:
    """What each case came to on each of ``workers``."""
    from short_batch_workers import train_all

    from elastune.testing.worker_processes import processes

    with processes(workers, train_all, CASES) as them:
        return [[them.receive(rank) for rank in range(workers)] for _ in CASES]


def test_batchnorm_trains_on_few_samples() -> None:
    alone = ends(1)
    for told in (alone, ends(2), ends(3)):
        for (mode, samples, _), own, (reference,) in zip(CASES, told, alone, strict=True):
            assert {seen for *_, seen in own} == {samples}
            assert min(size for _, passes, _ in own for size in passes) >= 2
            if mode == "exact":
                assert {tuple(weights) for weights, *_ in own} == {tuple(reference[0])}, "workers do not show"
