"""A SkyPilot task: every node runs an agent, the first one the controller beside it.

SkyPilot starts all nodes of a job anew when one of them is taken away; the run then goes on from its newest checkpoint.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from elastune.cluster.deploy.deployment import TRY_AGAIN, Deployment

SHARED = "/results"
GRACE_S = 30
# Words of the script that its shell is to expand.
HEAD, INTERFACE, TOKEN_FILE = '"$head"', '"$interface"', '"$HOME"/elastune-token'
HEADER = """\
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
    agent = _line(wanted.agent(HEAD, TOKEN_FILE, GRACE_S))
    run = _line(wanted.run(INTERFACE, TOKEN_FILE, SHARED))
    find = "from elastune.comm.interfaces import interface_with as name; import sys; print(name(sys.argv[1]))"
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
