"""Run a training command on one process and on several, each observed, and compare what they did."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.formatting import cut, printable
from elastune.core.notation import duration_text
from elastune.runtime.observe.differences import Difference, differences
from elastune.runtime.observe.observations import Observation, read_observation

HOOK = Path(__file__).parent / "hook"
STEPS = 20
TIME_S = 120.0
GRACE_S = 5.0
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_LAST_OUTPUT = 65_536  # bytes of a failed command's output that are looked at
_POLL_S = 0.05


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


def check_command(command: str, *, workers: int = 2, steps: int = STEPS, time_s: float = TIME_S) -> CommandCheck:
    """Compare the training of ``command`` on ``workers`` processes with that on one.

    Args:
        command: Such as ``torchrun --nproc-per-node {workers} train.py --batch-size {split:64}``. No shell sees it.
        workers: Number of processes, from 2.
        steps: Number of optimizer steps of which gradients and weights are looked at.
        time_s: Seconds after which a run of the command is ended; what it did until then is compared.

    Raises:
        UserError: Where the command has no ``{workers}``, another placeholder, cannot start, fails, takes no step, or
            starts another number of processes.

    Example:
        >>> check_command("torchrun --nproc-per-node {workers} train.py", workers=2).differences
        ()
    """
    words = {count: words_of(command, count) for count in (1, workers)}  # all are checked before one runs
    with tempfile.TemporaryDirectory(prefix="elastune-observe-") as folder:
        one, many = (
            _observe(each, Path(folder) / str(count), count, steps, time_s) for count, each in words.items()
        )
    found = differences(one, many)
    return CommandCheck(
        workers=workers,
        steps=min(one.steps, many.steps),
        differences=tuple(each for each in found if not each.note),
        notes=tuple(each for each in found if each.note),
    )


def words_of(command: str, workers: int) -> list[str]:
    """Return the words of ``command`` for so many processes.

    ``{workers}`` is the number of processes, and ``{split:N}`` their equal shares of N.

    Raises:
        UserError: Where quotes do not match, a placeholder is unknown, or N cannot be divided.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError("a command must have matching quotes", f"{command!r}: {error}", "close the quote") from None
    if not words:
        raise UserError("--command must not be empty", repr(command), "such as 'torchrun --nproc-per-node {workers} F'")
    names = [name for word in words for name in _PLACEHOLDER.findall(word)]
    if "workers" not in names:
        raise UserError(
            "the command must say how many processes it starts", command, "write {workers} in place of their number"
        )

    def value(match: re.Match[str]) -> str:
        name, _, number = match[1].partition(":")
        if match[1] == "workers":
            return str(workers)
        if name != "split":
            fix = "the placeholders are {workers} and {split:N}"
            raise UserError("a command's placeholder must be known", match[0], fix)
        if not (number.isascii() and number.isdigit()) or not int(number) or int(number) % workers:
            fix = f"such as {{split:{32 * workers}}}"
            raise UserError(f"{{split:N}} needs an N that {workers} processes can share equally", match[0], fix)
        return str(int(number) // workers)

    return [_PLACEHOLDER.sub(value, word) for word in words]


def _observe(words: list[str], folder: Path, workers: int, steps: int, time_s: float) -> Observation:
    folder.mkdir(parents=True)
    if shutil.which(words[0]) is None:
        raise UserError("the command's program must exist", words[0], "give its path, or activate its environment")
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "ELASTUNE_OBSERVE": str(folder),
        "ELASTUNE_OBSERVE_STEPS": str(steps),
    }
    output = folder / "output"
    with open(output, "wb") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            code = _ended(process, time_s)
        finally:
            _end_group(process)
    observation = read_observation(folder, ended=code is not None)
    if code is not None and code != 0:
        raise UserError(
            "the command must train before it can be checked",
            f"{shlex.join(words)} ended with {code}: {_last_line(output)}",
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


def _ended(process: subprocess.Popen[bytes], time_s: float) -> int | None:
    """The exit code; None if the command still ran after ``time_s``."""
    until = time.monotonic() + time_s
    while time.monotonic() < until:
        code = process.poll()
        if code is not None:
            return code
        time.sleep(_POLL_S)
    return None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the command and all processes of its session: by SIGTERM, and after a while by SIGKILL."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        until = time.monotonic() + wait_s
        while time.monotonic() < until and _group_lives(process):
            time.sleep(_POLL_S)
    process.wait()


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # a dead leader that nobody waited for is still in its group
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _last_line(output: Path) -> str:
    with open(output, "rb") as file:
        file.seek(max(0, output.stat().st_size - _LAST_OUTPUT))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]:?\s*)?\w*(Error|Exception)\b", line)]
    return cut(printable((errors or lines or ["it printed nothing"])[-1]), 300)
