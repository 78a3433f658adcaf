"""Clusters by the names that ``--cluster`` gives them, as requests for studies and frontiers."""

from __future__ import annotations

from elastune.runtime.clusters.kind import Access, ClusterRequest
from elastune.runtime.clusters.registry import parse_cluster, print_line


def request_of(name: str) -> ClusterRequest:
    """Return a request for the cluster ``name``."""
    kind, access = parse_cluster(name), Access(notify=print_line)
    kind.check(access)
    return ClusterRequest(kind, access)
