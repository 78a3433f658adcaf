"""Rows and trainings of a frontier, made up, for tests of what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from elastune.core.journal.records import FrontierRow, Reported, RunFinished, TrialFinished
from elastune.core.mesh import Mesh
from elastune.core.plan.data_parallel import DataParallelStep
from elastune.tuning.frontier.criteria import FrontierCriteria, Times
from elastune.tuning.frontier.trainings import StepKind, Training
from elastune.tuning.search.objective import Objective

MODEL = DataParallelStep(base_s=0.01, per_sample_s=0.001, latency_s=0.002, seconds_per_byte=0.0, grad_bytes=40)
ACCURACY = Objective("accuracy", "max", low=0.0, high=1.0)
TARGETED = FrontierCriteria(
    ACCURACY,
    0.9,
    2.0,
    Times(MODEL, {(10, StepKind(Mesh())): 0.5, (20, StepKind(Mesh(data=2))): 0.25}, {"batch 20 on 2": 0.8}),
)
FREE = replace(TARGETED, target=None)


def cell(
    role: Literal["naive", "tuned"] = "naive", workers: int = 1, quality: float = 0.9, **changes: Any
) -> FrontierRow:
    """A row whose interval is 0.01 either way."""
    made = FrontierRow(
        role=role,
        workers=workers,
        batch_size=10 * workers,
        lr=0.1,
        lr_rule="linear",
        mechanism="replicated",
        mesh=f"data={workers}",
        mode="fast",
        config={"batch_size": 10 * workers, "lr": 0.1, "momentum": 0.0 if role == "naive" else 0.9},
        quality=quality,
        ci=(quality - 0.01, quality + 0.01),
        seeds=3,
        held_out=True,
        validation=quality,
        seconds=8.0 / workers,
        seconds_label="measured",
        cost=1.0,
        verdict="holds",
        num_slots=workers,
    )
    return replace(made, **changes)


def training(
    quality: float | None,
    seed: int = 0,
    batch: int = 10,
    *,
    test: float | None = None,
    grad_bytes: int = 40,
    samples: int | None = None,
    slots: int = 1,
    phase: str = "naive",
    worker_seconds: float = 1.0,
) -> Training:
    """Of 30 steps, with a report after every ten, each measured on ``samples``; ``quality`` None: it failed."""
    config: dict[str, Any] = {"batch_size": batch, "lr": 0.1}
    if quality is None:
        return Training(seed, config, seed, slots, phase, (), TrialFinished(seed, "infeasible", seconds=worker_seconds))
    metrics = {"accuracy": quality} | ({} if test is None else {"test_accuracy": test})
    told = {} if samples is None else dict.fromkeys(metrics, samples)
    run = RunFinished(
        "sha", 1, 30, 30 * batch, 1.0, metrics, step_s=0.6, grad_bytes=grad_bytes, evaluated_on=told
    )  # fmt: skip
    reports = tuple(Reported(i, 10 * i, 0, 0.0, {"accuracy": quality * i / 3}) for i in (1, 2, 3))
    result = TrialFinished(seed, "complete", metrics=metrics, run=run, worker_seconds=worker_seconds)
    return Training(seed, config, seed, slots, phase, reports, result)
