"""A journal says why a run's workers became more or fewer, whoever wanted it."""

from __future__ import annotations

from pathlib import Path

from tests.support.elastic_runs import Runs, gone
from tests.support.membership_events import decode_event

from elastune.core.journal.records import MembershipEvent, Record, WorkerGone
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.elastic.wire.contact import ask
from elastune.elastic.wire.messages import ResizeAsked
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.pool import Pool

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
ELASTIC = Elastic(low=1, high=3, heartbeat_s=5.0)


def asked(records: list[Record]) -> list[ResizeAsked]:
    events = [decode_event(record.event)[1] for record in records if isinstance(record, MembershipEvent)]
    return [event for event in events if isinstance(event, ResizeAsked)]


def left(records: list[Record]) -> list[str]:
    return [record.why for record in records if isinstance(record, WorkerGone) and record.how == "left"]


def test_the_program_asks(runs: Runs) -> None:
    ran = runs(2, elastic=ELASTIC, resize=["6 1"])
    assert set(asked(ran.records)) == {ResizeAsked(1, "session.resize")}
    assert left(ran.records) == ["session.resize"]


def test_another_command_asks(runs: Runs, tmp_path: Path) -> None:
    answers: list[str] = []

    def act(handle, _records) -> None:
        if not answers and handle.step >= 4:
            answers.append(ask(handle.spec.out, ResizeAsked(1, "by hand")).detail)

    ran = runs(2, act=act, elastic=ELASTIC, slow_until=gone(1))
    assert answers == ["from 2 to 1 worker"]
    assert asked(ran.records) == [ResizeAsked(1, "by hand")]
    assert left(ran.records) == ["by hand"]


def test_whoever_shares_a_cluster_asks(cluster: LocalCluster, tmp_path: Path) -> None:
    pool = Pool(cluster, timeout_s=100.0)
    pool.start(
        7,
        RunSpec(PROGRAM, tmp_path, {"pause_s": 0.05}, seed=3, execution=ExecutionSettings(workers=2), elastic=ELASTIC),
    )
    records: list[Record] = []
    resized = False
    while pool.running:
        records += [event.record for event in pool.pump(0.1)]
        if not resized and pool.jobs and pool.jobs[7].watch.handle.step >= 4:
            resized = True
            pool.resize(7, 1, "trial 3 brings more")
    assert asked(records) == [ResizeAsked(1, "trial 3 brings more")]
    assert left(records) == ["trial 3 brings more"]
