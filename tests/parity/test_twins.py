"""Programs of many kinds, each beside its plain loop: few changed lines, the same losses, on any workers, whoever dies.

``programs/twins/`` has both of each. Where plain loops round otherwise (bfloat16) losses are compared less closely.
"""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.parity.programs.twin import plain, twins
from tests.soaked import soaked
from tests.support.elastic_runs import SLOTS, Runs
from tests.support.sessions import lone_session

from elastune.core.run import ExecutionSettings, Program, derive
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.rng import seed_everything

PROGRAM = Program(Path(__file__).parent / "programs" / "twin.py")
SEED = 3  # of Runs
NEAR = {"autocast": 1e-2}
MOST_LINES = 6  # the median


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def alone(name: str, out: Path, **spec: Any) -> tuple[str, list[float], int]:
    """One worker's digest of weights, losses and steps."""
    losses: list[float] = []
    session = lone_session(out, execution=ExecutionSettings(num_slots=SLOTS), seed=SEED, **spec)
    twins()[name](session, losses)
    session.finish()
    assert session.trained is not None
    return session.trained.fingerprint(session.state.workers), losses, session.step


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[float], int]]:
    return {name: alone(name, tmp_path_factory.mktemp(name)) for name in twins()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", twins())
def test_losses_are_those_of_the_plain_loop(name: str, one: dict[str, tuple[str, list[float], int]]) -> None:
    seed_everything(derive(SEED, "init"))
    told: list[float] = []
    plain(name)(told)
    assert len(told) >= 6
    assert len(set(told)) > 4
    assert one[name][1] == pytest.approx(told, abs=NEAR.get(name, 1e-5), rel=NEAR.get(name, 1e-5))


def changed_lines(name: str) -> int:
    """Lines of the plain loop that are others on a session, or more; the function's own first line does not count."""
    before, after = (inspect.getsource(each).splitlines()[1:] for each in (plain(name), twins()[name]))
    matched = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for what, i1, i2, j1, j2 in matched.get_opcodes() if what != "equal")


def test_few_lines_change() -> None:
    counted = {name: changed_lines(name) for name in twins()}
    assert len(counted) >= 20
    assert median(counted.values()) <= MOST_LINES, counted
    assert all(count >= 4 for count in counted.values()), counted


def test_a_second_worker_does_not_show(one: dict[str, tuple[str, list[float], int]]) -> None:
    from twin_workers import train_all

    from elastune.testing.worker_processes import processes

    with processes(2, train_all, SLOTS, SEED) as workers:
        for name in twins():
            for rank in range(2):
                assert workers.receive(rank) == (name, *one[name][:2])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", twins())
def test_a_resumed_run_goes_on(name: str, tmp_path: Path, one: dict[str, tuple[str, list[float], int]]) -> None:
    whole, losses, steps = one[name]
    first = alone(name, tmp_path, max_steps=4, resume=True, checkpoint_every_steps=None)
    second = alone(name, tmp_path, resume=True, checkpoint_every_steps=None)
    assert (second[0], second[2]) == (whole, steps)
    assert first[1] + second[1] == losses


# Turns, what is kept beside weights, features that are gathered, data that is made, streams.
DYING = ("adversaries", "average", "contrastive", "replay", "stream")


@pytest.mark.parametrize("name", [*DYING, *soaked(*sorted(twins().keys() - set(DYING)))])
def test_a_death_among_three_does_not_show(
    cluster: LocalCluster, tmp_path: Path, name: str, one: dict[str, tuple[str, list[float], int]]
) -> None:
    ran = Runs(cluster, tmp_path, PROGRAM)(3, twin=name, faults=["kill 1 3 gather"])
    assert ran.sha256 == one[name][0]
    assert ran.lost == [1]
    assert ran.ledger.exact
