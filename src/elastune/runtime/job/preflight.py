"""What is checked before workers start: the model of a divided run, and whether ``elastune check`` knows the program.

This file imports no torch.
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
from dataclasses import replace
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.train.program.source import program_digest

# Programs in which ``elastune check`` has found nothing.
#
# Each is an empty file in ``XDG_CACHE_HOME/elastune/checked`` (``~/.cache/elastune/checked``), named by the digest of
# the program. Only file names are read, so writers cannot get in each other's way. An edit of the program makes
# another digest. Imports no torch.

MOST = 1000
"""The most programs that are remembered. With one more, the older half is forgotten."""


def checked_folder() -> Path:
    """Return the folder of the files. Raises ``OSError`` if this user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastune" / "checked"
    except RuntimeError as error:
        raise OSError(f"{error}; set XDG_CACHE_HOME") from None


def note_check(program: Program, *, passed: bool) -> None:
    """Remember the result of a check of ``program``.

    Args:
        program: The program.
        passed: Whether the check found no problem; if not, an earlier success is forgotten.

    Raises:
        OSError: If nothing can be written. The check is valid nevertheless.
    """
    folder = checked_folder()
    mark = folder / program_digest(program)
    if not passed:
        mark.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    _forget_oldest(folder)


def is_checked(program: Program) -> bool:
    """Return whether a check of ``program``, as its file is now, found no problem; False if that is unknown.

    Example:
        >>> is_checked(Program(Path("train.py")))
        False
    """
    try:
        return (checked_folder() / program_digest(program)).is_file()
    except (OSError, ValueError, SyntaxError, RecursionError):  # the run of the file will report the error
        return False


def with_proof(spec: RunSpec, *, unchecked: bool = False) -> RunSpec:
    """Return ``spec`` with a proof in its first step, where several slots or workers share a global batch.

    Each run proves it again. No digest of a program covers what may choose its loss: settings, data, environment
    variables, installed packages.

    Args:
        spec: The run.
        unchecked: Whether to leave the proof out.
    """
    if not spec.shares_batches:
        return spec
    # --resume may find nothing to go on with. Workers prove a first step alone, so others are not proved again.
    return replace(spec, proves=not unchecked, checked=not spec.resume and is_checked(spec.program))


def _forget_oldest(folder: Path) -> None:
    names = os.listdir(folder)
    if len(names) <= MOST:
        return
    aged = []
    for path in (folder / name for name in names):
        try:
            aged.append((path.lstat().st_mtime, path))
        except FileNotFoundError:  # another check has forgotten it
            continue
    for _, path in sorted(aged)[: len(aged) // 2]:
        if not path.is_dir():
            path.unlink(missing_ok=True)


# Preflight check of a program's model in a process of its own, while the caller prepares to start workers.
#
# Only a mechanism that divides the model needs it; other mechanisms accept every model. The process imports torch and
# the program, and builds the model of tensors without memory. After ``LONGEST_S`` the check gives up, and the workers
# find the error themselves. This file imports no torch.

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
            [sys.executable, "-P", "-m", "elastune.runtime.job.preflight", str(request), str(reply)],
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
