"""The command line as a process in which torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BLOCKED = """
import sys
sys.modules["torch"] = None
from elastune.cli import main
sys.exit(main())
"""


def torchless(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``elastune`` with ``words`` in ``folder``; an import of torch ends the command with an error."""
    command = [sys.executable, "-c", BLOCKED, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
