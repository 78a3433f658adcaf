"""Run a training command on one process and on several, each observed, and compare what they did."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastune.core.command import TrainingCommand, provided_values
from elastune.core.errors import UserError
from elastune.core.formatting import cut, printable
from elastune.core.notation import duration_text
from elastune.runtime import command_process
from elastune.runtime.observe.differences import Difference, differences
from elastune.runtime.observe.observations import ObservedCommand, read_observation
from elastune.train.program.command import check_executable

HOOK = Path(__file__).parent / "hook"
STEPS = 20
TIME_S = 120.0
GRACE_S = 5.0
_LAST_OUTPUT = 65_536  # bytes of each output of a failed command that are looked at


@dataclass(frozen=True)
class CommandCheck:
    """What a check of a command found.

    Attributes:
        workers: The number of processes that were compared with one.
        steps: How many steps both runs took and the check compared.
        differences: In the order in which things happen; the first one often explains later ones.
        notes: What need not be a mistake.
    """

    workers: int
    steps: int
    differences: tuple[Difference, ...]
    notes: tuple[Difference, ...]


def check_command(
    command: TrainingCommand,
    config: Mapping[str, Any],
    *,
    workers: int = 2,
    steps: int = STEPS,
    time_s: float = TIME_S,
    seed: int = 0,
) -> CommandCheck:
    """Compare the training of ``command`` on ``workers`` processes with that on one.

    Args:
        command: Its words, in which ``{workers}`` is the number of processes.
        config: Values of the other placeholders. ``{batch_per_worker}`` is each process's share of ``batch_size``.
        workers: Number of processes, from 2.
        steps: Number of optimizer steps of which gradients and weights are looked at.
        time_s: Seconds after which a run of the command is ended; what it did until then is compared.
        seed: Value of ``{seed}``.

    Raises:
        UserError: Where the command does not name ``{workers}``, a placeholder has no value, or the command cannot
            start, fails, takes no step or starts another number of processes.

    Example:
        >>> command = parse_command("torchrun --nproc-per-node {workers} train.py {batch_per_worker}")
        >>> check_command(command, {"batch_size": 64}).differences
        ()
    """
    if "workers" not in command.placeholders:
        rule, fix = "the command must say how many processes it starts", "write {workers} in place of their number"
        raise UserError(rule, shlex.join(command.words), fix)
    check_executable(command)
    with tempfile.TemporaryDirectory(prefix="elastune-observe-") as folder:
        places = {count: Path(folder) / str(count) for count in (1, workers)}
        words = {  # both are checked before one runs
            count: list(command.filled({**provided_values(config, count, seed, str(place)), **config}))
            for count, place in places.items()
        }
        one, many = (_observe(words[count], place, count, steps, time_s) for count, place in places.items())
    seen = differences(one, many)
    return CommandCheck(
        workers=workers,
        steps=min(one.steps, many.steps),
        differences=tuple(each for each in seen if not each.note),
        notes=tuple(each for each in seen if each.note),
    )


def _observe(words: list[str], folder: Path, workers: int, steps: int, time_s: float) -> ObservedCommand:
    folder.mkdir(parents=True)
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "ELASTUNE_OBSERVE": str(folder),
        "ELASTUNE_OBSERVE_STEPS": str(steps),
    }
    code = _run(words, environment, folder, time_s)
    observation = read_observation(folder, ended=code is not None)
    if code is not None and code != 0:
        raise UserError(
            "the command must train before it can be checked",
            f"{shlex.join(words)} ended with {code}: {_last_line(folder)}",
            "mend that first",
        )
    if not observation.processes or not observation.steps:
        waited = "" if code is not None else f" within {duration_text(time_s)}"
        raise UserError(
            "the command must take an optimizer step of torch's",
            f"{shlex.join(words)}: none{waited}",
            "give it more time by --time-limit" if code is None else "check what it runs",
        )
    if observation.world != workers:
        raise UserError(
            f"the command must train on {workers} process{'es' * (workers > 1)}",
            f"{observation.world} took steps: {shlex.join(words)}",
            "write {workers} where the command has the number of processes",
        )
    return observation


def _run(words: list[str], environment: dict[str, str], folder: Path, time_s: float) -> int | None:
    """Run the command and end all its processes. Return its exit code; None if it still ran after ``time_s``."""
    request = {
        "words": words,
        "environment": {**environment, "ELASTUNE_METRICS": str(folder / "metrics.jsonl")},
        "folder": str(folder),
        "patterns": [],
        "grace_s": GRACE_S,
    }
    beside = subprocess.Popen(
        [sys.executable, "-I", "-S", command_process.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert beside.stdin is not None
    assert beside.stdout is not None
    orders, messages = beside.stdin, beside.stdout
    orders.write(json.dumps(request).encode() + b"\n")
    orders.flush()
    late = threading.Event()

    def stop() -> None:
        late.set()
        with suppress(OSError, ValueError):  # the command has just ended
            orders.write(b"stop\n")
            orders.flush()

    timer = threading.Timer(time_s, stop)
    timer.start()
    last: dict[str, Any] = {}
    try:
        for line in messages:
            last = json.loads(line)
    finally:  # after Ctrl-C, the end of its input makes the process end the command
        timer.cancel()
        timer.join()
        with suppress(OSError):
            orders.close()
        messages.read()
        messages.close()
        beside.wait()
    if "failed" in last:
        raise UserError("the command must start", f"{shlex.join(words)}: {last['failed']}", "check its path")
    return None if late.is_set() else int(last["ended"])


def _last_line(folder: Path) -> str:
    text = ""
    for name in ("stdout", "stderr"):
        with open(folder / "logs" / f"{name}.log", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_OUTPUT))
            text += file.read().decode(errors="replace") + "\n"
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]  # no rules of a table
    errors = [line for line in lines if re.match(r"(\[rank\d+\]:?\s*)?[\w.]*(Error|Exception)\b", line)]
    return cut(printable((errors or lines or ["it printed nothing"])[-1]), 300)
