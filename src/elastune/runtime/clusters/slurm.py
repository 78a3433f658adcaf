"""``slurm[:SETTING,...]``: workers run in jobs that Slurm starts, or in the allocation of this process.

``Jobs`` starts each agent as a batch job of one node. ``Steps`` starts the agents as steps of the allocation in
which the controller runs, one a node.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from elastune.core.cost import SPOT
from elastune.core.errors import UserError
from elastune.runtime.clusters.fleet import NeverStarts, NotStarted, Phase, Starter, forget
from elastune.runtime.clusters.kind import (
    Access,
    CapacityRequest,
    ClusterFinding,
    ClusterKind,
    HostKind,
    has_own_folders,
)
from elastune.runtime.clusters.slurm_commands import (
    QUEUE_FORMAT,
    JobShape,
    QueueEntry,
    ask,
    batch_script,
    last_line,
    log_of,
    never_starts,
    read_queue,
    read_submitted,
    sbatch_arguments,
    srun_arguments,
    waits_for,
)
from elastune.runtime.job.interrupts import HandOver

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastune.runtime.clusters.fleet import ControllerAddress, FleetCluster, FleetSize


END_LIMIT_S = 5.0  # for jobs whose agents were asked to end
JOBS_CLOSE_LIMIT_S = 40.0  # Slurm gives a cancelled job up to its KillWait, usually 30 s
LOOK_S = 0.2
NODE_LOGS = Path("/tmp")  # for logs on nodes that share no folder; Slurm may give each job its own /tmp


class Jobs(Starter):
    """Starts agents as batch jobs of Slurm. Labels are the jobs' numbers.

    Args:
        command: The command line of an agent.
        shape: The resources of a job.
        folder: The folder of the controller's address and of the agents' logs.
        name: The name of the jobs. Jobs with other names are neither read nor ended.
        token: The token for the agents' standard input, on nodes that do not see ``folder``; their logs stay there.
    """

    def __init__(
        self, command: Sequence[str], shape: JobShape, folder: Path, name: str, token: str | None = None
    ) -> None:
        self.name = name
        self._shape, self._folder = shape, folder
        self._logs, self._sees_logs = (folder, True) if token is None else (NODE_LOGS, False)
        self._script = batch_script(command, shape.notice_s, token)
        self._queue: dict[str, QueueEntry] = {}
        self._never: NeverStarts | None = None
        self._closed = False

    def start(self, count: int) -> None:
        for _ in range(count):
            output = ask("sbatch", *sbatch_arguments(self._shape, self.name, self._logs), text=self._script)
            try:
                read_submitted(output)
            except ValueError as error:
                raise NotStarted(f"sbatch: {error}") from None

    def look(self) -> dict[str, Phase]:
        output = ask("squeue", "--noheader", f"--name={self.name}", f"--format={QUEUE_FORMAT}")
        try:
            queue = read_queue(output)
        except ValueError as error:
            raise NotStarted(f"squeue: {error}") from None
        self._never, self._queue = never_starts(self._queue, queue), queue
        return {number: entry.phase for number, entry in queue.items()}

    def cancel(self, labels: Sequence[str]) -> None:
        ask("scancel", *labels)

    def why(self, label: str) -> str:
        log = log_of(self._logs, label)
        return last_line(log) if self._sees_logs else f"see {log} on its node"

    def waits(self) -> str:
        return waits_for(self._queue)

    def never(self) -> NeverStarts | None:
        return self._never

    def close(self) -> None:
        """Cancel the jobs that have not ended by themselves, and wait until the queue has none."""
        if self._closed:
            return
        self._closed = True
        HandOver.ask(None)
        ask("scancel", "--state=PENDING", f"--name={self.name}")
        started = time.monotonic()
        cancelled = False
        while left := self.look():
            waited_s = time.monotonic() - started
            if waited_s >= JOBS_CLOSE_LIMIT_S:
                raise NotStarted(f"jobs {', '.join(left)} are still in the queue: scancel --name={self.name}")
            if waited_s >= END_LIMIT_S and not cancelled:
                ask("scancel", f"--name={self.name}")
                cancelled = True
            time.sleep(LOOK_S)
        forget(self._folder)


STEPS_CLOSE_LIMIT_S = 20.0


class Steps(Starter):
    """Starts agents by srun in the allocation of this process.

    Labels are the nodes, with a number from the second start on. A step ends with its agent, and an agent with its
    controller.

    Args:
        command: The command line of an agent.
        nodes: The nodes.
        folder: The folder of the logs.
        token: The token for the agents' standard input; None: they read its file.
    """

    def __init__(self, command: Sequence[str], nodes: Sequence[str], folder: Path, token: str | None = None) -> None:
        self._command, self._folder, self._token = command, folder, token
        self._starts = dict.fromkeys(nodes, 0)
        self._on: dict[str, str] = {}  # the label of the step on each node
        self._steps: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, count: int) -> None:
        self.look()
        idle = [node for node in self._starts if node not in self._on]
        for node in sorted(idle, key=self._starts.__getitem__)[:count]:
            self._starts[node] += 1
            label = node if self._starts[node] == 1 else f"{node}-{self._starts[node]}"
            reads = self._token is not None
            command = ["srun", *srun_arguments(node, reads=reads), *self._command, "--label", label]
            stdin = subprocess.PIPE if reads else subprocess.DEVNULL
            try:
                with self._log(label).open("wb") as log:
                    step = subprocess.Popen(command, stdin=stdin, stdout=log, stderr=log, start_new_session=True)
            except OSError as error:
                raise NotStarted(f"srun: {error.strerror}") from None
            self._steps[label] = step
            if step.stdin is not None and self._token is not None:
                with suppress(BrokenPipeError), step.stdin:  # it has ended already; its log says why
                    step.stdin.write(self._token.encode())
            self._on[node] = label

    def look(self) -> dict[str, Phase]:
        self._on = {node: label for node, label in self._on.items() if self._steps[label].poll() is None}
        return dict.fromkeys(self._on.values(), "running")

    def cancel(self, labels: Sequence[str]) -> None:
        for label in labels:
            self._steps[label].terminate()

    def why(self, label: str) -> str:
        return last_line(self._log(label))

    def waits(self) -> str:
        return ""

    def close(self) -> None:
        left = [step for step in self._steps.values() if step.poll() is None]
        for step in left:
            step.terminate()
        for step in left:
            try:
                step.wait(STEPS_CLOSE_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(step.pid, 9)
                step.wait()

    def _log(self, label: str) -> Path:
        return log_of(self._folder, label)


Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+@-]+$")]
JOBS_ONLY = ("partition", "account", "qos", "time", "gpus_per_node")
FOLDER = "cluster"  # in the output folder


@dataclasses.dataclass(frozen=True)
class AgentsToken:
    """The secret of agents: the token in a ``file`` that nodes see, or the ``token`` for their standard input."""

    file: Path | None
    token: str | None = dataclasses.field(default=None, repr=False)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SlurmKind(ClusterKind):
    """The settings of a cluster ``slurm``.

    Attributes:
        partition: Of the jobs, as ``sbatch`` takes it, like ``time``, ``account`` and ``qos``.
        nodes: The number of nodes, or the least and the greatest number.
        workers_per_node: The room of each agent; None: one worker for each GPU, or one.
        cpus_per_worker: The CPUs of a worker.
        gpus_per_node: The GPUs of a node.
        agents: Whether agents are jobs, or steps of an allocation; None: steps if this process is in an allocation.
        idle_s: How long a node stays without workers.
        notice_s: How long before the time limit of a job its workers begin to leave.
        port: The port to which agents connect; 0: any free one. Other agents may connect, too.
        kind: The kind of the nodes, for prices and the policy ``spot``.
        folder: "local" if nodes do not see the output folder: their agents then send checkpoints to the controller.
    """

    partition: Word | None = None
    nodes: str | None = None
    time: Annotated[str, Field(pattern=r"^[0-9]+(-[0-9]+)?(:[0-9]+){0,2}$")] | None = None
    workers_per_node: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    cpus_per_worker: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    gpus_per_node: Annotated[int, Field(ge=0, le=1 << 10)] = 0
    account: Word | None = None
    qos: Word | None = None
    agents: Literal["jobs", "steps"] | None = None
    idle_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    notice_s: Annotated[int, Field(ge=1, le=65535)] = 120
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    kind: HostKind = "on-demand"
    folder: Literal["shared", "local"] = "shared"

    name = "slurm"
    form = "slurm[:partition=NAME,nodes=1:16,time=8:00:00,workers_per_node=4]"

    @property
    def reports_host_kind(self) -> bool:
        return self.kind == SPOT

    def check(self, access: Access) -> None:
        from elastune.runtime.clusters.slurm_commands import need

        bounds(self.nodes)
        if self.as_steps:
            if "SLURM_JOB_ID" not in os.environ:
                raise UserError("agents=steps needs an allocation", "no SLURM_JOB_ID", "run it under salloc or sbatch")
            if settings := [name for name in JOBS_ONLY if getattr(self, name)]:
                fix = "leave it out, or use agents=jobs to submit jobs from this allocation"
                value = f"{settings[0]}={getattr(self, settings[0])}"
                raise UserError("steps have the resources of their allocation", value, fix)
            need("srun", "scontrol")
        else:
            limit_s = None if self.time is None else seconds_of(self.time)
            if limit_s is not None and limit_s <= self.notice_s:
                fix = "raise time=, or give a smaller notice_s="
                value = f"time={self.time}: {limit_s} s, and notice_s={self.notice_s}"
                raise UserError("a job must last longer than the notice before its end", value, fix)
            need("sbatch", "squeue", "scancel", "sinfo")

    @property
    def as_steps(self) -> bool:
        """Whether agents are steps of the allocation of this process."""
        return self.agents == "steps" if self.agents else "SLURM_JOB_ID" in os.environ

    def open(self, access: Access, room: CapacityRequest) -> FleetCluster:
        from elastune.parallel.comm.sockets import address_of
        from elastune.runtime.agents.credentials import credentials
        from elastune.runtime.clusters.fleet import FleetCluster
        from elastune.runtime.clusters.slurm_commands import address_towards_nodes

        self.check(access)
        if room.grace_s and self.as_steps:
            fix = "leave it out, or use agents=jobs"
            raise UserError("an allocation ends with its command", f"--grace {room.grace_s:g}s", fix)
        if room.grace_s:
            HandOver.ask(partial(self._hands_over, access.notify, room.grace_s))
        folder = (room.out / FOLDER).resolve()
        address = address_of(access.interface) if access.interface else address_towards_nodes(self.partition)
        left = self._left(folder, address, access) if room.adopts and not self.as_steps else None
        token_file = (access.token_file or folder / "token").resolve()
        size, starter = self._steps(folder) if self.as_steps else self._jobs(folder, room, left)
        most = size.most * (size.workers_each or room.workers)
        if room.workers > most:
            rule = "the nodes must have room for the first workers"
            raise UserError(rule, f"{room.workers} workers, {most} at most", "raise nodes= or workers_per_node=")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"{folder}: {error.strerror}"
            raise UserError("agents need a folder for their logs", why, "choose another --out") from None
        secrets = credentials(token_file, tls=access.tls)
        entry = AgentsToken(token_file) if self.folder == "shared" else AgentsToken(None, secrets.token)
        cluster = FleetCluster(
            address, self.port if left is None else left.port, secrets.token, tls=secrets.tls,
            starter=lambda where: starter(where, entry),
            size=size, expected=room.most, grows=room.grows, grace_s=room.grace_s,
            gather_s=access.gather_s if left is not None and room.grows else 0.0, notify=access.notify,
            spot=room.spot, out=room.out, own_folders=has_own_folders(self.folder, room),
        )  # fmt: skip
        if left is not None:  # its agents may have no free room: adopt their workers first
            return cluster
        how = "steps of this allocation" if self.as_steps else "Slurm jobs"
        logs = folder if self.as_steps or self.folder == "shared" else f"{NODE_LOGS} of the nodes"
        access.notify(f"waiting for agents with room for {room.workers} workers, {how}; their logs are in {logs}")
        return cluster.gathered(room.workers, access.gather_s)

    def examine(self) -> list[ClusterFinding]:
        from elastune.runtime.clusters.slurm_commands import findings, need
        from elastune.train.machine import software

        need("sinfo", "scontrol", "srun", "sbatch", "squeue", "scancel")
        return findings(self.partition, software())

    def _hands_over(self, notify: Callable[[str], None], grace_s: float) -> bool:
        """Whether the workers are to wait for the next start of this process, which is in a job of Slurm itself."""
        from elastune.runtime.clusters.slurm_commands import begins_again

        if not begins_again(os.environ):
            return False
        notify(f"Slurm begins this job again: workers go on for {grace_s:g} s, for the next controller")
        return True

    def _left(self, folder: Path, address: str, access: Access) -> ControllerAddress | None:
        """Return the earlier controller, if its agents will connect to this one. End agents that will not."""
        from elastune.runtime.clusters.fleet import (
            NotStarted,
            can_take_over,
            check_no_controller,
            read_controller_address,
        )
        from elastune.runtime.clusters.slurm_commands import JobShape

        left = read_controller_address(folder)
        if left is None or (left.address == address and self.port in (0, left.port)):
            return left
        check_no_controller(left)
        if self.folder == "shared" and can_take_over(left, address, self.port):
            access.notify(f"jobs {left.name} will connect to {address} instead of {left.address}")
            return left
        access.notify(f"jobs {left.name} look for their controller at {left.address}:{left.port}, and are ended")
        try:
            Jobs([], JobShape(), folder, left.name).close()
        except NotStarted as error:
            fix = f"end them: scancel --name={left.name}"
            raise UserError("jobs of the earlier controller must have ended", error, fix) from None
        return None

    def _jobs(
        self, folder: Path, room: CapacityRequest, left: ControllerAddress | None
    ) -> tuple[FleetSize, Callable[[str, AgentsToken], Starter]]:
        from elastune.runtime.clusters.fleet import FleetSize, file_in, new_name, write_controller_address
        from elastune.runtime.clusters.slurm_commands import JobShape, agent_command

        each = self.workers_per_node or self.gpus_per_node or 1
        low, high = bounds(self.nodes) or (0, -(-room.most // each))
        shape = JobShape(
            self.partition, self.account, self.qos, self.time, self.notice_s,
            cpus=each * self.cpus_per_worker, gpus=self.gpus_per_node,
        )  # fmt: skip

        def starter(address: str, entry: AgentsToken) -> Starter:
            name = new_name() if left is None else left.name
            if room.grace_s or left is not None:  # before a job starts; running agents read it
                write_controller_address(folder, name, address)
            moves = file_in(folder) if room.grace_s and self.folder == "shared" else None
            command = agent_command(sys.executable, address, entry.file, each, self.kind, moves)
            return Jobs(command, shape, folder, name, entry.token)

        return FleetSize(high, each, low, self.idle_s), starter

    def _steps(self, folder: Path) -> tuple[FleetSize, Callable[[str, AgentsToken], Starter]]:
        from elastune.runtime.clusters.fleet import FleetSize
        from elastune.runtime.clusters.slurm_commands import agent_command

        nodes = _nodes_here()
        low, high = bounds(self.nodes) or (len(nodes), len(nodes))
        if high > len(nodes):
            raise UserError("nodes must be in the allocation", self.nodes, f"it has {len(nodes)}")

        def starter(address: str, entry: AgentsToken) -> Starter:
            command = agent_command(sys.executable, address, entry.file, self.workers_per_node, self.kind)
            return Steps(command, nodes, folder, entry.token)

        return FleetSize(high, self.workers_per_node, low, self.idle_s), starter


def seconds_of(limit: str) -> int:
    """The seconds of a time limit of sbatch: MIN, MIN:SEC, HOURS:MIN:SEC, DAYS-HOURS, or DAYS-HOURS:MIN[:SEC]."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def bounds(nodes: str | None) -> tuple[int, int] | None:
    """Read the least and the greatest number of nodes from ``COUNT`` or ``LOW:HIGH``. Raises ``UserError``."""
    if nodes is None:
        return None
    matched = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", nodes)
    low, high = (int(matched[1]), int(matched[2] or matched[1])) if matched else (0, 0)
    if not 0 <= low <= high or high < 1:
        rule = "--cluster slurm, nodes: COUNT or LOW:HIGH, with HIGH at least 1"
        raise UserError(rule, repr(nodes), "such as nodes=4 or nodes=1:16")
    return low, high


def _nodes_here() -> Sequence[str]:
    from elastune.runtime.clusters.fleet import NotStarted
    from elastune.runtime.clusters.slurm_commands import ask

    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        return ask("scontrol", "show", "hostnames", listed).split() if listed else [os.environ["SLURMD_NODENAME"]]
    except (NotStarted, KeyError) as error:
        raise UserError("the nodes of the allocation must be known", error, "run it under salloc or sbatch") from None
