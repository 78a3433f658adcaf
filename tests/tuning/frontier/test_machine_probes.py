"""What is probed on this machine, in which order, and what is left out: with runs that answer by a formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.records import RunFailed, RunFinished, WorkerMemory
from elastune.core.mesh import Mesh
from elastune.core.run import Program, RunSpec
from elastune.runtime.job.run import JobFailed
from elastune.train.rehearsal import ProgramSize
from elastune.tuning.cluster_plan.probes import MOST_PROBES, NOISE_HERE, STEPS, MachineProbes, NodeLink

SIZE = ProgramSize(640, 16, 3, 1e8, 1e4, 1e4, 0.0, 4000, 4000, 8000, 4, 1.0, fake=True)
LINK = NodeLink(8 / 1e10)


class Here:
    """Runs in place of real ones. ``asked``: all that were begun; ``fails``: axes along which none runs."""

    def __init__(self) -> None:
        self.asked: list[RunSpec] = []
        self.fails: set[str] = set()
        self.scatter = 1.0
        self.step_s: Callable[[Mesh], float | None] = lambda mesh: 0.1 / mesh.workers + 0.01

    def __call__(self, spec: RunSpec, **more: Any) -> RunFinished:
        self.asked.append(spec)
        mesh = spec.execution.first_mesh
        for axis in ("data", "tensor", "pipeline"):
            if axis in self.fails and mesh.size(axis) > 1:  # type: ignore[arg-type]
                raise JobFailed(RunFailed("exception", f"{axis} is not for this program", 0))
        result, step_s = [WorkerMemory(0, 4000, 4000, 8000, 0, 0, 10**8)], self.step_s(mesh)
        step_s = None if step_s is None else step_s * (self.scatter if len(self.asked) == 2 else 1.0)
        signals: dict[str, tuple[float, float | None]] = {"noise_scale": (-3.0, 1.0)} if spec.adapt.monitors else {}
        return RunFinished("0" * 64, mesh.workers, STEPS, 192, 3.0, {}, step_s=step_s, memory=result, signals=signals)

    @property
    def meshes(self) -> list[tuple[Mesh, int | None]]:
        return [
            (spec.execution.first_mesh, spec.execution.micro_batch) for spec in self.asked if not spec.adapt.monitors
        ]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    runs = Here()
    monkeypatch.setattr("elastune.tuning.cluster_plan.probes.run_job", runs)
    return runs


def probes(cores: int = 4, budget_s: float = 1e9, **more: Any) -> MachineProbes:
    return MachineProbes(Program(Path("any.py")), {}, SIZE, cores=cores, budget_s=budget_s, **more)


def test_the_program_as_it_is_is_measured_twice_and_two_workers_then(here: Here) -> None:
    here.scatter = 1.2
    of = probes(budget_s=0.0, wants_noise=False)
    of.learn(LINK)
    assert here.meshes == [(Mesh(), 16), (Mesh(), 16), (Mesh(data=2), 8)]
    assert of.measured[Mesh(), 16] == pytest.approx(0.11 * math.sqrt(1.2))
    assert of.noise == pytest.approx(math.log(1.2))
    assert [len(each) for each in (of.several, of.held[Mesh(), 16])] == [1, 1]


def test_what_the_second_run_takes_is_its_steps_and_what_is_beside_them(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that goes on by 7, 4 and 9 seconds with the first runs: the second one's 12 steps are 1.32 s."""
    now, taken = [0.0], iter((7.0, 4.0, 9.0))

    def run(spec: RunSpec, **more: Any) -> RunFinished:
        now[0] += next(taken)
        return here(spec, **more)

    monkeypatch.setattr("elastune.tuning.cluster_plan.probes.run_job", run)
    monkeypatch.setattr("elastune.tuning.cluster_plan.probes.time", SimpleNamespace(monotonic=lambda: now[0]))
    of = probes(budget_s=0.0, wants_noise=False)
    of.learn(LINK)
    assert of.beside_s == pytest.approx(4.0 - STEPS * 0.11)


def test_equal_times_leave_the_noise_of_a_machine(here: Here) -> None:
    of = probes(budget_s=0.0, wants_noise=False)
    of.learn(LINK)
    assert of.noise == NOISE_HERE


def test_each_plan_is_measured_once_and_no_more_than_the_most(here: Here) -> None:
    of = probes(wants_noise=False)
    model = of.learn(LINK)
    result = here.meshes[1:]  # the first is the same again
    assert len(result) == len(set(result)) == MOST_PROBES
    assert all(mesh.workers <= 4 and micro * mesh.batch <= 16 for mesh, micro in result if micro is not None)
    assert set(of.measured) == set(result)
    assert all(constant > 0 for constant in model.constants().values())


def test_the_noise_scale_is_asked_where_it_is_wanted_and_is_never_negative(here: Here) -> None:
    of = probes(budget_s=0.0)
    of.learn(LINK)
    assert of.noise_scale == 0.0
    assert sum(bool(spec.adapt.monitors) for spec in here.asked) == 1


def test_an_axis_that_fails_is_left_out_with_its_reason_and_not_tried_again(here: Here) -> None:
    here.fails = {"tensor", "pipeline"}
    of = probes(wants_noise=False)
    of.learn(LINK)
    assert of.refused == {axis: f"{axis} is not for this program" for axis in ("tensor", "pipeline")}
    failed = [mesh for mesh, _ in here.meshes if mesh.tensor > 1 or mesh.pipeline > 1]
    assert len(failed) == 2, "once each"


def test_a_program_that_fails_on_its_own_workers_says_why(here: Here) -> None:
    here.fails = {"data"}
    with pytest.raises(UserError, match="the program must train with its own settings .*data is not for this"):
        probes(wants_noise=False).learn(LINK)


def test_a_program_of_too_few_steps_is_told(here: Here) -> None:
    here.step_s = lambda mesh: None
    with pytest.raises(UserError, match="so that they can be timed"):
        probes(wants_noise=False).learn(LINK)


def test_nothing_is_run_that_this_machine_has_no_room_for(here: Here) -> None:
    one = 4000 + 4000 + 8000 + 3 * 4000  # state and buffers; activations are next to nothing
    light = replace(SIZE, kept_bytes=1.0, pass_bytes=1.0)
    of = replace(probes(wants_noise=False, room_bytes=one * 1.05), size=light)
    of.learn(LINK)
    assert all(mesh.workers == 1 or mesh.tensor * mesh.pipeline > 1 for mesh, _ in here.meshes)
    assert of.several == []
    here.asked.clear()
    less = replace(probes(wants_noise=False, room_bytes=one * 0.95), size=light)
    assert less.learn(LINK).constants()["across_byte_s"] == pytest.approx(LINK.seconds_per_byte)
    assert here.asked == []
    assert less.measured == {}


def test_runs_are_kept_in_folders_of_their_own(here: Here, tmp_path: Path) -> None:
    of = probes(budget_s=0.0, wants_noise=False)
    of.out = tmp_path / "kept"
    of.learn(LINK)
    assert [spec.out.name for spec in here.asked] == ["probe-1", "probe-2", "probe-3"]
    assert all(spec.max_steps == STEPS and spec.checkpoint_every_steps == 0 for spec in here.asked)
