"""Preflight check of a program's model in a process of its own, while the caller prepares to start workers.

Only a mechanism that divides the model needs it; other mechanisms accept every model. The process imports torch and
the program, and builds the model of tensors without memory. After ``LONGEST_S`` the check gives up, and the workers
find the error themselves. This file imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Program, RunSpec

LONGEST_S = 20.0
"""Of the program's own lines."""


@contextmanager
def examined_meanwhile(spec: RunSpec, longest_s: float = LONGEST_S) -> Iterator[None]:
    """At the end of the block it is known whether the mechanism of ``spec`` takes the program's model.

    Raises:
        UserError: Where it does not, as ``session.prepare`` would raise it on every worker.
    """
    if not spec.execution.parts.dividing:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="elastune-examined-") as folder:
        asked, told = Path(folder) / "asked.json", Path(folder) / "told.json"
        asked.write_text(json.dumps(_asked(spec, longest_s)))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        # -P: a file in this folder named like a module must not be taken for it
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elastune.train.preflight", str(asked), str(told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            yield
            process.wait()
        finally:
            process.kill()
            process.wait()
        if told.exists() and (refused := json.loads(told.read_text())) is not None:
            raise UserError(*refused)


def _asked(spec: RunSpec, longest_s: float) -> dict[str, object]:
    return {
        "path": str(spec.program.path.resolve()),
        "train": spec.program.train,
        "config": spec.config,
        "seed": spec.seed,
        "execution": spec.execution.to_json(),
        "longest_s": longest_s,
    }


def main() -> int:
    """The process: reads what is asked from its first argument, writes the answer to its second."""
    from elastune.train.program.load import load
    from elastune.train.rehearsal import refusal_of  # here: it brings torch, which the caller may not have

    asked, told = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, asked["longest_s"])  # ends this process
    loaded = load(Program(Path(asked["path"]), asked["train"]))
    refused = refusal_of(
        loaded, asked["config"], ExecutionSettings.from_json(asked["execution"]), told.parent, asked["seed"]
    )
    answer = told.with_suffix(".part")
    answer.write_text(json.dumps(refused and refused.told))
    answer.rename(told)  # whole, or not there
    return 0


if __name__ == "__main__":
    sys.exit(main())
