"""What the fuzzers share: how many examples, and what a command may do whatever it is given."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings

from elastune.cli.app import main
from elastune.core.errors import UserError

FUZZ = int(os.environ.get("FUZZ", "0"))
"""So many times as many examples, other ones each time; 0: few, and the same ones each time."""


def fuzz(examples: int) -> Callable[[Any], Any]:
    """A property that is tried on ``examples`` examples, or on more, see ``FUZZ``."""
    return settings(
        max_examples=examples * FUZZ if FUZZ else examples // 2,
        derandomize=not FUZZ,
        database=None,
        phases=[Phase.generate, Phase.shrink] if FUZZ else [Phase.generate],
        report_multiple_bugs=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Said:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """Its one line, "" where it did what it was asked."""
        assert self.code in (0, 1, 2, 75, 130), self
        assert "Traceback" not in self.out + self.err, self
        if self.code != 2:
            return ""
        told = [line for line in self.err.splitlines() if not line.startswith("[")]  # those are of the progress
        lines = [line for line in told if "holds nothing to go on with" not in line]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("elastune: "), self.err
        return lines[0]


def say(*arguments: object) -> Said:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Said(code, out.getvalue(), err.getvalue())


def refusal(act: Callable[[], object]) -> str:
    """What ``act`` refused in one line, "" where it did what it was asked."""
    try:
        act()
    except UserError as error:
        told = str(error)
    else:
        return ""
    assert "\n" not in told
    return told


def everything(folder: Path) -> dict[str, bytes]:
    """All files below ``folder``, and what they hold."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
