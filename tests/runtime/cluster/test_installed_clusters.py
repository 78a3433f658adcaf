"""Kinds of clusters that other packages offer by entry points."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.clusters import request_of
from tests.support.fake_package import write_package

from elastune.core.errors import UserError
from elastune.runtime.clusters.kind import Access, CapacityRequest
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.clusters.registry import parse_cluster

SOURCE = """
from dataclasses import dataclass
from elastune.core.errors import UserError
from elastune.runtime.clusters.kind import ClusterKind
from elastune.runtime.clusters.local import LocalCluster

@dataclass(frozen=True)
class Pods(ClusterKind):
    name = "pods"
    form = "pods:NUMBER"
    first = "number"
    number: int = 1

    def check(self, access):
        if access.tls:
            raise UserError("pods need no TLS", "--tls", "leave it out")

    def open(self, access, room):
        return LocalCluster(self.number)
"""
POINTS = {"pods": "toy_clusters:Pods", "cloud": "toy_clusters:Pods", "fog": "toy_clusters:Fog", "local": "nowhere:Kind"}


@pytest.fixture(autouse=True)
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_package(tmp_path / "site", {"elastune.clusters": POINTS}, {"toy_clusters": SOURCE})
    monkeypatch.syspath_prepend(str(folder))


def test_it_is_opened_by_its_name(tmp_path: Path) -> None:
    request = request_of("pods:3")
    cluster = request.open(CapacityRequest(tmp_path / "out", 1, 3))
    assert isinstance(cluster, LocalCluster)
    with cluster:
        assert cluster.capacity == 3


def test_nobody_replaces_a_kind_of_elastune() -> None:
    assert parse_cluster("local").here


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pods:many", "--cluster pods, number: "),
        ("pods:size=3", "must have settings that it knows .got 'size'.: it has number"),
        ("cloud", "the name of its entry point .got 'pods'.: set name = 'cloud'"),
        ("fog", "an installed cluster must load: AttributeError"),
        ("mist", "local or hosts or slurm or ray or cloud or fog or local or pods .got 'mist'"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_cluster(text)


def test_its_own_check_is_asked() -> None:
    with pytest.raises(UserError, match="pods need no TLS"):
        parse_cluster("pods").check(Access(tls=True))
