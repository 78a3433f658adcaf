"""Journals as runs, studies and frontiers write them: the naive rule loses accuracy with scale, tuning keeps it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elastune.core.journal.records import (
    Decided,
    Entry,
    FrontierAnswer,
    FrontierFound,
    FrontierReason,
    FrontierRow,
    FrontierVolumes,
    Gain,
    LinkMeasured,
    Measured,
    OwnMachine,
    PolicyFailed,
    ReferencePoint,
    Reported,
    RunFailed,
    RunFinished,
    RunStarted,
    ScalingPoint,
    SideVolume,
    StudyFinished,
    StudyStarted,
    TimesFitted,
    TrialFinished,
    TrialReported,
    TrialStarted,
    encode_entry,
)
from elastune.report.page import write_report

CONTEXT = {"cores": 2, "processor": "Example CPU @ 2.5 GHz", "python": "3.11.9", "torch": "2.13.0"}
MEANS = {"workers": 2, "mode": "fast", "mechanism": "replicated", "num_slots": 8, "device": "cpu", "precision": "fp32"}


def stamped(records):
    return [Entry(1_700_000_000.0 + 2.5 * i, record) for i, record in enumerate(records)]


def frontier_rows():
    naive = {1: (0.9712, 0.0021, 41.8), 2: (0.9655, 0.0034, 23.1), 4: (0.9431, 0.0117, 13.4), 8: (0.8612, 0.0841, 8.6)}
    tuned = {1: (0.9783, 0.0012, 36.2), 2: (0.9779, 0.0015, 20.4), 4: (0.9774, 0.0019, 11.7), 8: (0.9752, 0.0031, 7.4)}
    rows = []
    for role, cells in (("naive", naive), ("tuned", tuned)):
        for workers, (quality, ci, seconds) in cells.items():
            tuned_lr = {1: 0.04, 2: 0.05, 4: 0.071, 8: 0.083}[workers]
            rows.append(
                FrontierRow(
                    role=role,
                    workers=workers,
                    batch_size=32 * workers if role == "naive" else 64,
                    lr=0.05 * workers if role == "naive" else tuned_lr,
                    lr_rule="linear" if role == "naive" else "none",
                    mechanism="replicated",
                    mesh=f"data={workers}",
                    mode="fast",
                    config={
                        "lr": 0.05 * workers if role == "naive" else tuned_lr,
                        "batch_size": 32 * workers if role == "naive" else 64,
                        "momentum": 0.9,
                        "epochs": 8,
                    },
                    quality=quality,
                    ci=(quality - ci, min(1.0, quality + ci)),
                    test_samples=400,
                    verdict="holds" if quality - ci >= 0.97 else "not shown" if quality + ci >= 0.97 else "falls",
                    seconds_factor=1.0 if workers <= 2 else 1.4,
                    throughput=64_000 / seconds,
                    loss=0.9712 - quality,
                    loss_bound=0.9712 - quality + ci,
                    seeds=3,
                    held_out=True,
                    validation=quality + 0.002,
                    seconds=seconds,
                    seconds_label="measured" if workers <= 2 else "modelled",
                    cost=seconds * workers / 3600,
                    time_to_target_s=0.6 * seconds if quality >= 0.975 else None,
                    time_to_target_ci=(0.5 * seconds, 0.75 * seconds) if quality >= 0.975 else None,
                    on_front=role == "tuned",
                    trials=[1, 2, 3],
                    scaling=[
                        ScalingPoint(1, 36.2, "measured", 1.0, 36.2 / 3600),
                        ScalingPoint(workers, seconds, "modelled", 1.4, seconds * workers / 3600),
                    ]
                    if (role, workers) == ("tuned", 8)
                    else [],
                )
            )
    return rows


def found_frontier():
    return FrontierFound(
        quality="accuracy",
        direction="max",
        target=0.975,
        price_per_worker_hour=1.0,
        rows=frontier_rows(),
        volumes=FrontierVolumes(
            312.0,
            ReferencePoint(0.91, 44.0, 0.02),
            [
                SideVolume("naive rule", 0.8312, (0.8113, 0.8501), 3, 5, 15, 15, 312.0, True),
                SideVolume("search", 0.9541, None, 1, 4, 12, 30, 305.0, True),
                SideVolume("naive rule, tuned", 0.9312, (0.9213, 0.9401), 3, 2, 8, 8, 120.0, False, 60.0),
            ],
        ),
        model_errors={"batch 64 on 2 workers": 0.71},
        reasons=[FrontierReason("decides", "accuracy: shown"), FrontierReason("hint", "noise scale: <outweighed>")],
        answer=FrontierAnswer(
            "Use 8 workers with tuned settings: 1.2 times as fast by settings, 4.9 times by workers (modelled).",
            pick=7,
            settings_name="tuned settings",
            settings=Gain(1, 1, 1.155, None, None, "measured", 0.866, 0),
            workers=Gain(8, 1, 4.892, 3.494, 6.849, "modelled", 1.635, None),
            total=Gain(8, 1, 5.649, 4.035, 7.908, "modelled", 1.416, 0),
            naive=Gain(8, 8, 1.162, 0.83, 1.627, "modelled", 0.86, 3),
            cheapest=Gain(8, 2, 2.757, 1.969, 3.86, "modelled", 1.451, 5),
            this_machine=OwnMachine(2, 0, 5, "elastune run examples/digits.py --workers 2"),
            naive_rule="The naive rule reaches 0.975 on no worker count.",
            not_done=["policy gns: no training with it is in the table"],
            command="elastune run examples/digits.py --workers 8 --mode fast --set lr=0.083 --set batch_size=64",
        ),
    )


def trials(phases=("search",), count=40, seed=0):
    """(TrialStarted, TrialFinished) of a search that finds its way, some trials failing."""
    draw = np.random.default_rng(seed)
    records = []
    for number in range(count):
        phase = phases[min(len(phases) - 1, number * len(phases) // count)]
        lr = float(10 ** draw.uniform(-3, 0))
        workers = int(draw.choice([1, 2, 4]))
        accuracy = float(0.98 - 0.05 * abs(math.log10(lr / 0.06)) - 0.01 * draw.random())
        seconds = float(40 / workers**0.8 * draw.uniform(0.7, 1.4))
        config = {"lr": lr, "batch_size": int(draw.choice([32, 64, 128])), "momentum": 0.9}
        records.append(TrialStarted(number, config, {**MEANS, "workers": workers}, seed=number, phase=phase))
        report = Reported(epoch=1, step=10, samples=640, seconds=1.5, metrics={"accuracy": accuracy})
        records.append(TrialReported(number, report))
        if number % 9 == 4:
            records.append(TrialFinished(number, "infeasible", seconds=3.0, reason="diverged: loss is NaN at step 12"))
            continue
        values = {"accuracy": accuracy, "seconds": seconds}
        records.append(TrialFinished(number, "complete", values=values, metrics={"loss": 0.1}, seconds=seconds + 1))
    return records


def study_records():
    settings = {
        "kind": "tune",
        "program": {"path": "examples/digits.py", "train": "train"},
        "objectives": {"accuracy": "max", "seconds": "min"},
        "constraints": ["workers * batch_size <= 512"],
        "sampler": "auto",
        "trials": 40,
        "epochs": 8,
        "workers": 4,
        "seed": 0,
    }
    rejected = TrialFinished(40, "rejected", violations={"workers * batch_size <= 512": 512.0})
    return [
        StudyStarted(settings, CONTEXT),
        *trials(),
        TrialStarted(40, {"lr": 0.1, "batch_size": 256}, {**MEANS, "workers": 4}, seed=40),
        rejected,
        StudyFinished("the budget of 41 trials is spent", 812.0),
    ]


def frontier_records():
    settings = {
        "kind": "frontier",
        "program": "examples/digits.py",
        "objectives": {"accuracy": "max"},
        "workers": [1, 2, 4, 8],
        "target": 0.975,
        "budget_s": 180,
        "seeds": 3,
    }
    times = TimesFitted(2.1e-3, 3.4e-5, 4.2e-4, 1.1e-9, 151_000, [1, 2], {"batch 64 on 2 workers": 1.07})
    return [
        StudyStarted(settings, CONTEXT),
        TrialStarted(900, {"lr": 0.05}, MEANS, seed=0, phase="calibrate"),
        TrialFinished(900, "complete", values={"accuracy": 0.2}, seconds=0.5),
        times,
        *trials(("naive", "search", "search", "confirm")),
        found_frontier(),
        StudyFinished("the budget of 3 minutes is spent", 181.3),
    ]


def run_records(epochs=12):
    steps = [
        Reported(
            epoch=epoch,
            step=45 * epoch,
            samples=1437 * epoch,
            seconds=1.4 * epoch,
            metrics={"accuracy": 0.98 - 0.4 * 0.6**epoch, "loss": 0.05 + 2.2 * 0.55**epoch},
        )
        for epoch in range(1, epochs + 1)
    ]
    finished = RunFinished(
        sha256="9f" * 32,
        workers=2,
        steps=45 * epochs,
        samples=1437 * epochs,
        seconds=1.4 * epochs,
        metrics=dict(steps[-1].metrics),
        step_s=0.0311,
        wait_s=0.0042,
        grad_bytes=151_000,
    )
    config = {"lr": 0.05, "batch_size": 32, "epochs": epochs}
    started = RunStarted("examples/digits.py", config, 0, MEANS, CONTEXT)
    return [started, *steps, LinkMeasured(2, 1e-3, 1e-9), finished]


def adapting_records(epochs=8, seed=0):
    """A run whose batch follows the noise scale from 32 to 512, its learning rate the root of that, workers the batch;
    workers disagree once, one decision is refused, and a policy of the program's raises."""
    draw = np.random.default_rng(seed)
    config = {"lr": 0.05, "batch_size": 32, "epochs": epochs}
    asked = {"policies": ["gns:max_batch=512", "Mine"], "monitors": ["noise_scale"]}
    records = [RunStarted("examples/digits.py", config, 0, {**MEANS, "workers": 1}, CONTEXT, adapt=asked)]
    batch, lr, workers, step, seconds, of_epoch = 32, 0.05, 1, 0, 0.0, 0
    for tick in range(30 * epochs):
        step += 12
        seconds += 0.25 + 0.1 * batch / 512
        progress = tick / (30 * epochs)
        true = 60 * math.exp(3.2 * progress)
        signals = {"loss": (2.3 * math.exp(-3.5 * progress) + 0.04 + 0.03 * draw.random(), None)}
        if tick > 3:
            signals["noise_scale"] = (true * math.exp(0.12 * draw.normal()), true * (0.12 + 0.5 / tick))
            signals["throughput"] = (batch * 40.0, None)
        measured = Measured(step, tick // 30, step * batch, seconds, workers, batch, lr, signals)
        records.append(measured)
        if tick == 40:
            decided = Decided("Mine", step, {"lr_factor": 2.0}, measured, "disagreed", "rank 1 decided nothing")
            records += [decided, PolicyFailed("Mine", "after_step", step, 1, "ZeroDivisionError: by <zero>", off=True)]
        if tick == 200:
            records.append(Decided("gns", step, {"workers": 64}, measured, "refused", "the run has at most 4 workers"))
        if tick > 3 and signals["noise_scale"][0] > 2 * batch and batch < 512 and tick % 10 == 0:
            decision = {"batch_size": 2 * batch, "lr_factor": 2**0.5, "ramp_steps": 20}
            if batch in (64, 256):
                decision["workers"] = 2 * workers
            records.append(Decided("gns", step, decision, measured, "applied"))
            batch, lr, workers = 2 * batch, lr * 2**0.5, decision.get("workers", workers)
        if tick % 30 == 29:
            of_epoch += 1
            records.append(Reported(of_epoch, step, step * 32, seconds, {"accuracy": 0.98 - 0.4 * 0.6**of_epoch}))
    metrics = dict(records[-1].metrics)
    last = {"noise_scale": (1480.0, 190.0), "loss": (0.11, None)}
    end = RunFinished("9f" * 32, workers, step, step * 32, seconds, metrics, 0.02, 0.001, 151_000, signals=last)
    return [*records, end]


@pytest.fixture
def adapting_entries():
    return stamped(adapting_records())


@pytest.fixture
def found():
    return found_frontier()


@pytest.fixture
def study_entries():
    return stamped(study_records())


@pytest.fixture
def frontier_entries():
    return stamped(frontier_records())


@pytest.fixture
def run_entries():
    return stamped(run_records())


@pytest.fixture
def failed_run_entries():
    failed = RunFailed("exception", "ValueError: shapes (3,) and (4,)", rank=1, exit_code=1, log="Traceback\n  line 3")
    return stamped([*run_records()[:4], failed])


def put(out: Path, entries) -> Path:
    out.mkdir(exist_ok=True)
    (out / "journal.jsonl").write_bytes(b"".join(encode_entry(entry) + b"\n" for entry in entries))
    return out


@pytest.fixture
def journal(tmp_path):
    """Write entries as ``tmp_path/out/journal.jsonl``; gives the folder."""
    return lambda entries: put(tmp_path / "out", entries)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A finished run, study and frontier with their reports: kind -> folder. Not to be changed."""
    folder = tmp_path_factory.mktemp("reports")
    kinds = {
        "run": run_records(),
        "study": study_records(),
        "frontier": frontier_records(),
        "adapting": adapting_records(),
    }
    outs = {kind: put(folder / kind, stamped(records)) for kind, records in kinds.items()}
    for out in outs.values():
        write_report(out)
    return outs


@pytest.fixture
def with_rows():
    """The frontier with some rows changed: ``with_rows({3: {"quality": nan}}, target=None)``."""

    def change(changes, **fields):
        rows = [replace(row, **changes.get(i, {})) for i, row in enumerate(frontier_rows())]
        return replace(found_frontier(), rows=rows, **fields)

    return change
