from __future__ import annotations

from pathlib import Path

import pytest

from elastune.cluster.base import Cluster
from elastune.cluster.inprocess import InProcessCluster
from elastune.core.errors import UserError
from elastune.testing.cluster_kit import ClusterKit, events_until_end, spec_of


class TestInProcess(ClusterKit):
    def make(self, entry: str) -> Cluster:
        return InProcessCluster(entry=entry)


def test_it_runs_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = InProcessCluster(entry="elastune.testing.cluster_workers:speak")
    events_until_end(cluster, cluster.start(spec_of(tmp_path)))
    assert capsys.readouterr().out == "worker 0 has spoken\n"


def test_a_device_that_is_not_there_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cuda:77"):
        InProcessCluster().start(spec_of(tmp_path, device="cuda:77"))
