"""A frontier whose controller is killed goes on with trainings that outlive it, or from their checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.clusters import request_of

from elastune.core.journal.files import read
from elastune.core.journal.records import Record, TrialAdopted, TrialFinished, TrialReported, TrialResumed, TrialStarted
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.checkpoints.checkpoint import complete, step_of
from elastune.tuning.frontier.find_frontier import frontier
from elastune.tuning.study.request import FrontierRequest

TINY = Path(__file__).parents[1] / "programs" / "tiny.py"
COUNTS = (1, 2)
ONE = "def space(trial):\n    return {'lr': 0.02, 'batch_size': 20}\n\n\n"


def text() -> str:
    """The tiny program with one setting to search."""
    whole = TINY.read_text()
    return whole[: whole.index("def space")] + ONE + whole[whole.index("def data") :]


def request(program: Program, out: Path, **changes: Any) -> FrontierRequest:
    settings: dict[str, Any] = {"budget_s": 300.0, "seeds": 2, "sampler": "grid", "config": {"epochs": 4}, **changes}
    return FrontierRequest(program, out, workers=COUNTS, **settings)


def records(out: Path) -> list[Record]:
    journal = out / "journal.jsonl"
    return [entry.record for entry in read(journal)] if journal.exists() else []


def naive(out: Path) -> set[int]:
    return {r.trial for r in records(out) if isinstance(r, TrialStarted) and r.phase == "naive"}


def cut_short(out: Path) -> set[int]:
    """Naive trainings that have a checkpoint, and have not ended."""
    over = {r.trial for r in records(out) if isinstance(r, TrialFinished)}
    return {t for t in naive(out) - over if checkpoints(out, t)}


def checkpoints(out: Path, trial: int) -> list[Path]:
    return complete(out / "trials" / f"{trial:05d}" / "checkpoints")


def results(out: Path) -> dict[tuple[float, int, int], str]:
    """Weights of the naive trainings by learning rate, slots and seed."""
    began = {r.trial: r for r in records(out) if isinstance(r, TrialStarted)}
    ended = {r.trial: r.run for r in records(out) if isinstance(r, TrialFinished) and r.trial in naive(out)}
    told = {}
    for trial, run in ended.items():
        assert run is not None
        told[began[trial].config["lr"], began[trial].execution["num_slots"], began[trial].seed] = run.sha256
    return told


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[float, int, int], str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    out, one = folder / "out", folder / "one.py"
    one.write_text(text())
    frontier(request(Program(one), out), cluster=cluster)
    found = results(out)
    assert len(found) == 4
    return found


@pytest.mark.soak
def test_a_killed_frontier_trains_on_from_its_checkpoints(
    cluster: LocalCluster,
    tmp_path: Path,
    tiny: Program,
    program: Any,
    controller,
    until,
    all_gone,
    undisturbed: dict[Any, str],
) -> None:
    """Trainings with the second seed wait after their third report until the controller is gone."""
    gate = tmp_path / "go on"
    waits = f"session.seed == 1 and session.epoch == 3 and not os.path.exists({str(gate)!r})"
    wait = f"        while {waits}:\n            time.sleep(0.01)\n"
    slow = program(text() + wait)
    out = tmp_path / "out"
    running = controller(lambda: frontier(request(slow, out)))
    until(lambda: len(cut_short(out)) >= 1, 60.0)
    family = running.family()
    running.signal(signal.SIGKILL)
    assert running.end() == -9
    all_gone(family)
    begun, before = cut_short(out), records(out)
    assert begun
    steps = {trial: step_of(checkpoints(out, trial)[-1]) for trial in begun}

    gate.touch()
    frontier(request(slow, out, resume=True), cluster=cluster)
    after = records(out)[len(before) :]
    assert {r.trial for r in after if isinstance(r, TrialResumed)} >= begun
    for trial in begun:
        again = [r.report.epoch for r in after if isinstance(r, TrialReported) and r.trial == trial]
        assert min([*again, 4]) > 1, "not from its start"
        (end,) = [r for r in after if isinstance(r, TrialFinished) and r.trial == trial]
        assert end.run is not None
        assert again or steps[trial] == end.run.steps, "it trained on, unless it was killed behind its last step"
        assert end.run.epoch == 4

    assert results(out) == undisturbed


def test_trainings_outlive_the_controller_of_a_frontier(
    tmp_path: Path, tiny: Program, program: Any, controller, until, all_gone, undisturbed: dict[Any, str]
) -> None:
    """Nothing is trained again of those that wait when it is killed; steps are timed once they are over."""
    gate, pids, out = tmp_path / "go on", tmp_path / "pids", tmp_path / "out"
    waits = f"session.seed == 1 and session.epoch == 3 and not os.path.exists({str(gate)!r})"
    note = f"        print(os.getpid(), file=open({str(pids)!r}, 'a'))\n"
    wait = f"{note}        while {waits}:\n            time.sleep(0.01)\n"
    slow = program(text() + wait)

    def ask(resume: bool) -> object:
        return frontier(request(slow, out, grace_s=120.0, resume=resume), cluster=request_of("local"))

    first = controller(lambda: ask(False))
    until(lambda: len(cut_short(out)) >= 1, 60.0)
    first.signal(signal.SIGKILL)
    assert first.end() == -9
    begun, before = cut_short(out), records(out)
    gate.touch()
    second = controller(lambda: ask(True))
    assert second.end(120.0) == 0
    after = records(out)[len(before) :]
    adopted = [r.trial for r in after if isinstance(r, TrialAdopted)]
    assert set(adopted) >= begun
    assert not {r.trial for r in after if isinstance(r, TrialResumed)} & set(adopted)
    ends = [r for r in after if isinstance(r, TrialFinished | TrialStarted)][: len(adopted)]
    assert {r.trial for r in ends if isinstance(r, TrialFinished)} == set(adopted), "before anything else was begun"
    assert results(out) == undisturbed
    all_gone({int(pid) for pid in pids.read_text().split()})
