"""Journals as elastune writes them, and what may become of one by accident or on purpose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from tests.support.studies import Telling

from elastune.core.journal.records import (
    Adopted,
    ArtifactKept,
    Checkpointed,
    ConnectionsRefused,
    DataContext,
    Decided,
    EarlierTrial,
    Entry,
    FaultInjected,
    FrontierAnswer,
    FrontierFound,
    FrontierRow,
    FrontierVolumes,
    Gain,
    LinkMeasured,
    Measured,
    MembershipEvent,
    PolicyFailed,
    Record,
    ReferencePoint,
    Regrouped,
    Reported,
    RunContext,
    RunFailed,
    RunFinished,
    RunStarted,
    ScalingPredicted,
    SideVolume,
    StepsCompleted,
    StragglerDetected,
    StudyFinished,
    StudyStarted,
    TimesFitted,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
    WarmStarted,
    WorkerGone,
    encode_entry,
)

MEANS = {"workers": 2, "mode": "exact", "mechanism": "replicated", "num_slots": 8, "device": "cpu", "precision": "fp32"}
CONTEXT = {"cores": 2, "processor": "Example CPU", "python": "3.11.9"}


def run() -> list[Record]:
    """A run with a policy, a lost worker and all that may be said of one."""
    asked = {"policies": ["gns"], "monitors": ["noise_scale"]}
    measured = Measured(20, 1, 640, 2.0, 2, 32, 0.1, {"noise_scale": (40.0, 3.0), "loss": (0.3, None)})
    context = RunContext(DataContext(640), 100, "cpu", "Example CPU", 2, "", {"torch": "2.13"})
    return [
        RunStarted("linear.py", {"lr": 0.1, "batch_size": 32}, 0, MEANS, CONTEXT, epochs=3, adapt=asked),
        MembershipEvent({"kind": "joined", "worker": 0}),
        Reported(1, 10, 320, 1.0, {"accuracy": 0.7, "loss": float("nan")}, epochs=3),
        StepsCompleted(0, 1, 2, 0, 0, 320, 320, 1, 10),
        Checkpointed(10, "checkpoints/step-0000000010"),
        FaultInjected("kill", 1),
        WorkerGone(1, "lost", "was ended by signal 9", -9, "log"),
        Regrouped(2, [0, 2], False, 10, 0.03, 1),
        measured,
        Decided("gns", 20, {"batch_size": 64, "lr_factor": 1.4, "workers": 3}, measured, "applied"),
        Decided("gns", 25, {"lr": 0.3}, measured, "refused", "no"),
        PolicyFailed("gns", "after_step", 21, 0, "ZeroDivisionError", off=True),
        StragglerDetected(0, "worker 0 is slow"),
        ConnectionsRefused("10.0.0.9", "it has another token", 3),
        Adopted([0, 2], 18, 0.4, [3]),
        LinkMeasured(2, 1e-3, 1e-9),
        StepsCompleted(0, 2, 2, 1, 0, 320, 320, 11, 20),
        Reported(2, 20, 640, 2.0, {"accuracy": 0.8}, epochs=3),
        RunFinished(
            *("9f" * 32, 2, 30, 960, 3.0, {"accuracy": 0.9}, 0.03, 0.01, 400),
            signals=dict(measured.signals),
            context=context,
        ),
    ]


def failed_run() -> list[Record]:
    return [*run()[:4], RunFailed("exception", "ValueError: no", 1, 1, "Traceback")]


def study() -> list[Record]:
    """Trials that completed, failed, paused, and grew; warm start and artifacts."""
    journal = Telling()
    for trial, lr in enumerate((0.1, 0.01, 0.5, 0.2)):
        journal.start(trial, lr=lr, optimizer="sgd", momentum=0.5, workers=2)
    records = [entry.record for entry in journal.entries]
    report = Reported(1, 10, 320, 1.0, {"accuracy": 0.5}, epochs=4)
    return [
        records[0],
        WarmStarted(
            "earlier", 1, 2, 0.5, {"other": 1}, [], [EarlierTrial({"lr": 0.1}, {"accuracy": 0.4})], [{"lr": 0.1}]
        ),
        ScalingPredicted("plan", [(32, 1, 0.5), (32, 2, 0.3), (32, 4, 0.4)], 2, "a step of 32 samples takes 0.3 s"),
        *records[1:],
        *(TrialReported(trial, report, 2.0) for trial in range(4)),
        TrialAdopted(1, Adopted([0, 1], 12, 0.4)),
        TrialReallocated(0, 2, 3, "on the front"),
        TrialRegrouped(0, Regrouped(2, [0, 1, 2], True, 10, 0.01, 0)),
        TrialFinished(0, "complete", {"accuracy": 0.9, "seconds": 3.0}, {"accuracy": 0.9}, {}, 3.0, worker_seconds=9.0),
        ArtifactKept(0, 40, "trials/00000/checkpoints/step-0000000040", "9f" * 32),
        TrialPaused(1, 1, 1.5, 3.0, "behind others"),
        TrialFinished(2, "infeasible", seconds=1.0, reason="diverged: loss is nan"),
        TrialResumed(1, 2, "promoted", 4),
        TrialFinished(1, "complete", {"accuracy": 0.8, "seconds": 2.0}, {"accuracy": 0.8}, {"lr <= 1": -0.5}, 2.0),
        TrialPaused(3, 1, 1.5, 3.0, "the budget is spent", cut_off=True),
        StudyFinished("the budget of 4 trials is spent", 12.0),
    ]


def frontier() -> list[Record]:
    settings = {
        "kind": "frontier",
        "program": "linear.py",
        "objectives": {"accuracy": "max", "seconds": "min", "cost": "min"},
        "workers": [1, 2],
        "target": 0.9,
        "seeds": 3,
        "seed": 0,
    }
    rows = [
        FrontierRow(
            role="naive" if workers == 1 else "tuned",
            workers=workers,
            batch_size=32,
            lr=0.1,
            lr_rule="linear",
            mechanism="replicated",
            mesh=f"data={workers}",
            mode="fast",
            config={"lr": 0.1, "batch_size": 32},
            quality=0.9,
            ci=(0.88, 0.92),
            verdict="holds",
            test_samples=400,
            time_to_target_s=1.5,
            time_to_target_ci=(1.0, 2.0),
            throughput=1000.0,
            seeds=3,
            held_out=True,
            validation=0.91,
            seconds=3.0,
            seconds_label="measured" if workers == 1 else "modelled",
            seconds_factor=1.0 if workers == 1 else 1.4,
            cost=0.01,
            trials=[1, 2, 3],
        )
        for workers in (1, 2)
    ]
    trials: list[Record] = []
    for number, phase in enumerate(("calibrate", "naive", "search", "confirm")):
        trials += [
            TrialStarted(number, {"lr": 0.1, "batch_size": 32}, MEANS, number, phase),  # type: ignore[arg-type]
            TrialReported(number, Reported(1, 10, 320, 1.0, {"accuracy": 0.5})),
            TrialFinished(number, "complete", {"accuracy": 0.9}, {"accuracy": 0.9}, seconds=1.0),
        ]
    sides = [SideVolume("search", 0.9, (0.85, 0.95), 3, 4, 12, 12, 60.0, True)]
    volumes = FrontierVolumes(60.0, ReferencePoint(0.5, 44.0, 0.02), sides)
    gain = Gain(2, 1, 1.8, 1.3, 2.5, "modelled", 1.1, 0)
    answer = FrontierAnswer(
        "Two workers do.", pick=1, workers=gain, command="elastune run linear.py", not_done=["a policy"]
    )
    return [
        StudyStarted(settings, CONTEXT),
        *trials,
        TimesFitted(2e-3, 3e-5, 4e-4, 1e-9, 400, [1, 2], {"batch 64 on 2 workers": 1.07}),
        FrontierFound("accuracy", "max", 0.9, 1.0, rows, volumes, answer),
        StudyFinished("the budget is spent", 60.0),
    ]


KINDS = {"run": run, "failed run": failed_run, "study": study, "frontier": frontier}


def lines(records: Sequence[Record], begin: float = 1_700_000_000.0) -> list[bytes]:
    return [encode_entry(Entry(begin + 0.5 * i, record)) for i, record in enumerate(records)]


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


HUGE = 10**400
ODD_NUMBERS = (0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63), 10**19, HUGE, -HUGE, 0.5, 1e-320, 1e308, -1e308)
ODD: list[Any] = [
    *ODD_NUMBERS,
    *(float("nan"), float("inf"), -float("inf"), True, False, None, "", "a", "1", "nan", "é\u202e\x00", "x" * 5000),
    *([], {}, [None], {"": None}, {"a": {"b": 1}}, [[1, 2], [3]], "min", "max", ["accuracy:max"], "step-1e3"),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a JSON value something could be another one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, part in inner for place in places(part, (*at, key)))]


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """``value`` with ``new`` at that place."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = put(copy[at[0]], at[1:], new)
    return copy


def without(value: Any, at: tuple[Any, ...]) -> Any:
    """``value`` less what is at that place, which is not its root."""
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(at) > 1:
        copy[at[0]] = without(copy[at[0]], at[1:])
    else:
        del copy[at[0]]
    return copy


FOREIGN = (b"", b"{}", b"[]", b"null", b'{"at":1}', b'{"at":1,"kind":"x"}', b'{"at":1,' + b'"a":[' * 2000)


def as_line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


@st.composite
def mutated(draw: st.DrawFn, lines: list[bytes]) -> bytes:
    """The bytes of a journal after one to three accidents."""
    results = list(lines)
    for _ in range(draw(st.integers(1, 3))):
        if not results:
            break
        i = draw(st.integers(0, len(results) - 1))
        match draw(st.sampled_from(["value", "value", "value", "value", "gone", "line", "order", "bytes", "other"])):
            case "value" | "gone" as how:
                try:
                    record = json.loads(results[i])
                except ValueError:
                    continue
                spots = places(record)
                at = draw(st.sampled_from(spots))
                if how == "gone" and at:
                    results[i] = as_line(without(record, at))
                else:
                    results[i] = as_line(put(record, at, draw(st.sampled_from(ODD))))
            case "line":
                results[i] = draw(st.sampled_from(FOREIGN))
            case "order":
                results.insert(draw(st.integers(0, len(results))), results[i])
            case "bytes":
                line = bytearray(results[i])
                if line:
                    line[draw(st.integers(0, len(line) - 1))] ^= 1 << draw(st.integers(0, 7))
                results[i] = bytes(line)
            case "other":
                kind = draw(st.sampled_from(sorted(KINDS)))
                more = [json.loads(line) for line in globals()["lines"](KINDS[kind]())]
                results[i:i] = [as_line(draw(st.sampled_from(more)))]
    whole = b"\n".join(results) + b"\n"
    return whole[: draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))]
