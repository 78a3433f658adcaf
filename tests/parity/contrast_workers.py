"""Workers that train two towers, in several layouts: what test_global_losses.py runs."""

from __future__ import annotations

from pathlib import Path

from tests.parity.programs.contrast import train
from tests.support.sessions import lone_session

from elastune.core.run import ExecutionSettings
from elastune.testing.worker_processes import Worker

LAYOUTS = {"replicated": {}, "zero": {"mechanism": "zero"}, "fast": {"mode": "fast"}}


def train_all(worker: Worker, seed: int) -> None:
    """Send digests and losses, without and with dropout."""
    for layout, options in LAYOUTS.items():
        for dropout in (0.0, 0.3):
            execution = ExecutionSettings(workers=worker.size, num_slots=4, **options)
            group = worker.form(f"{layout}{dropout}")
            session = lone_session(Path("nowhere"), group=group, execution=execution, seed=seed)
            worker.send(layout, dropout, *train(session, dropout))
