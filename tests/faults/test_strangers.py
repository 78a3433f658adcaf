"""Strangers on this machine, without the run's token, at every port that its processes listen on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.elastic_runs import Runs
from tests.support.strangers import Strangers, garbage

from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")


@pytest.mark.soak
def test_groups_form_again_and_again_among_strangers(cluster: LocalCluster, tmp_path: Path) -> None:
    """They connect all the time: silent, with noise, with what gloo takes for a peer. The run does not show it."""
    runs = Runs(cluster, tmp_path, PROGRAM)
    undisturbed = runs(1)
    processes: set[int] = {os.getpid()}
    resizes = ["4 3", "16 4", "28 1", "40 2"]
    with Strangers(lambda: list(processes), garbage()) as strangers:
        ran = runs(2, act=lambda handle, records: processes.update(handle.pids.values()), resize=resizes)
    assert ran.sha256 == undisturbed.sha256
    assert ran.ledger.exact, ran.ledger
    assert len(ran.regrouped) >= 2
    assert len(strangers.met) > len(ran.regrouped), "they were there"
