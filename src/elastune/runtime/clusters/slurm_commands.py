"""Slurm's commands: their texts and answers as pure functions, and running them with a time limit.

``findings`` asks a Slurm cluster for its properties and for what does not fit, for ``elastune doctor --cluster slurm``.
An error of a command becomes one line.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastune.core.cost import ON_DEMAND
from elastune.core.errors import UserError
from elastune.runtime.clusters.fleet import NeverStarts, NotStarted, Phase
from elastune.runtime.clusters.kind import ClusterFinding

LOG = logging.getLogger(__name__)

LIMIT_S = 30.0
ANSWER_LIMIT_S = 5.0  # of a job that ends: Slurm kills it half a minute after SIGTERM
KEPT = {"SLURM_CONF", "SLURM_CLUSTERS"}


def need(*names: str) -> None:
    """Raise ``UserError`` if a command of Slurm is not on PATH."""
    for name in names:
        if shutil.which(name) is None:
            fix = "run this on a machine of the cluster, such as its login node, or load its module"
            raise UserError("--cluster slurm needs Slurm's commands", f"no {name} on PATH", fix)


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without Slurm's variables about the job of this process."""
    return {key: value for key, value in environment.items() if not key.startswith("SLURM_") or key in KEPT}


def ask(name: str, *arguments: str, text: str = "", limit_s: float = LIMIT_S) -> str:
    """Return the output of the command ``name``. Raises ``NotStarted`` if it fails or does not answer in time."""
    LOG.debug("%s %s", name, shlex.join(arguments))
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
        said = done.stderr.strip() or done.stdout.strip()  # scontrol writes what it does not know to stdout
        lines = said.splitlines() or [f"exit code {done.returncode}"]
        raise NotStarted(f"{name}: {lines[-1].removeprefix(f'{name}: error: ')[:300]}")
    return done.stdout


def begins_again(environment: Mapping[str, str]) -> bool:
    """Whether Slurm has just put the job of this process back into its queue, and will begin it again.

    Slurm counts that before it sends SIGTERM. The environment has the count from the begin of this process.
    """
    job, before = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_RESTART_COUNT", "0")
    if not (job and before.isdigit()):
        return False
    try:
        restarts = re.search(r"\bRestarts=([0-9]+)", ask("scontrol", "show", "job", job, limit_s=ANSWER_LIMIT_S))
    except NotStarted:
        return False
    return restarts is not None and int(restarts[1]) > int(before)


def last_line(log: Path) -> str:
    """Return the last line of a job's log, at most 300 characters, or a sentence about a missing log."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return f"it left no {log}"
    texts = [line.strip() for line in lines if line.strip()]
    return f"{texts[-1][:300]} ({log})" if texts else f"{log} is empty"


GRACE_S = 25  # below Slurm's usual KillWait of 30 s between SIGTERM and SIGKILL
PATIENCE_S = 60  # how long an agent looks for its controller
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
"""Reasons in a job's request, by Slurm's documentation, that no end of another job changes, each with the fix.

Limits on all jobs of a user together, nodes that are down or drained, and held jobs are not among them."""
PER_JOB = re.compile(r"(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?|QOSMin\w+")  # limits on what one job may ask for


@dataclass(frozen=True)
class JobShape:
    """The resources of an agent's job.

    Attributes:
        partition: The partition; None: Slurm's default, like the following two.
        account: The account.
        qos: The quality of service.
        time: The time limit, as Slurm writes it.
        notice_s: How long before the limit the job gets a signal.
        cpus: The number of CPUs.
        gpus: The number of GPUs.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    notice_s: int = 120
    cpus: int = 1
    gpus: int = 0


@dataclass(frozen=True)
class QueueEntry:
    """A job that has not ended. ``reason``: Slurm's word for what it waits for."""

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
    """Return the command line of an agent.

    Args:
        python: The Python interpreter.
        address: The address of its controller ("host:port").
        token_file: The file with the token; None: the agent reads the token from its standard input.
        workers: The number of workers; None: as many as the node has room for.
        kind: The kind of the node.
        moves: The file with the address of the next controller.
    """
    where = "/dev/stdin" if token_file is None else str(token_file)
    command = [python, "-m", "elastune", "agent", "--join", address, "--token-file", where]
    command += ["--patience", f"{PATIENCE_S}s", "--grace", f"{GRACE_S}s", "--kind", kind]
    command += [] if moves is None else ["--moves", str(moves)]
    return command if workers is None else [*command, "--workers", str(workers)]


def sbatch_arguments(shape: JobShape, name: str, logs: Path) -> list[str]:
    """Return the arguments of ``sbatch``, which reads the script from its standard input.

    A job is not requeued: the controller submits another one if it needs it. The agent is the job's only process, so
    it gets the signal before the time limit.
    """
    options = {"partition": shape.partition, "account": shape.account, "qos": shape.qos, "time": shape.time}
    arguments = ["--parsable", f"--job-name={name}", "--nodes=1", "--ntasks=1", f"--cpus-per-task={shape.cpus}"]
    arguments += [f"--{key}={value}" for key, value in options.items() if value is not None]
    arguments += [f"--gpus-per-node={shape.gpus}"] if shape.gpus else []
    return [*arguments, "--no-requeue", f"--signal=B:USR1@{shape.notice_s}", f"--output={log_of(logs, '%j')}"]


def log_of(logs: Path, label: str) -> Path:
    """The log of the agent ``label``."""
    return logs / f"elastune-agent-{label}.log"


def batch_script(command: Sequence[str], notice_s: int, token: str | None = None) -> str:
    """Return the script of a job with one agent, whose label is the number of the job.

    If Slurm preempts a job with a GraceTime, it sends SIGTERM to the job's steps at once, but to its script only after
    that time. So a step beside the agent passes the signal on.

    Args:
        command: The command line of the agent.
        notice_s: How long before the end the job gets a signal.
        token: The token for the agent's standard input, so that it is in no command line.
    """
    line = shlex.join([*command, "--notice-seconds", str(notice_s), "--label"])
    watch = """trap 'kill -TERM "$1"' TERM; sleep infinity & wait"""
    step = shlex.join(["srun", "--overlap", "--ntasks=1", "--input=none", "sh", "-c", watch, "preempted"])
    read = "" if token is None else f" <<'{END_OF_TOKEN}'\n{token}\n{END_OF_TOKEN}"
    return f'#!/bin/sh\n{step} "$$" >/dev/null 2>&1 &\nexec {line} "$SLURM_JOB_ID"{read}\n'


def srun_arguments(node: str, *, reads: bool = False) -> list[str]:
    """Return the arguments of ``srun`` for one task on ``node``, with all resources of the allocation on that node.

    Other steps may run beside it. ``reads``: the task gets the standard input of ``srun``.
    """
    read = "--input=all" if reads else "--input=none"
    return ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", read, "--unbuffered"]


def read_submitted(text: str) -> str:
    """Return the job's number in the output of ``sbatch --parsable``. Raises ``ValueError``."""
    number = text.strip().partition(";")[0]  # the name of the cluster may follow
    if not re.fullmatch(r"[0-9]{1,18}", number):
        raise ValueError(f"no job number in {text[:80]!r}")
    return number


def read_queue(text: str) -> dict[str, QueueEntry]:
    """Return the jobs in the output of ``squeue`` that have not ended, by number, oldest first.

    Raises:
        ValueError: If a line is not one of ``QUEUE_FORMAT``.
    """
    matches = {}
    for line in text.splitlines():
        if not re.fullmatch(r"[0-9]{1,18}\|[A-Z_]+\|.*", line.strip()):
            raise ValueError(f"no line of a queue: {line[:80]!r}")
        number, state, reason = line.strip().split("|", 2)
        if state in WAITING or state in RUNNING:
            matches[number] = QueueEntry("waiting" if state in WAITING else "running", reason)
    return dict(sorted(matches.items(), key=lambda item: int(item[0])))


def waits_for(queue: Mapping[str, QueueEntry]) -> str:
    """Say in one line what the waiting jobs wait for; "" if none waits."""
    waiting = [entry.reason for entry in queue.values() if entry.phase == "waiting"]
    if not waiting:
        return ""
    reasons = ", ".join(dict.fromkeys(reason for reason in waiting if reason not in ("", "None")))
    jobs = "1 job waits" if len(waiting) == 1 else f"{len(waiting)} jobs wait"
    return f"{jobs} in Slurm's queue" + (f" ({reasons})" if reasons else "")


def never_starts(before: Mapping[str, QueueEntry], queue: Mapping[str, QueueEntry]) -> NeverStarts | None:
    """Return why a job of ``queue`` will never start; None if all may.

    The job must have had the same reason in the queue ``before``: some reasons show for a moment while Slurm reads a
    configuration.
    """
    for number, entry in queue.items():
        fix = NEVER.get(entry.reason) or (f"{LESS}, or choose another qos=" if PER_JOB.fullmatch(entry.reason) else "")
        if entry.phase == "waiting" and entry == before.get(number) and fix:
            return NeverStarts(f"job {number} is held up by {entry.reason}, which no waiting changes", fix)
    return None


ANY_PORT = 9  # nothing is sent there


def address_towards(host: str) -> str:
    """Return the address of this machine in the network of ``host``. Raises ``OSError``."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(address)
        return str(route.getsockname()[0])


def address_towards_nodes(partition: str | None) -> str:
    """Return the address by which nodes reach this machine: the one towards the first node. Raises ``UserError``."""
    chosen = [] if partition is None else [f"--partition={partition}"]
    try:
        nodes = ask("sinfo", "--noheader", "--Node", "--format=%o", *chosen).split()
        if not nodes:
            rule = "--cluster slurm needs a partition with nodes"
            raise UserError(rule, partition or "none is the default", "choose one that sinfo lists")
        return address_towards(nodes[0])
    except NotStarted as error:
        raise UserError("Slurm must answer", error, "see sinfo, and SLURM_CONF") from None
    except OSError as error:
        raise UserError("nodes must be reachable", error.strerror, "choose the network by --interface") from None


# --- ``elastune doctor --cluster slurm`` ---

PROBE_LIMIT_S = 60
MOST_APART_S = 1.0
# Runs on a node and prints its time, whether it sees a file of this machine, and the versions of its packages.
PROBE = """\
import sys, time, os
from elastune.train.machine import software
print(time.time(), os.path.exists(sys.argv[1]), software()["elastune"], software()["torch"], sep="|")
"""


@dataclass(frozen=True)
class NodeAnswer:
    """The answer of a node to ``PROBE``.

    Attributes:
        least_apart_s: The least possible difference of its clock from this machine's.
        most_apart_s: The greatest possible difference.
        shares: Whether it sees the folder.
        versions: Its versions of elastune and torch.
    """

    least_apart_s: float
    most_apart_s: float
    shares: bool
    versions: tuple[str, str]


def findings(partition: str | None, versions: Mapping[str, str]) -> list[ClusterFinding]:
    """Return the properties of ``partition``; None: of all partitions. ``versions``: of this machine's packages.

    Raises:
        UserError: If Slurm does not answer.
    """
    chosen = [] if partition is None else [partition]
    try:
        version = ask("sinfo", "--version").strip()
        config = read_pairs(ask("scontrol", "show", "config"))
        partitions = read_records(ask("scontrol", "--oneliner", "show", "partition", *chosen))
        nodes = ask("sinfo", "--noheader", "--format=%R|%D|%t|%c|%m|%G", *(f"--partition={name}" for name in chosen))
    except NotStarted as error:
        raise UserError("Slurm must answer", error, "see sinfo, SLURM_CONF and the name of the partition") from None
    findings = [ClusterFinding("Slurm", version), _preemption(config), _kill_wait(config.get("KillWait", ""))]
    findings += [_partition(each, nodes.splitlines()) for each in partitions]
    address = address_towards_nodes(partition)
    findings.append(ClusterFinding("address for agents", address, "choose it by --interface"))
    return [*findings, *_node(partition, versions)]


def _preemption(config: Mapping[str, str]) -> ClusterFinding:
    mode, requeue = config.get("PreemptMode", "unknown"), config.get("JobRequeue", "unknown")
    return ClusterFinding(
        "preemption", f"PreemptMode={mode}, JobRequeue={requeue}; agents are submitted anew in all modes"
    )


def _kill_wait(text: str) -> ClusterFinding:
    seconds = re.match(r"[0-9]+", text)
    enough = seconds is not None and int(seconds[0]) >= GRACE_S
    fix = f"KillWait={text or 'unknown'}: workers may take {GRACE_S} s to leave; ask for {GRACE_S} or more"
    return ClusterFinding("time after SIGTERM", f"KillWait={text}" if enough else None, fix)


def _partition(facts: Mapping[str, str], nodes: Sequence[str]) -> ClusterFinding:
    name = facts.get("PartitionName", "unknown")
    parts = []
    for line in nodes:
        where, count, state, cpus, memory, gpus = (line.split("|") + [""] * 6)[:6]
        if where == name:
            having = "" if gpus in ("(null)", "") else f", {gpus}"
            parts.append(f"{count} {state} ({cpus} CPUs, {memory} MB{having})")
    limits = ", ".join(f"{key}={facts[key]}" for key in ("MaxTime", "PreemptMode", "GraceTime") if key in facts)
    up = facts.get("State") == "UP" and parts
    fix = f"State={facts.get('State')}, {len(parts)} kinds of nodes: choose another one, see sinfo"
    return ClusterFinding(f"partition {name}", f"{'; '.join(parts)}; {limits}" if up else None, fix)


def _node(partition: str | None, versions: Mapping[str, str]) -> list[ClusterFinding]:
    """Return the properties of one node, if it answers soon."""
    try:
        answer = probe(partition, Path.cwd())
    except NotStarted as error:
        return [ClusterFinding("a node's answer", None, f"{error}: no node was free at once, or see the log of srun")]
    required = versions["elastune"], versions["torch"]
    clocks = f"within {answer.most_apart_s:.1f} s" if answer.least_apart_s < MOST_APART_S else None
    text = f"elastune {answer.versions[0]}, torch {answer.versions[1]}"
    return [
        ClusterFinding("clocks", clocks, f"{answer.least_apart_s:.1f} s apart or more: let NTP set them"),
        ClusterFinding("shared folder", str(Path.cwd()) if answer.shares else None, f"nodes do not see {Path.cwd()}"),
        ClusterFinding(
            "versions", text if answer.versions == required else None, f"a node has {text}: install the same ones"
        ),
    ]


def probe(partition: str | None, folder: Path) -> NodeAnswer:
    """Ask one free node. Raises ``NotStarted`` if none answers."""
    file = folder / f".elastune-probe-{secrets.token_hex(4)}"
    chosen = [] if partition is None else [f"--partition={partition}"]
    options = ["--immediate=20", "--nodes=1", "--ntasks=1", "--time=1", "--input=none", *chosen]
    try:
        file.touch()
        before = time.time()
        output = ask("srun", *options, sys.executable, "-c", PROBE, str(file), limit_s=PROBE_LIMIT_S)
        after = time.time()
    except OSError as error:
        raise NotStarted(f"{folder}: {error.strerror}") from None
    finally:
        file.unlink(missing_ok=True)
    return read_answer(output, before, after)


def read_answer(output: str, before: float, after: float) -> NodeAnswer:
    """Read the ``output`` of a node, which it wrote between two times of this machine's clock.

    Raises:
        NotStarted: If it is not an answer to ``PROBE``.
    """
    parts = output.strip().split("|")
    if len(parts) != 4 or not re.fullmatch(r"[0-9]{1,12}(\.[0-9]+)?", parts[0]) or parts[1] not in ("True", "False"):
        raise NotStarted(f"srun: no answer in {output[:80]!r}")
    then = float(parts[0])
    least, most = max(0.0, before - then, then - after), max(abs(after - then), abs(then - before))
    return NodeAnswer(least, most, parts[1] == "True", (parts[2], parts[3]))


def read_pairs(text: str) -> dict[str, str]:
    """Read the lines ``KEY = VALUE`` of ``scontrol show config``."""
    matches = (re.match(r"(\w+)\s*=\s*(.*\S)", line) for line in text.splitlines())
    return {match[1]: match[2] for match in matches if match}


def read_records(text: str) -> list[dict[str, str]]:
    """Read the lines ``KEY=VALUE ...`` of ``scontrol --oneliner``."""
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in text.splitlines() if "=" in line]
