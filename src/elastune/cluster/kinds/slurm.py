"""``slurm[:SETTING,...]``: workers run in jobs that Slurm starts, or in the allocation that this process is in."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from elastune.cluster.kinds.kind import Access, ClusterFact, ClusterKind, HostKind, RoomWanted, own_folders_of
from elastune.core.cost import SPOT
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elastune.cluster.agents.fleet import Starter
    from elastune.cluster.agents.remembered import Remembered
    from elastune.cluster.fleet import FleetCluster, FleetSize

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+@-]+$")]
JOBS_ONLY = ("partition", "account", "qos", "time", "gpus_per_node")
FOLDER = "cluster"  # in that of the results


@dataclasses.dataclass(frozen=True)
class AgentsToken:
    """By what agents prove who they are: the token in a ``file`` that nodes see, or the ``token`` that they read."""

    file: Path | None
    token: str | None = dataclasses.field(default=None, repr=False)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SlurmKind(ClusterKind):
    """``agents``: whether they are jobs or steps of an allocation; by default steps where this process is in one.

    ``nodes``: how many, or the fewest and the most; ``workers_per_node``, ``cpus_per_worker``, ``gpus_per_node``: what
    each is asked for, one worker a GPU where nothing else is said. ``partition``, ``account``, ``qos``, ``time``: of
    the jobs, as ``sbatch`` takes them. ``idle_s``: how long a node is kept without workers; ``notice_s``: how long
    before its time is up a job's workers begin to leave. ``port``: where agents come to, 0 for any that is free.
    ``kind``: of the nodes, for prices and the policy ``spot``; other agents may come to ``port`` beside them.
    ``folder``: "local" where nodes do not see the run's folder: their agents then push checkpoints to the controller.
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
    def tells_kinds(self) -> bool:
        return self.kind == SPOT

    def check(self, access: Access) -> None:
        from elastune.cluster.slurm.commands import need

        bounds(self.nodes)
        if self.as_steps:
            if "SLURM_JOB_ID" not in os.environ:
                raise UserError("agents=steps needs an allocation", "no SLURM_JOB_ID", "run it under salloc or sbatch")
            if asked := [name for name in JOBS_ONLY if getattr(self, name)]:
                fix = "leave it out, or say agents=jobs to submit jobs from in here"
                raise UserError("steps have what their allocation has", f"{asked[0]}={getattr(self, asked[0])}", fix)
            need("srun", "scontrol")
        else:
            need("sbatch", "squeue", "scancel", "sinfo")

    @property
    def as_steps(self) -> bool:
        """Whether agents are steps of the allocation that this process is in."""
        return self.agents == "steps" if self.agents else "SLURM_JOB_ID" in os.environ

    def open(self, access: Access, room: RoomWanted) -> FleetCluster:
        from elastune.cluster.agents.token import credentials
        from elastune.cluster.fleet import FleetCluster
        from elastune.cluster.slurm.jobs import NODE_LOGS
        from elastune.cluster.slurm.network import address_towards_nodes
        from elastune.comm.interfaces import address_of

        self.check(access)
        if room.grace_s and self.as_steps:
            fix = "leave it out, or say agents=jobs"
            raise UserError("an allocation ends with the command that it is for", f"--grace {room.grace_s:g}s", fix)
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
            raise UserError("agents need a folder for their logs", f"{folder}: {error.strerror}", "see --out") from None
        own = credentials(token_file, tls=access.tls)
        entry = AgentsToken(token_file) if self.folder == "shared" else AgentsToken(None, own.token)
        cluster = FleetCluster(
            address, self.port if left is None else left.port, own.token, tls=own.tls,
            starter=lambda where: starter(where, entry),
            size=size, expected=room.most, grows=room.grows, grace_s=room.grace_s,
            gather_s=access.gather_s if left is not None and room.grows else 0.0, tell=access.tell,
            spot=room.spot, out=room.out, own_folders=own_folders_of(self.folder, room),
        )  # fmt: skip
        if left is not None:  # its agents may have no room: their workers are to be taken over first
            return cluster
        how = "steps of this allocation" if self.as_steps else "Slurm jobs"
        logs = folder if self.as_steps or self.folder == "shared" else f"{NODE_LOGS} of the nodes"
        access.tell(f"waiting for agents with room for {room.workers} workers, {how}; their logs are in {logs}")
        return cluster.gathered(room.workers, access.gather_s)

    def examine(self) -> list[ClusterFact]:
        from elastune.cluster.slurm.commands import need
        from elastune.cluster.slurm.examine import findings
        from elastune.train.machine import software

        need("sinfo", "scontrol", "srun", "sbatch", "squeue", "scancel")
        return findings(self.partition, software())

    def _left(self, folder: Path, address: str, access: Access) -> Remembered | None:
        """The controller before this one, whose agents come to this one; those that would not find it are ended."""
        from elastune.cluster.agents.fleet import NotStarted
        from elastune.cluster.agents.remembered import can_follow, check_gone, remembered
        from elastune.cluster.slurm.jobs import Jobs
        from elastune.cluster.slurm.launch import JobShape

        left = remembered(folder)
        if left is None or (left.address == address and self.port in (0, left.port)):
            return left
        check_gone(left)
        if self.folder == "shared" and can_follow(left, address, self.port):
            access.tell(f"jobs {left.name} are told to come here, to {address} instead of {left.address}")
            return left
        access.tell(f"jobs {left.name} look for their controller at {left.address}:{left.port}: they are ended")
        try:
            Jobs([], JobShape(), folder, left.name).close()
        except NotStarted as error:
            fix = f"end them: scancel --name={left.name}"
            raise UserError("jobs of the controller before this one must have ended", error, fix) from None
        return None

    def _jobs(
        self, folder: Path, room: RoomWanted, left: Remembered | None
    ) -> tuple[FleetSize, Callable[[str, AgentsToken], Starter]]:
        from elastune.cluster.agents.remembered import file_in, new_name, remember
        from elastune.cluster.fleet import FleetSize
        from elastune.cluster.slurm.jobs import Jobs
        from elastune.cluster.slurm.launch import JobShape, agent_command

        each = self.workers_per_node or self.gpus_per_node or 1
        low, high = bounds(self.nodes) or (0, -(-room.most // each))
        shape = JobShape(
            self.partition, self.account, self.qos, self.time, self.notice_s,
            cpus=each * self.cpus_per_worker, gpus=self.gpus_per_node,
        )  # fmt: skip

        def starter(address: str, entry: AgentsToken) -> Starter:
            name = new_name() if left is None else left.name
            if room.grace_s or left is not None:  # before there is a job; those that there are come by it
                remember(folder, name, address)
            moves = file_in(folder) if room.grace_s and self.folder == "shared" else None
            command = agent_command(sys.executable, address, entry.file, each, self.kind, moves)
            return Jobs(command, shape, folder, name, entry.token)

        return FleetSize(high, each, low, self.idle_s), starter

    def _steps(self, folder: Path) -> tuple[FleetSize, Callable[[str, AgentsToken], Starter]]:
        from elastune.cluster.fleet import FleetSize
        from elastune.cluster.slurm.launch import agent_command
        from elastune.cluster.slurm.steps import Steps

        nodes = _nodes_here()
        low, high = bounds(self.nodes) or (len(nodes), len(nodes))
        if high > len(nodes):
            raise UserError("nodes must be in the allocation", self.nodes, f"it has {len(nodes)}")

        def starter(address: str, entry: AgentsToken) -> Starter:
            command = agent_command(sys.executable, address, entry.file, self.workers_per_node, self.kind)
            return Steps(command, nodes, folder, entry.token)

        return FleetSize(high, self.workers_per_node, low, self.idle_s), starter


def bounds(nodes: str | None) -> tuple[int, int] | None:
    """The fewest and the most of ``COUNT`` or ``LOW:HIGH``. Raises ``UserError``."""
    if nodes is None:
        return None
    found = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", nodes)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 <= low <= high or high < 1:
        rule = "--cluster slurm, nodes: COUNT or LOW:HIGH, the most at least 1"
        raise UserError(rule, repr(nodes), "such as nodes=4 or nodes=1:16")
    return low, high


def _nodes_here() -> Sequence[str]:
    from elastune.cluster.agents.fleet import NotStarted
    from elastune.cluster.slurm.commands import ask

    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        return ask("scontrol", "show", "hostnames", listed).split() if listed else [os.environ["SLURMD_NODENAME"]]
    except (NotStarted, KeyError) as error:
        raise UserError("the nodes of the allocation must be known", error, "run it under salloc or sbatch") from None
