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
"""How long the program's own lines may run."""


@contextmanager
def examined_meanwhile(spec: RunSpec, longest_s: float = LONGEST_S) -> Iterator[None]:
    """Check, while the block runs, whether the mechanism of ``spec`` accepts the program's model.

    Raises:
        UserError: At the end of the block, where the mechanism refuses the model: the error that ``session.prepare``
            would raise on every worker.

    Example:
        >>> with examined_meanwhile(spec):
        ...     prepare_the_cluster()
    """
    if not spec.execution.parts.dividing:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="elastune-examined-") as folder:
        request, reply = Path(folder) / "request.json", Path(folder) / "reply.json"
        request.write_text(json.dumps(_request(spec, longest_s)))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        # -P: a file in this folder named like a module must not be taken for it
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elastune.train.preflight", str(request), str(reply)],
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
        if reply.exists() and (refusal := json.loads(reply.read_text())) is not None:
            raise UserError(*refusal)


def _request(spec: RunSpec, longest_s: float) -> dict[str, object]:
    return {
        "path": str(spec.program.path.resolve()),
        "train": spec.program.train,
        "arguments": list(spec.program.arguments),
        "config": spec.config,
        "seed": spec.seed,
        "execution": spec.execution.to_json(),
        "longest_s": longest_s,
    }


def main() -> int:
    """The process: read the request from the file of its first argument, write the reply to that of its second."""
    from elastune.train.program.load import load
    from elastune.train.rehearsal import refusal_of  # here: it brings torch, which the caller may not have

    request, reply = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["longest_s"])  # ends this process
    program = Program(Path(request["path"]), request["train"], arguments=tuple(request["arguments"]))
    loaded = load(program, request["seed"], request["config"])
    execution = ExecutionSettings.from_json(request["execution"])
    refusal = refusal_of(loaded, request["config"], execution, reply.parent, request["seed"])
    draft = reply.with_suffix(".part")
    draft.write_text(json.dumps(refusal and refusal.parts))
    draft.rename(reply)  # whole, or not there
    return 0


if __name__ == "__main__":
    sys.exit(main())
