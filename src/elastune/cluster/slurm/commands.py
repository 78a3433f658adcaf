"""Slurm's own commands, run with a limit of time; what goes wrong is told in one line."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from elastune.cluster.agents.fleet import NotStarted
from elastune.core.errors import UserError

LIMIT_S = 30.0
KEPT = {"SLURM_CONF", "SLURM_CLUSTERS"}


def need(*names: str) -> None:
    """Raise ``UserError`` where a command of Slurm is not there."""
    for name in names:
        if shutil.which(name) is None:
            fix = "run this on a machine of the cluster, such as its login node, or load its module"
            raise UserError("--cluster slurm needs Slurm's commands", f"no {name} on PATH", fix)


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what Slurm has said of the job that this process is in."""
    return {key: value for key, value in environment.items() if not key.startswith("SLURM_") or key in KEPT}


def ask(name: str, *arguments: str, text: str = "", limit_s: float = LIMIT_S) -> str:
    """What the command ``name`` of Slurm prints. Raises ``NotStarted`` where it fails or does not answer."""
    try:
        done = subprocess.run(
            [name, *arguments],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=outside(os.environ),
            start_new_session=True,  # Ctrl-C is for the controller
        )
    except FileNotFoundError:
        raise NotStarted(f"{name} is not on PATH") from None
    except OSError as error:
        raise NotStarted(f"{name}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise NotStarted(f"{name} has not answered within {limit_s:g} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NotStarted(f"{name}: {said[-1].removeprefix(f'{name}: error: ')[:300]}")
    return done.stdout


def last_line(log: Path) -> str:
    """The last line of a job's log, at most 300 characters; what to do where there is none."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return f"it left no {log}"
    said = [line.strip() for line in lines if line.strip()]
    return f"{said[-1][:300]} ({log})" if said else f"{log} is empty"
