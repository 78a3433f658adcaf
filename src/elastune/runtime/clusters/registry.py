"""All kinds of clusters, by the names that ``--cluster`` and ``cluster=`` give them."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from elastune.core.errors import UserError
from elastune.core.plugins import Plugins
from elastune.runtime.clusters.hosts import HostsKind
from elastune.runtime.clusters.kind import ClusterKind
from elastune.runtime.clusters.local import LocalKind
from elastune.runtime.clusters.ray import RayKind
from elastune.runtime.clusters.slurm import SlurmKind

KINDS: Mapping[str, type[ClusterKind]] = {kind.name: kind for kind in (LocalKind, HostsKind, SlurmKind, RayKind)}
INSTALLED = Plugins("elastune.clusters", "cluster")
"""Kinds of clusters of other packages: subclasses of ``ClusterKind``."""


def parse_cluster(text: str) -> ClusterKind:
    """Return the kind and settings of ``KIND[:SETTING,...]``. Imports the kind if another package offers it.

    Raises:
        UserError: For an unknown kind or setting, and for a kind of another package that cannot be used.
    """
    name, _, settings = text.partition(":")
    if name in KINDS:
        return KINDS[name].parse(settings)
    if name in INSTALLED.names():
        kind: type[ClusterKind] = INSTALLED.load_class(name, ClusterKind)
        return kind.parse(settings)
    forms = "; ".join([*(kind.form for kind in KINDS.values()), *INSTALLED.names()])
    names = " or ".join([*KINDS, *INSTALLED.names()])
    raise UserError(f"--cluster must be {names}", repr(text), f"write one of: {forms}")


def print_line(line: str) -> None:
    """Print a line for the user to stderr."""
    print(f"elastune: {line}", file=sys.stderr)
