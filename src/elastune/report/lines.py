"""Journal records as one line of text: measurements, decisions, accepted changes, how a run began.

The live progress of the command line uses these lines, so this file imports no tables and no figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from elastune.core.formatting import count, duration, number, plain
from elastune.core.journal.records import (
    ChangesAccepted,
    Decided,
    Entry,
    LearnerLeftOut,
    Measured,
    NotMeasured,
    PolicyFailed,
    Restarted,
    RoundsShortened,
    RunStarted,
    StagesDivided,
    StartedFrom,
    StepsVerified,
    SyncChanged,
    SyncChangesUnreached,
    TopologyChanged,
    VerificationEnded,
    WorkerWrong,
)
from elastune.tuning.search.objective import clock

NOISE_SCALE, LOSS, LEARNERS_DISTANCE, SENT_BYTES = "noise_scale", "loss", "learners_distance", "sent_bytes"
SignalValue = tuple[float, float | None]  # a signal's value and its standard error, where one is known
MAIN_SIGNALS = (NOISE_SCALE, LOSS, "throughput", "step_s")
"""The signals that most policies look at, the most important first."""
MOST_SIGNALS = 2  # in one line
MOST_FRESH = 6  # names in one line
OUTCOMES = {"applied": "applied", "disagreed": "not applied, workers disagreed", "refused": "refused"}
WORDS: Mapping[str, Callable[[Any], str]] = {
    "micro_batch": lambda value: f"micro-batch {plain(value, 20)}",
    "mesh": lambda value: f"mesh {plain(value, 60)}",
    "replace_rank": lambda value: f"another worker for rank {plain(value, 20)}",
    "correct_momentum": lambda _: "momentum corrected",
    "remember": lambda _: "state kept",
    "restore": lambda _: "back to the state kept",
    "stop": lambda _: "stop",
}
"""Fields of a decision and their texts."""
KNOWN = frozenset({"batch_size", "workers", "lr", "lr_factor", "ramp_steps", *WORDS})
"""Fields of a decision that have a text of their own; other fields show their name and value."""


def decided_line(decided: Decided) -> str:
    """``step 320: gns: batch 64 -> 128, lr 0.05 -> 0.0707 (noise scale 412 ± 30)``."""
    outcome = "" if decided.outcome == "applied" else f": {OUTCOMES[decided.outcome]}"
    detail = f", {plain(decided.detail, 200)}" if decided.detail else ""
    why = cause_text(decided.cause)
    text = f"{change_text(decided)}{f' ({why})' if why else ''}"
    return f"step {decided.step}: {plain(decided.policy, 60)}: {text}{outcome}{detail}"


def failed_line(failed: PolicyFailed) -> str:
    """``step 320: gns: after_step failed on worker 1: ZeroDivisionError: ...; it is not called any more``."""
    off = "; it is not called any more" if failed.off else ""
    what = f"{plain(failed.policy, 60)}: {plain(failed.hook, 40)} failed on worker {failed.worker}"
    return f"step {failed.step}: {what}: {plain(failed.detail, 300)}{off}"


def unmeasured_line(record: NotMeasured) -> str:
    """``noise scale is not measured: one pass of a worker is all of the batch, ...``."""
    return f"{plain(record.monitor, 60).replace('_', ' ')} is not measured: {plain(record.why, 300)}"


def change_text(decided: Decided) -> str:
    """``batch 64 -> 128, lr 0.05 -> 0.0707 over 50 steps``: the old and new values of a decision."""
    decision, cause = decided.decision, decided.cause
    parts = [
        f"{words} {getattr(cause, name)} -> {plain(decision[name], 20)}"
        for name, words in (("batch_size", "batch"), ("workers", "workers"))
        if decision.get(name) is not None
    ]
    lr = _new_lr(decision, cause.lr)
    if lr is not None:
        ramp = f" over {plain(decision['ramp_steps'], 20)} steps" if decision.get("ramp_steps") else ""
        parts.append(f"lr {number(cause.lr, 3)} -> {number(lr, 3)}{ramp}")
    worded = {name: value for name in WORDS if (value := decision.get(name)) is not None and value is not False}
    parts += [WORDS[name](value) for name, value in worded.items()]
    parts += [f"{plain(name, 40)} {plain(value, 40)}" for name, value in decision.items() if name not in KNOWN]
    return ", ".join(parts) or "nothing"


def cause_text(cause: Measured) -> str:
    """``noise scale 412 ± 30, loss 0.31``: the most important signals that a policy saw."""
    names = [name for name in MAIN_SIGNALS if name in cause.signals]
    names += [name for name in cause.signals if name not in names]
    return ", ".join(signal_text(name, cause.signals[name]) for name in names[:MOST_SIGNALS])


def measured_text(measured: Measured) -> str:
    """``loss 0.312, noise scale 412 ± 30, batch 64, lr 0.05, 2 workers``."""
    foremost = (LOSS, NOISE_SCALE, LEARNERS_DISTANCE)
    parts = [signal_text(name, measured.signals[name]) for name in foremost if name in measured.signals]
    parts += [f"batch {measured.batch_size}", f"lr {number(measured.lr, 3)}", count(measured.workers, "worker")]
    return ", ".join(parts)


def signal_text(name: str, signal: SignalValue) -> str:
    """``noise scale 412 ± 30``: three digits of the value, two of its error."""
    value, error = signal
    timed = clock(name) is not None
    has_error = error is not None and math.isfinite(error)
    error_text = f" ± {duration(error) if timed else number(error, 2)}" if has_error else ""
    words = plain(name.removesuffix("_s") if timed else name, 40).replace("_", " ")
    return f"{words} {duration(value) if timed else number(value, 3)}{error_text}"


def _new_lr(decision: Mapping[str, Any], old: float) -> float | None:
    """The learning rate after ``decision``: ``lr`` sets it, then ``lr_factor`` multiplies it; None for no change."""
    lr, factor = decision.get("lr"), decision.get("lr_factor")
    if not _is_number(lr) and not _is_number(factor):
        return None
    return float(old if lr is None else lr) * float(1.0 if factor is None else factor)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cut_line(record: RoundsShortened) -> str:
    """``rounds of local:learners=8,every=64 end after 47 steps, as each pass over the data does``."""
    return (
        f"rounds of {plain(record.sync, 120)} end after {count(record.steps, 'step')}, as each pass over the data does"
    )


def unreached_line(record: SyncChangesUnreached) -> str:
    """``the schedule's 9000=allreduce never comes: the run has 4690 steps``."""
    return f"the schedule's {plain(record.changes, 200)} never comes: the run has {count(record.steps, 'step')}"


def stages_line(cut: StagesDivided) -> str:
    """Where a pipeline is cut, and how much of the cost each stage has."""
    stages = ", ".join(f"{plain(name, 60)} {share:.0%}" for name, share in zip(cut.names, cut.shares, strict=True))
    return f"{count(len(cut.names), 'stage')}, by {cut.weighed}, each from its first layer on: {stages}"


def start_line(record: StartedFrom) -> str:
    """Which tensors a run took from another model, and which begin fresh."""
    shown = "; ".join(f"{name} ({why})" for name, why in list(record.fresh.items())[:MOST_FRESH])
    more = f" and {len(record.fresh) - MOST_FRESH} more" if len(record.fresh) > MOST_FRESH else ""
    fresh = f"; fresh: {shown}{more}" if record.fresh else ""
    unused = f"; {record.unused} of its tensors unused" if record.unused else ""
    return plain(f"begins with {count(record.taken, 'tensor')} of {record.source}{fresh}{unused}", 600)


def since_line(each: SyncChanged | TopologyChanged) -> str:
    """``step 1000: local:learners=8,every=16 from here on (schedule)``."""
    if isinstance(each, TopologyChanged):
        return f"step {each.step}: sums by {plain(each.topology, 80)} from here on ({plain(each.cause, 300)})"
    return f"step {each.step}: {plain(each.sync, 120)} from here on ({plain(each.why, 100)})"


def restart_line(restart: Restarted) -> str:
    """``restarted from step 22: 20 steps repeated, after 7.1 s without a worker``."""
    after = f", after {duration(restart.pause_s)} without a worker" if restart.pause_s > 0 else ""
    return f"restarted from step {restart.step}: {count(restart.repeated, 'step')} repeated{after}"


def verification_line(record: WorkerWrong | VerificationEnded | StepsVerified) -> str:
    """``step 50: worker 1 computes wrong each time, slot 2, body.weight (digests 7f..., of host a, cpu)``."""
    match record:
        case StepsVerified(slots=slots):
            return f"{count(slots, 'slot')} computed by a second worker, too, with equal bits"
        case VerificationEnded(step=step, why=why, leaf=leaf):
            where = f" ({plain(leaf, 80)})" if leaf else ""
            return f"step {step}: no slot is verified from here on{where}: {plain(why, 200)}"
    what = plain(record.leaf, 80) if record.slot is None else f"slot {record.slot}, {plain(record.leaf, 80)}"
    place = ", ".join(filter(None, (plain(record.host, 80), plain(record.device, 40))))
    digests = ", ".join(f"worker {worker} {plain(digest, 16)}" for worker, digest in record.digests[:6])
    return f"step {record.step}: {plain(record.why, 200)} ({what}; {place}; {digests})"


def left_out_line(left: LearnerLeftOut) -> str:
    """``steps 4 to 6 ended without learner 2 (worker 2): 24 samples left out``."""
    whose = "" if left.worker < 0 else f" (worker {left.worker})"
    steps = f"steps {left.first_step} to {left.last_step}"
    return f"{steps} ended without learner {left.learner}{whose}: {count(left.samples, 'sample')} left out"


def accepted_lines(entries: Iterable[Entry]) -> tuple[str, ...]:
    """A line for each accepted change of a program, its space or its data: from where on, when, and what changed."""
    lines, of_run = [], False
    for entry in entries:
        of_run = of_run or isinstance(entry.record, RunStarted)
        if isinstance(entry.record, ChangesAccepted):
            lines.append(_accepted_line(entry.record, entry.at, of_run=of_run))
    return tuple(lines)


def what_text(record: ChangesAccepted) -> str:
    """The accepted changes in one line."""
    return plain("; ".join(record.what), 400)


def _accepted_line(record: ChangesAccepted, at: float, *, of_run: bool) -> str:
    when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    place = f"step {record.step + 1} (epoch {record.epoch + 1})" if of_run else f"trial {record.first_trial}"
    return f"from {place} on, {when}: {what_text(record)}"
