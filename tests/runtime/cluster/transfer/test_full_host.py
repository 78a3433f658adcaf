"""A host whose disk is full: its worker trains on without a checkpoint, and all hear which host it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path

import torch

from elastune.core.run import Position
from elastune.train.checkpoints.checkpoint import NoRoom
from elastune.train.checkpoints.place import LocalStorage
from elastune.train.checkpoints.checkpoint_part import CheckpointPart
from elastune.train.checkpoints.spool import Spool

spool = Spool(Path(sys.argv[1]) / "spool")
spool.make()
near = LocalStorage(spool, host="n7")


def told(act):
    try:
        return act()
    except NoRoom as full:
        print(full.value)


large = CheckpointPart.of({"model": {"w": torch.zeros(1 << 19)}})
at = near.draft("1-1-0")
assert told(lambda: near.contribute(at, large)) is None
at = near.draft("2-1-0")  # what was left of the one before it is gone
share = near.contribute(at, CheckpointPart.of({"model": {"w": torch.zeros(8)}}))
try:
    with (spool.at / "filler").open("wb", buffering=0) as filler:
        for size in (4096, 1):
            while filler.write(b"x" * size):
                pass
except OSError:
    pass
told(lambda: near.written(at, share.file))
told(lambda: near.publish(at, Position(step=2), {}, [share]))
(spool.at / "filler").unlink()
near.written(at, share.file)
print(len(spool.tickets()))
"""


def test_a_full_disk_of_a_host_is_no_room_there(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(folder)]
    command = [*small, sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *full, tickets = done.stdout.splitlines()
    assert len(full) == 3, full
    assert all(line.startswith("host n7: ") for line in full), full
    assert "2 MiB needed, 1 MiB free" in full[0], "refused before its first byte"
    assert all("No space left on device" in line for line in full[1:]), full
    assert tickets == "1"
