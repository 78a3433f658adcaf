"""A real Slurm on this machine: its controller and several nodes, which are this machine or namespaces, and a munge.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. Nothing outside of ``folder`` is changed,
and every daemon ends with this process.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.support.hosts import Network

LOOPBACK = "127.0.0.1"
READY_LIMIT_S = 60.0
END_LIMIT_S = 10.0
PREEMPTING_S, PREEMPTING_TIMES = 15.0, 4
CONFIGURATION = """\
ClusterName=virtual
SlurmctldHost={host}({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
KillWait=30
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=brief Nodes=n[1-{nodes}] MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=1
PartitionName=cheap Nodes=n[1-{nodes}] MaxTime=60 State=UP PriorityTier=1 GraceTime=1 PreemptMode=CANCEL
PartitionName=spot Nodes=n[1-{nodes}] MaxTime=60 State=UP PriorityTier=1 GraceTime=60
"""
NODE = "NodeName=n{at} NodeHostname={host} NodeAddr={address} Port={port} CPUs={cpus} RealMemory=2000 State=UNKNOWN\n"


class VirtualSlurm:
    """``nodes`` nodes of ``cpus`` CPUs, n1 and so on, in the partitions main, spot, brief and cheap; jobs of main
    preempt those of spot, after a minute, and of brief and cheap, after a second; those of cheap are cancelled by it.

    ``network``: whose hosts the nodes are, with addresses of their own; without it all have that of this machine.
    A context manager. ``environment``: in which commands find it. Raises ``OSError`` where it does not come up.
    """

    def __init__(self, folder: Path, nodes: int, cpus: int = 2, network: Network | None = None) -> None:
        hosts = [] if network is None else network.hosts[:nodes]
        head = LOOPBACK if network is None else network.address
        self._spaces = {f"n{at}": host.space for at, host in enumerate(hosts, 1)}
        self.folder, self.nodes = folder, [f"n{at}" for at in range(1, nodes + 1)]
        host, folder_text = socket.gethostname().partition(".")[0], str(folder)
        ports = _free_ports(nodes + 1)
        text = CONFIGURATION.format(host=host, head=head, folder=folder_text, port=ports[0], nodes=nodes)
        for at in range(1, nodes + 1):
            address = hosts[at - 1].address if hosts else LOOPBACK
            text += NODE.format(at=at, host=host, address=address, port=ports[at], cpus=cpus)
        for name in ("state", *self.nodes):
            (folder / name).mkdir(parents=True)
        configuration, key = folder / "slurm.conf", folder / "munge.key"
        configuration.write_text(text)
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        self.environment = {**os.environ, "SLURM_CONF": str(configuration)}
        self._stack = ExitStack()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        with self._stack:
            munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
            self._start("munged", "munged", "--foreground", "--force", f"--key-file={key}", *munge)
            self._until(lambda: (folder / "munge.socket").exists())
            self._start("slurmctld", "slurmctld", "-D", "-f", str(configuration))
            for name in self.nodes:
                self._stack.callback(self._end_jobs, name)
                self.start_node(name)
            self._until(lambda: self.ask("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D").strip() == str(nodes))
            self._stack = self._stack.pop_all()

    def ask(self, *command: str) -> str:
        """What a command prints, or "" where it fails."""
        done = self._run(*command)
        return done.stdout if done.returncode == 0 else ""

    def order(self, *command: str) -> str:
        """What a command that has to work prints. Raises ``OSError`` where it fails."""
        done = self._run(*command)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def queue(self, form: str = "%i", *options: str) -> list[str]:
        """The jobs that have not ended, oldest first, each as ``form`` of ``squeue`` says it."""
        return self.ask("squeue", "-h", "--sort=i", "-o", form, *options).split()

    @property
    def running(self) -> dict[str, str]:
        """The node of each job that runs on one, the newest last."""
        return dict(line.split(":") for line in self.queue("%i:%N", "--states=RUNNING"))

    def preempt(self, node: str, seconds: int = 3) -> str:
        """Have Slurm preempt the job that runs on a node, for one of so many seconds. That one, once it has begun to.

        Raises ``OSError`` where Slurm does not do so; it may leave a job waiting whose submission it could not look at.
        """
        (victim,) = (job for job, where in self.running.items() if where == node)
        words = ["--parsable", "--partition=main", f"--nodelist={node}", "--exclusive", "--output=/dev/null"]
        for _ in range(PREEMPTING_TIMES):
            job = self.order("sbatch", *words, f"--wrap=sleep {seconds}").strip()
            deadline = time.monotonic() + PREEMPTING_S
            while time.monotonic() < deadline:
                if victim not in self.running or "PreemptTime=None" not in self.ask("scontrol", "show", "job", victim):
                    return job
                time.sleep(0.1)
            waits = self.told()
            self.order("scancel", job)
        raise OSError(f"Slurm does not preempt job {victim} on {node}: {waits}")

    def told(self) -> str:
        """What Slurm says of its jobs and nodes, and of itself: for a test that fails."""
        log = (self.folder / "slurmctld.log").read_text(errors="replace")[-3000:]
        return "\n".join([self.ask("scontrol", "show", "job"), self.ask("sinfo", "-N", "-l"), log])

    def start_node(self, name: str, hides: Path | None = None) -> None:
        """Have a node's daemon run. ``hides``: a folder that its jobs see nothing of."""
        before = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{hides}" && exec "$@"', "sh"]
        words = [*(before if hides is not None else ()), "slurmd", "-D", "-N", name]
        self._start(name, *(self._spaces[name].command(*words) if name in self._spaces else words))

    def kill_node(self, name: str) -> None:
        """As if its power were cut: the daemon and every process of its jobs are gone, and nobody is told."""
        self._daemons[name].kill()
        self._daemons[name].wait()
        self._end_jobs(name)

    def processes(self, name: str) -> list[int]:
        """The processes that jobs have on a node, and those that hold such a job for Slurm."""
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            mine = f"SLURM_CONF={self.folder}/slurm.conf".encode() in words
            if mine and f"SLURMD_NODENAME={name}".encode() in words:
                found |= {int(path.name), *_holder(int(path.name))}
        return sorted(found)

    def close(self) -> None:
        """Idempotent."""
        self._stack.close()

    def __enter__(self) -> VirtualSlurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=READY_LIMIT_S)

    def _end_jobs(self, name: str) -> None:
        while processes := self.processes(name):
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            # It ends with this process, however this one ends.
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._daemons[name] = daemon
        self._stack.callback(_end, daemon)

    def _until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        while not true():
            if time.monotonic() > deadline:
                logs = {path.name: path.read_text(errors="replace")[-500:] for path in self.folder.glob("*.log")}
                raise OSError(f"Slurm did not come up within {READY_LIMIT_S:g} s: {logs}")
            time.sleep(0.05)


def _holder(process: int) -> set[int]:
    """The slurmstepd that is the parent of a job's process, if it is one's."""
    try:
        parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        return {parent} if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd") else set()
    except FileNotFoundError:
        return set()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
