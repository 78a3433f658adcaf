"""Workers that train all twins, one after another: what test_twins.py runs."""

from __future__ import annotations

from pathlib import Path

from tests.parity.programs.twin import twins
from tests.support.sessions import lone_session

from elastune.core.run import ExecutionSettings
from elastune.testing.worker_processes import Worker


def train_all(worker: Worker, slots: int, seed: int) -> None:
    """Say the weights' digest and the losses of each."""
    for name, train in twins().items():
        execution, losses = ExecutionSettings(workers=worker.size, num_slots=slots), []
        session = lone_session(Path("nowhere"), group=worker.form(name), execution=execution, seed=seed)
        train(session, losses)
        session.finish()
        assert session.trained is not None
        worker.send(name, session.trained.fingerprint(session.state.workers), losses)
