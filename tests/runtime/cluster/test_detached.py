"""Room on this machine that outlives its controller: as much as was asked for, whatever becomes of an agent."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from elastune.runtime.clusters.local import PORT_NAME, TOKEN_NAME, DetachedCluster

LIMIT_S = 60.0
pytestmark = pytest.mark.usefixtures("processes")


def test_a_lost_agent_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    with DetachedCluster(3, tmp_path, 60.0, lambda line: None, fills=True) as cluster:
        cluster.fill()
        assert (cluster.free, (tmp_path / TOKEN_NAME).stat().st_mode & 0o777) == (3, 0o600)
        assert cluster._agent is not None
        first = cluster._agent.pid
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while cluster._agent.pid == first or cluster.free < 3:
            assert time.monotonic() < deadline
            cluster.pump(0.1)
    assert cluster._agent is None
    assert not (tmp_path / TOKEN_NAME).exists()
    assert not (tmp_path / PORT_NAME).exists()
