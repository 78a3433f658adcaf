"""A study on a cluster whose hosts come and go: trials wait for room, and none is lost for want of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.core.clock import VirtualClock
from elastune.core.journal.files import read
from elastune.core.journal.records import TrialFinished, TrialPaused, TrialResumed, TrialStarted
from elastune.core.run import Program, RunSpec
from elastune.runtime.clusters.base import NoRoomError
from elastune.tuning.simulate.cluster import SimulatedCluster, SimulatedHandle
from elastune.tuning.simulate.run import SurrogateModel
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import Environment, tune

TIDES = ((0.0, 0), (7.0, 2), (40.0, 4), (55.0, 0), (200.0, 3))
TRIALS = 12
EPOCH_S = 5.0


class Tidal(SimulatedCluster):
    """Room as ``TIDES`` tell, (second, workers); what runs when it goes keeps its workers. ``refused``: starts that
    find that a host has just gone."""

    varies = True
    patience_s = 0.5
    refused = 0

    @property
    def capacity(self) -> int:
        return next(room for at, room in reversed(TIDES) if self.clock.now() >= at)

    @property
    def free(self) -> int:
        return max(0, self.capacity - self._environment._used)

    def start(self, spec: RunSpec) -> SimulatedHandle:
        if self.refused:
            self.refused -= 1
            raise NoRoomError("there must be room", 0, "wait")
        return super().start(spec)


@pytest.mark.parametrize("trial_workers", [None, (1, 2)])
def test_trials_wait_for_room(
    program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trial_workers: tuple[int, int] | None
) -> None:
    mine: Program = program(
        'config = {"lr": 0.1}\nobjectives = {"error": "min"}\n'
        'def space(trial):\n    return {"lr": trial.suggest_float("lr", 0.001, 1.0)}\n'
        "def train(session):\n    raise NotImplementedError\n"
    )
    clock = VirtualClock(0.0)
    model = SurrogateModel(lambda config, workers: [(EPOCH_S / workers, {"error": config["lr"]})] * 4)
    cluster = Tidal(4, model, clock)
    cluster.refused = 2
    request = StudyRequest(mine, tmp_path, sampler="random", trials=TRIALS, workers=8, trial_workers=trial_workers)
    with cluster:
        study = tune(request, cluster=cluster, environment=Environment(clock, background=False, durable=False))
    assert [trial.state for trial in study.trials] == ["complete"] * TRIALS
    entries = read(tmp_path / "journal.jsonl")
    begun = [entry.at for entry in entries if isinstance(entry.record, TrialStarted | TrialResumed)]
    assert min(begun) >= 7.0
    assert not [at for at in begun if 55.0 <= at < 200.0]
    assert max(begun) >= 200.0
    refused = [entry.record for entry in entries if isinstance(entry.record, TrialPaused)]
    assert [record.reason for record in refused[:2]] == ["there must be room (got 0): wait"] * 2
    shrunk = set() if trial_workers is None else {"there is no room for it now"}
    assert {record.reason for record in refused[2:]} == shrunk
    assert {record.cut_off for record in refused} == {True}
    assert sum(isinstance(entry.record, TrialFinished) for entry in entries) == TRIALS
    if trial_workers is None:
        running = [0.0]
        for entry in entries:
            change = isinstance(entry.record, TrialStarted | TrialResumed) - isinstance(
                entry.record, TrialFinished | TrialPaused
            )
            running.append(running[-1] + change)
        assert max(running) == 4
