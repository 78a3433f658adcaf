"""What tests do to a program while it trains: it rests while they wait for something, and one of its workers dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from elastune.testing.faults import Rests
from elastune.train.session import Session

CONFIG = {"until": "", "pause_s": 0.0, "killed": ""}


def disturb(session: Session, steps: int) -> None:
    """After each of ``steps`` steps. ``until``: rest while there is no such file. ``killed``: where there is no such
    file, the second worker makes it at half of the steps and is killed."""
    marker = str(session.config["killed"])
    if marker and session.rank == 1 and session.step == steps // 2 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    Rests(session, steps).rest()
