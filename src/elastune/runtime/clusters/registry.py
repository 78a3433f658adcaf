"""All kinds of clusters, by the names that ``--cluster`` and ``cluster=`` give them."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from elastune.core.errors import UserError
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.hosts import HostsKind
from elastune.runtime.clusters.kind import Access, ClusterKind, ClusterRequest
from elastune.runtime.clusters.local import LocalKind
from elastune.runtime.clusters.ray import RayKind
from elastune.runtime.clusters.slurm import SlurmKind

KINDS: Mapping[str, type[ClusterKind]] = {kind.name: kind for kind in (LocalKind, HostsKind, SlurmKind, RayKind)}


def parse_cluster(text: str) -> ClusterKind:
    """The kind and settings of ``KIND[:SETTING,...]``. Raises ``UserError``."""
    name, _, rest = text.partition(":")
    if name not in KINDS:
        forms = "; ".join(kind.form for kind in KINDS.values())
        raise UserError(f"--cluster must be {' or '.join(KINDS)}", repr(text), f"write one of: {forms}")
    return KINDS[name].parse(rest)


def request_of(cluster: Cluster | str | None) -> Cluster | ClusterRequest | None:
    """What a program means by ``cluster``: one that is open, or the name of one, whose news go to stderr.

    Raises ``UserError``.
    """
    if not isinstance(cluster, str):
        return cluster
    kind, access = parse_cluster(cluster), Access(notify=print_line)
    kind.check(access)
    return ClusterRequest(kind, access)


def print_line(line: str) -> None:
    """Print a line for the user to stderr."""
    print(f"elastune: {line}", file=sys.stderr)
