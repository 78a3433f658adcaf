"""A Kubernetes JobSet: a controller and agents, each a Job whose pods are replaced when they go.

Of the API jobset.x-k8s.io/v1alpha2. A host that is taken away costs its workers alone: its Job makes another pod, and
the agent in that joins the run. A controller that is taken away goes on from the newest checkpoint.
"""

from __future__ import annotations

from typing import Any

from elastune.cluster.deploy.deployment import FAILED, TRY_AGAIN, WRONG, Deployment

GRACE_S = 60
SHARED, SECRET = "/results", "/etc/elastune"
TOKEN_FILE = f"{SECRET}/token"
HEADER = """\
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
    run = wanted.run("eth0", TOKEN_FILE, SHARED)
    agent = wanted.agent(host, TOKEN_FILE, GRACE_S - 10)
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
            {"name": "results", "mountPath": SHARED},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_S,
            "containers": [container],
            "volumes": [
                {"name": "token", "secret": {"secretName": f"{wanted.name}-token", "defaultMode": 0o400}},
                {"name": "results", "persistentVolumeClaim": {"claimName": wanted.volume}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }
