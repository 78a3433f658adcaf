"""Sums, and means over a number of elements that varies: the plain loop's losses, on any workers and any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.parity.programs.loss_kinds import KINDS, plain, train
from tests.support.sessions import lone_session

from elastune.core.run import ExecutionSettings, derive
from elastune.train.rng import seed_everything

SEED = 3


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_every_layout_trains_as_the_plain_loop(tmp_path: Path) -> None:
    from loss_workers import LAYOUTS, train_all

    from elastune.testing.worker_processes import processes

    alone, expected = {}, {}
    for kind in KINDS:
        seed_everything(derive(SEED, "init"))
        expected[kind] = plain(kind)
        alone[kind] = train(lone_session(tmp_path, execution=ExecutionSettings(num_slots=4), seed=SEED), kind)
        assert alone[kind][1] == pytest.approx(expected[kind], rel=2e-6)
    with processes(2, train_all, SEED) as workers:
        for layout in LAYOUTS:
            for kind in KINDS:
                for told in (workers.receive(0), workers.receive(1)):
                    assert told[:2] == (layout, kind)
                    assert told[3] == pytest.approx(expected[kind], rel=2e-6), (layout, kind)
                    if layout not in ("fast", "tensor"):  # tensor divides layers: other sums within a product
                        assert told[2] == alone[kind][0], (layout, kind)
