"""What a worker's machine is called, by itself and by those who tell of it."""

from __future__ import annotations

import os
import socket

HOST = "ELASTUNE_HOST"  # the name that whoever started this process gave its machine


def host_name() -> str:
    """What this machine is called: where each has a name of its own, copies of state are kept on different ones."""
    return os.environ.get(HOST) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
