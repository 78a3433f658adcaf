"""A loss that compares samples of the whole global batch: the plain loop's losses, and equal bits on any workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.parity.programs.contrast import plain, train
from tests.support.sessions import lone_session

from elastune.core.run import ExecutionSettings, derive
from elastune.train.rng import seed_everything

SEED = 3


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def expected() -> list[float]:
    seed_everything(derive(SEED, "init"))
    return plain()


@pytest.mark.parametrize(
    "execution",
    [
        ExecutionSettings(num_slots=1),
        ExecutionSettings(num_slots=4),
        ExecutionSettings(num_slots=3, micro_batch=2),
        ExecutionSettings(mode="fast", micro_batch=5),
        ExecutionSettings(num_slots=4, mechanism="zero"),
    ],
)
def test_losses_are_those_of_the_plain_loop(
    tmp_path: Path, expected: list[float], execution: ExecutionSettings
) -> None:
    _, losses = train(lone_session(tmp_path, execution=execution, seed=SEED))
    assert losses == pytest.approx(expected, rel=2e-6)
    if execution.num_slots == 1:
        assert losses == expected


def test_two_workers_train_as_one(tmp_path: Path, expected: list[float]) -> None:
    from contrast_workers import LAYOUTS, train_all

    from elastune.testing.worker_processes import processes

    execution = ExecutionSettings(num_slots=4)
    alone = {dropout: train(lone_session(tmp_path, execution=execution, seed=SEED), dropout) for dropout in (0.0, 0.3)}
    assert alone[0.3][1] != pytest.approx(expected, rel=1e-3)
    with processes(2, train_all, SEED) as workers:
        for layout in LAYOUTS:
            for dropout in (0.0, 0.3):
                for rank in range(2):
                    *case, digest, losses = workers.receive(rank)
                    assert case == [layout, dropout]
                    if layout == "fast":
                        assert dropout or losses == pytest.approx(expected, rel=2e-6)
                    else:
                        assert (digest, losses) == alone[dropout], case
