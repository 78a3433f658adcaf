"""Files that let Kubernetes or SkyPilot start a controller and its agents: rendered here, run by the user.

Kubernetes: a JobSet of the API jobset.x-k8s.io/v1alpha2, with a controller and agents, each a Job whose pods are
replaced when they go. A host that is taken away costs only its workers: its Job makes another pod, and the agent in
that pod joins the run. A new controller goes on from the newest checkpoint.
SkyPilot: a task in which every node runs an agent and the first node also the controller. SkyPilot starts all nodes
again when one of them is taken away; the run then goes on from its newest checkpoint.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from elastune.core.errors import UserError

FAILED, WRONG, TRY_AGAIN = 1, 2, 75  # exit codes of the command line
OURS = ("--cluster", "--interface", "--out", "--resume", "--token-file", "--workers", "--gather")
"""Options of ``elastune run`` that a deployment sets itself."""
Label = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Deployment:
    """A controller and its agents on Kubernetes or SkyPilot.

    Args:
        command: The program, as a path in ``image``, and options of ``elastune run``.
        image: A container image that has elastune, torch, the program and its data.
        name: The name of the job, of at most 40 characters, because Kubernetes makes host names of it.
        hosts: The number of agents, each on its own machine.
        workers: The number of workers of each agent.
        gpus: The number of GPUs of each host.
        accelerator: SkyPilot's name of the GPUs.
        port: The port at which the controller listens for agents.
        volume: The name of a volume that all hosts share, for checkpoints and results.
    """

    command: tuple[str, ...]
    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$", max_length=512)]
    name: Label = "train"
    hosts: Annotated[int, Field(ge=1, le=10_000)] = 2
    workers: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    accelerator: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$")] = "H100"
    port: Annotated[int, Field(ge=1024, le=65535)] = 7070
    volume: Label = "results"

    def run(self, interface: str, token_file: str, shared: str) -> list[str]:
        """The controller's command. It resumes the run of an earlier start."""
        where = ["--cluster", f"hosts:{self.port}", "--interface", interface, "--token-file", token_file]
        room = ["--workers", f"1:{self.hosts * self.workers}", "--gather", "60m"]
        return ["elastune", "run", *self.command, *where, *room, "--out", f"{shared}/{self.name}", "--resume"]

    def agent(self, controller: str, token_file: str, grace_s: int) -> list[str]:
        """An agent's command. ``controller``: the host of the controller."""
        join = ["--join", f"{controller}:{self.port}", "--token-file", token_file, "--workers", str(self.workers)]
        return ["elastune", "agent", *join, "--grace", f"{grace_s}s", "--patience", "60m"]


def deployment(command: Sequence[str], **facts: object) -> Deployment:
    """Return a checked deployment. Raises ``UserError`` for a wrong command or option."""
    if not command or command[0].startswith("-"):
        fix = "such as: elastune deploy jobset --image IMAGE -- train.py --epochs 10"
        raise UserError("a deployment runs a program", " ".join(command) or "nothing", fix)
    if reserved := [word for word in command if word.partition("=")[0] in OURS]:
        rule = "a deployment sets where workers run"
        raise UserError(rule, reserved[0], "leave it out; see --hosts, --workers")
    if bad := [word for word in command if not word.isprintable()]:
        raise UserError("a command line is of printable characters", ascii(bad[0]), "leave it out")
    try:
        return Deployment(tuple(command), **facts)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise UserError(f"--{first['loc'][0]}: {message}", repr(first["input"]), "choose another") from None


# A JobSet of the API jobset.x-k8s.io/v1alpha2: the controller and each agent are Jobs, whose pods are replaced when
# they end. The loss of a host costs only its workers: the agent in the replacement pod joins the run. A replaced
# controller resumes from the newest checkpoint.

JOBSET_GRACE_S = 60
JOBSET_SHARED, SECRET = "/results", "/etc/elastune"
JOBSET_TOKEN_FILE = f"{SECRET}/token"
JOBSET_HEADER = """\
# Kubernetes JobSet, rendered by: elastune deploy jobset
# Checked against the published models of its API; not run by those who made elastune.
#
# Needs the JobSet controller (https://jobset.sigs.k8s.io), a claim "{volume}" of a volume that all pods can write
# (ReadWriteMany), and the agents' token, which its owner alone may read: containers run as root.
#   head -c 32 /dev/urandom | base64 | kubectl create secret generic {name}-token --from-file=token=/dev/stdin
#   kubectl apply -f {name}.yaml
"""


def jobset(wanted: Deployment) -> dict[str, Any]:
    """The JobSet of ``wanted``, as an object of its API."""
    host = f"{wanted.name}-controller-0-0.{wanted.name}"
    run = wanted.run("eth0", JOBSET_TOKEN_FILE, JOBSET_SHARED)
    agent = wanted.agent(host, JOBSET_TOKEN_FILE, JOBSET_GRACE_S - 10)
    # A program that fails would fail again; whoever is taken away is no failure.
    once = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [FAILED, WRONG]}}]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": wanted.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["controller"]},
            "replicatedJobs": [
                _job("controller", 1, once, 10, _pod(wanted, run, gpus=0, cpus=1)),
                _job("agents", wanted.hosts, [], 1000, _pod(wanted, agent, gpus=wanted.gpus, cpus=wanted.workers)),
            ],
        },
    }


def _job(name: str, pods: int, rules: list[dict[str, Any]], failures: int, pod: dict[str, Any]) -> dict[str, Any]:
    ignored = [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [TRY_AGAIN]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    job = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": failures,
        "podFailurePolicy": {"rules": [*ignored, *rules]},
        "template": pod,
    }
    return {"name": name, "replicas": 1, "template": {"spec": job}}


def _pod(wanted: Deployment, command: list[str], *, gpus: int, cpus: int) -> dict[str, Any]:
    limits = {"limits": {"nvidia.com/gpu": gpus}} if gpus else {}
    container = {
        "name": "elastune",
        "image": wanted.image,
        "command": command,
        "resources": {"requests": {"cpu": cpus}, **limits},
        "volumeMounts": [
            {"name": "token", "mountPath": SECRET, "readOnly": True},
            {"name": "results", "mountPath": JOBSET_SHARED},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": JOBSET_GRACE_S,
            "containers": [container],
            "volumes": [
                {"name": "token", "secret": {"secretName": f"{wanted.name}-token", "defaultMode": 0o400}},
                {"name": "results", "persistentVolumeClaim": {"claimName": wanted.volume}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }


# In a SkyPilot task every node runs an agent, and the first node also the controller. When a node is taken away,
# SkyPilot restarts all nodes of the job, and the run resumes from its newest checkpoint.

SHARED = "/results"
SKYPILOT_GRACE_S = 30
# Words of the script that its shell is to expand.
HEAD, INTERFACE, TOKEN_FILE = '"$head"', '"$interface"', '"$HOME"/elastune-token'
SKYPILOT_HEADER = """\
# SkyPilot task, rendered by: elastune deploy skypilot
# Checked against a schema written from SkyPilot's documentation; not run by those who made elastune.
#
# Needs a volume that all nodes can write at once, and a token beside this file, which SkyPilot copies to them:
#   (umask 077; head -c 32 /dev/urandom | base64 > token)
#   sky volumes apply {volume}.yaml
#   sky jobs launch {name}.yaml
"""


def skypilot(wanted: Deployment) -> dict[str, Any]:
    """The task of ``wanted``, as SkyPilot reads it."""
    resources: dict[str, Any] = {
        "image_id": f"docker:{wanted.image}",
        "cpus": f"{wanted.workers + 1}+",
        "use_spot": True,
        "job_recovery": {"recover_on_exit_codes": [TRY_AGAIN]},
    }
    if wanted.gpus:
        resources["accelerators"] = f"{wanted.accelerator}:{wanted.gpus}"
    return {
        "name": wanted.name,
        "num_nodes": wanted.hosts,
        "resources": resources,
        "volumes": {SHARED: wanted.volume},
        "file_mounts": {"~/elastune-token": "./token"},
        "run": _script(wanted),
    }


def _script(wanted: Deployment) -> str:
    agent = _line(wanted.agent(HEAD, TOKEN_FILE, SKYPILOT_GRACE_S))
    run = _line(wanted.run(INTERFACE, TOKEN_FILE, SHARED))
    find = "from elastune.parallel.comm.sockets import interface_with as name; import sys; print(name(sys.argv[1]))"
    return f"""\
set -eu
head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
chmod 600 {TOKEN_FILE}
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
  exec {agent}
fi
interface=$(python3 -c {shlex.quote(find)} {HEAD})
{agent} &
exec {run}
"""


def _line(words: Sequence[str]) -> str:
    ours = (HEAD, INTERFACE, TOKEN_FILE)
    return " ".join(word if word.startswith(ours) else shlex.quote(word) for word in words)


SYSTEMS: Mapping[str, tuple[Callable[[Deployment], dict[str, Any]], str]] = {
    "jobset": (jobset, JOBSET_HEADER),
    "skypilot": (skypilot, SKYPILOT_HEADER),
}


def known(system: str) -> str:
    """``system``, if there is one of this name. Raises ``UserError``."""
    if system not in SYSTEMS:
        raise UserError(f"elastune deploy knows {' and '.join(SYSTEMS)}", repr(system), "choose one of them")
    return system


def render(system: str, wanted: Deployment) -> str:
    """The file of ``wanted`` for ``system``, YAML. Raises ``UserError``."""
    build, header = SYSTEMS[known(system)]
    text: str = yaml.dump(build(wanted), Dumper=_Dumper, sort_keys=False, width=120)
    return header.format(name=wanted.name, volume=wanted.volume) + text


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, and nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)
