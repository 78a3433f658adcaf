"""What is said to Slurm and what it answers, as text: pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastune.cluster.agents.fleet import Never, Phase
from elastune.core.cost import ON_DEMAND

GRACE_S = 25  # below Slurm's usual KillWait of 30 s between SIGTERM and SIGKILL
PATIENCE_S = 60  # an agent whose controller has gone looks for it no longer
END_OF_TOKEN = "end of token"  # a token has no spaces
QUEUE_FORMAT = "%i|%T|%r"
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING = {"RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "RESIZING"}
LESS = "ask for less (time=, workers_per_node=, cpus_per_worker=, gpus_per_node=)"
NEVER = {
    "InvalidAccount": "choose another account=",
    "AccountNotAllowed": "choose another account= or partition=",
    "InvalidQOS": "choose another qos=",
    "QOSNotAllowed": "choose another qos= or partition=",
    "PartitionConfig": "choose another partition=, account= or qos=: see scontrol show partition",
    "PartitionTimeLimit": "ask for less time=, or choose another partition=",
    "BadConstraints": f"{LESS}, or choose another partition=",
    "MaxMemPerLimit": f"{LESS}, or choose another partition=",
}
"""Reasons that, by Slurm's documentation, lie in what a job asks for, and no end of another job changes; with what
does. Not among them: limits on what all jobs of somebody use together, what is down or drained, and what is held."""
PER_JOB = re.compile(r"(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?|QOSMin\w+")  # limits on what one job may ask for


@dataclass(frozen=True)
class JobShape:
    """What an agent's job asks for. ``time``: as Slurm writes it; ``notice_s``: how long before its end it is told."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    notice_s: int = 120
    cpus: int = 1
    gpus: int = 0


@dataclass(frozen=True)
class QueueEntry:
    """A job that has not ended. ``reason``: what it waits for, as Slurm calls it."""

    phase: Phase
    reason: str


def agent_command(
    python: str,
    address: str,
    token_file: Path | None,
    workers: int | None,
    kind: str = ON_DEMAND,
    moves: Path | None = None,
) -> list[str]:
    """The agent that serves the controller at ``address``. ``token_file``: None where it reads the token; ``kind``: of
    its node; ``moves``: the file that says where the next controller is, where there is one."""
    where = "/dev/stdin" if token_file is None else str(token_file)
    command = [python, "-m", "elastune", "agent", "--join", address, "--token-file", where]
    command += ["--patience", f"{PATIENCE_S}s", "--grace", f"{GRACE_S}s", "--kind", kind]
    command += [] if moves is None else ["--moves", str(moves)]
    return command if workers is None else [*command, "--workers", str(workers)]


def sbatch_arguments(shape: JobShape, name: str, logs: Path) -> list[str]:
    """Of ``sbatch``, which reads the script from its input.

    A job is not requeued: where one is missed, the controller submits another. Its agent is its only process, so the
    signal before the time limit goes to that.
    """
    asked = {"partition": shape.partition, "account": shape.account, "qos": shape.qos, "time": shape.time}
    arguments = ["--parsable", f"--job-name={name}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={shape.cpus}"]
    arguments += [f"--{key}={value}" for key, value in asked.items() if value is not None]
    arguments += [f"--gpus-per-node={shape.gpus}"] if shape.gpus else []
    return [*arguments, "--no-requeue", f"--signal=B:USR1@{shape.notice_s}", f"--output={log_of(logs, '%j')}"]


def log_of(logs: Path, label: str) -> Path:
    """Where the agent ``label`` says what it has to say."""
    return logs / f"elastune-agent-{label}.log"


def batch_script(command: Sequence[str], notice_s: int, token: str | None = None) -> str:
    """The job of one agent, whose label is the number of the job. ``token``: what it is to read; it stands in no
    command line.

    Where Slurm preempts with a GraceTime it sends SIGTERM to a job's steps at once, but to its script only when that
    time is over: a step beside the agent hands the signal on.
    """
    line = shlex.join([*command, "--notice-seconds", str(notice_s), "--label"])
    watch = """trap 'kill -TERM "$1"' TERM; sleep infinity & wait"""
    step = shlex.join(["srun", "--overlap", "--ntasks=1", "--input=none", "sh", "-c", watch, "preempted"])
    read = "" if token is None else f" <<'{END_OF_TOKEN}'\n{token}\n{END_OF_TOKEN}"
    return f'#!/bin/sh\n{step} "$$" >/dev/null 2>&1 &\nexec {line} "$SLURM_JOB_ID"{read}\n'


def srun_arguments(node: str, *, reads: bool = False) -> list[str]:
    """Of ``srun`` for one task on ``node`` with all that the allocation has there, beside other steps. ``reads``: it
    gets what ``srun`` does."""
    read = "--input=all" if reads else "--input=none"
    return ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", read, "--unbuffered"]


def read_submitted(text: str) -> str:
    """The job's number in what ``sbatch --parsable`` says. Raises ``ValueError``."""
    number = text.strip().partition(";")[0]  # the name of the cluster may follow
    if not re.fullmatch(r"[0-9]{1,18}", number):
        raise ValueError(f"no job number in {text[:80]!r}")
    return number


def read_queue(text: str) -> dict[str, QueueEntry]:
    """The jobs that have not ended, by number, oldest first, in what ``squeue`` says. Raises ``ValueError``."""
    found = {}
    for line in text.splitlines():
        if not re.fullmatch(r"[0-9]{1,18}\|[A-Z_]+\|.*", line.strip()):
            raise ValueError(f"no line of a queue: {line[:80]!r}")
        number, state, reason = line.strip().split("|", 2)
        if state in WAITING or state in RUNNING:
            found[number] = QueueEntry("waiting" if state in WAITING else "running", reason)
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def waits_for(queue: Mapping[str, QueueEntry]) -> str:
    """What the jobs that wait wait for, in one line; "" where none does."""
    waiting = [entry.reason for entry in queue.values() if entry.phase == "waiting"]
    if not waiting:
        return ""
    reasons = ", ".join(dict.fromkeys(reason for reason in waiting if reason not in ("", "None")))
    jobs = "1 job waits" if len(waiting) == 1 else f"{len(waiting)} jobs wait"
    return f"{jobs} in Slurm's queue" + (f" ({reasons})" if reasons else "")


def never_starts(before: Mapping[str, QueueEntry], queue: Mapping[str, QueueEntry]) -> Never | None:
    """Whether a job of ``queue`` will never start; None where all may.

    It has said so in the look ``before``, too: some reasons show for a moment while a configuration is read.
    """
    for number, entry in queue.items():
        fix = NEVER.get(entry.reason) or (f"{LESS}, or choose another qos=" if PER_JOB.fullmatch(entry.reason) else "")
        if entry.phase == "waiting" and entry == before.get(number) and fix:
            return Never(f"job {number} is held up by {entry.reason}, which no waiting changes", fix)
    return None
