"""What a Slurm cluster offers, and what of it does not fit: for ``elastune doctor --cluster slurm``."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastune.cluster.agents.fleet import NotStarted
from elastune.cluster.kinds.kind import ClusterFact
from elastune.cluster.slurm.commands import ask
from elastune.cluster.slurm.launch import GRACE_S
from elastune.cluster.slurm.network import address_towards_nodes
from elastune.core.errors import UserError

PROBE_LIMIT_S = 60
MOST_APART_S = 1.0
# On a node: its time, whether it sees a file of this side's, and what it would train with.
PROBE = """\
import sys, time, os
from elastune.train.machine import software
print(time.time(), os.path.exists(sys.argv[1]), software()["elastune"], software()["torch"], sep="|")
"""


@dataclass(frozen=True)
class NodeAnswer:
    """Of a node. Its clock differs from this one's by ``least_apart_s`` to ``most_apart_s``; ``shares``: it sees this
    folder."""

    least_apart_s: float
    most_apart_s: float
    shares: bool
    versions: tuple[str, str]


def findings(partition: str | None, versions: Mapping[str, str]) -> list[ClusterFact]:
    """What there is in ``partition``, or in all of them. ``versions``: this side's. Raises ``UserError``."""
    chosen = [] if partition is None else [partition]
    try:
        version = ask("sinfo", "--version").strip()
        config = read_pairs(ask("scontrol", "show", "config"))
        partitions = read_records(ask("scontrol", "--oneliner", "show", "partition", *chosen))
        nodes = ask("sinfo", "--noheader", "--format=%R|%D|%t|%c|%m|%G", *(f"--partition={name}" for name in chosen))
    except NotStarted as error:
        raise UserError("Slurm must answer", error, "see sinfo, SLURM_CONF and the name of the partition") from None
    found = [ClusterFact("Slurm", version), _preemption(config), _kill_wait(config.get("KillWait", ""))]
    found += [_partition(each, nodes.splitlines()) for each in partitions]
    address = address_towards_nodes(partition)
    found.append(ClusterFact("address for agents", address, "choose it by --interface"))
    return [*found, *_node(partition, versions)]


def _preemption(config: Mapping[str, str]) -> ClusterFact:
    mode, requeue = config.get("PreemptMode", "unknown"), config.get("JobRequeue", "unknown")
    return ClusterFact(
        "preemption", f"PreemptMode={mode}, JobRequeue={requeue}; agents are submitted anew in all modes"
    )


def _kill_wait(text: str) -> ClusterFact:
    seconds = re.match(r"[0-9]+", text)
    enough = seconds is not None and int(seconds[0]) >= GRACE_S
    fix = f"KillWait={text or 'unknown'}: workers may take {GRACE_S} s to leave; ask for {GRACE_S} or more"
    return ClusterFact("time after SIGTERM", f"KillWait={text}" if enough else None, fix)


def _partition(facts: Mapping[str, str], nodes: Sequence[str]) -> ClusterFact:
    name = facts.get("PartitionName", "unknown")
    told = []
    for line in nodes:
        where, count, state, cpus, memory, gpus = (line.split("|") + [""] * 6)[:6]
        if where == name:
            having = "" if gpus in ("(null)", "") else f", {gpus}"
            told.append(f"{count} {state} ({cpus} CPUs, {memory} MB{having})")
    limits = ", ".join(f"{key}={facts[key]}" for key in ("MaxTime", "PreemptMode", "GraceTime") if key in facts)
    up = facts.get("State") == "UP" and told
    fix = f"State={facts.get('State')}, {len(told)} kinds of nodes: choose another one, see sinfo"
    return ClusterFact(f"partition {name}", f"{'; '.join(told)}; {limits}" if up else None, fix)


def _node(partition: str | None, versions: Mapping[str, str]) -> list[ClusterFact]:
    """What one node says, if it answers soon."""
    try:
        answer = probe(partition, Path.cwd())
    except NotStarted as error:
        return [ClusterFact("a node's answer", None, f"{error}: no node was free at once, or see the log of srun")]
    ours = versions["elastune"], versions["torch"]
    clocks = f"within {answer.most_apart_s:.1f} s" if answer.least_apart_s < MOST_APART_S else None
    said = f"elastune {answer.versions[0]}, torch {answer.versions[1]}"
    return [
        ClusterFact("clocks", clocks, f"{answer.least_apart_s:.1f} s apart or more: let NTP set them"),
        ClusterFact("shared folder", str(Path.cwd()) if answer.shares else None, f"nodes do not see {Path.cwd()}"),
        ClusterFact("versions", said if answer.versions == ours else None, f"a node has {said}: install the same ones"),
    ]


def probe(partition: str | None, folder: Path) -> NodeAnswer:
    """Ask one node that is free. Raises ``NotStarted`` where none answers."""
    file = folder / f".elastune-probe-{secrets.token_hex(4)}"
    chosen = [] if partition is None else [f"--partition={partition}"]
    options = ["--immediate=20", "--nodes=1", "--ntasks=1", "--time=1", "--input=none", *chosen]
    try:
        file.touch()
        before = time.time()
        said = ask("srun", *options, sys.executable, "-c", PROBE, str(file), limit_s=PROBE_LIMIT_S)
        after = time.time()
    except OSError as error:
        raise NotStarted(f"{folder}: {error.strerror}") from None
    finally:
        file.unlink(missing_ok=True)
    return read_answer(said, before, after)


def read_answer(said: str, before: float, after: float) -> NodeAnswer:
    """What a node printed between two times of this side's clock. Raises ``NotStarted`` for anything else."""
    parts = said.strip().split("|")
    if len(parts) != 4 or not re.fullmatch(r"[0-9]{1,12}(\.[0-9]+)?", parts[0]) or parts[1] not in ("True", "False"):
        raise NotStarted(f"srun: no answer in {said[:80]!r}")
    then = float(parts[0])
    least, most = max(0.0, before - then, then - after), max(abs(after - then), abs(then - before))
    return NodeAnswer(least, most, parts[1] == "True", (parts[2], parts[3]))


def read_pairs(text: str) -> dict[str, str]:
    """``KEY = VALUE`` of each line, as ``scontrol show config`` has them."""
    found = (re.match(r"(\w+)\s*=\s*(.*\S)", line) for line in text.splitlines())
    return {match[1]: match[2] for match in found if match}


def read_records(text: str) -> list[dict[str, str]]:
    """``KEY=VALUE ...`` of each line, as ``scontrol --oneliner`` has them."""
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in text.splitlines() if "=" in line]
