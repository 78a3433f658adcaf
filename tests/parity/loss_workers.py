"""Two workers that train with losses of each kind: what test_loss_kinds.py runs."""

from __future__ import annotations

from pathlib import Path

from tests.parity.programs.loss_kinds import KINDS, train
from tests.support.sessions import lone_session

from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.testing.worker_processes import Worker

LAYOUTS = {
    "replicated": {},
    "fast": {"mode": "fast"},
    "sharded": {"mechanism": "sharded"},
    "zero": {"mechanism": "zero"},
    "tensor": {"mesh": Mesh(tensor=2)},
    "pipeline": {"mesh": Mesh(pipeline=2)},
}


def train_all(worker: Worker, seed: int) -> None:
    """Send the weights' digest, losses and weights of each kind of loss, in each layout."""
    for layout, options in LAYOUTS.items():
        for kind in KINDS:
            execution = ExecutionSettings(workers=worker.size, num_slots=4, **options)
            group = worker.form(f"{layout}{kind}")
            session = lone_session(Path("nowhere"), group=group, execution=execution, seed=seed)
            worker.send(layout, kind, *train(session, kind))
