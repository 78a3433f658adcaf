"""A program that dies by SIGKILL, once, at a given stage of writing a checkpoint.

``stage``: "snapshot" (the state is copied, no file is begun), "file" (a file is partly written), "files" (all files of
tensors are on the disk), "manifest" (state.json, too, under the draft's name), "done" (the checkpoint has its name, and
nobody has reported it). ``mark``: a file that the death leaves, so that the next life of the program goes on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elastune.testing.faults import digit_rows
from elastune.train.checkpoints import checkpoint, checkpoint_part
from elastune.train.session import Session

config = {"epochs": 2, "stage": "", "mark": "", "at": 12, "dies": 0, "rest_s": 0.02}


def kill_once(session: Session, stage: str, mark: str, at: int) -> None:
    """Let this process die at ``stage`` of the checkpoint after ``at`` steps."""

    def die(draft: Path) -> None:
        if draft.name.startswith(f".draft-{at}-") and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(owner: Any, name: str, *, after: bool, draft_of: Callable[..., Path]) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            if not after:
                die(draft_of(*args))
            result = inner(*args, **kwargs)
            if after:
                die(draft_of(*args))
            return result

        setattr(owner, name, outer)

    def of(at: Path, *_: Any) -> Path:
        return at

    match stage:
        case "snapshot":
            wrap(checkpoint, "contribute", after=False, draft_of=of)
        case "file":
            wrap(checkpoint_part, "append", after=True, draft_of=lambda file, _: Path(file.name).parent)
        case "files":
            wrap(checkpoint, "publish", after=False, draft_of=of)
        case "manifest":
            wrap(checkpoint, "complete_draft", after=False, draft_of=of)
        case "done":
            wrap(checkpoint, "complete_draft", after=True, draft_of=of)


def train(session: Session) -> None:
    values = session.config
    model = nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = session.prepare(model, optimizer)
    if session.state.workers.worker == values["dies"]:
        kill_once(session, str(values["stage"]), str(values["mark"]), int(str(values["at"])))
    rows, _ = digit_rows(640)
    for _epoch in session.epochs(int(str(values["epochs"]))):
        for x, y in session.batches(rows, batch_size=64):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(float(str(values["rest_s"])))  # the thread that writes comes to its stage meanwhile
        session.report(steps=float(session.step))
