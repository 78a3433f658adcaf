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
    RoundsShortened,
    RunStarted,
    StagesDivided,
    StartedFrom,
    SyncChanged,
    SyncChangesUnreached,
    TopologyChanged,
)
from elastune.tune.search.objective import clock

# [decision text] In words for one line: what was measured, decided, cut and agreed on, and what a run began with.

NOISE_SCALE, LOSS, LEARNERS_DISTANCE, SENT_BYTES = "noise_scale", "loss", "learners_distance", "sent_bytes"
SignalValue = tuple[float, float | None]  # a signal's value and its standard error, where one is known
MAIN_SIGNALS = (NOISE_SCALE, LOSS, "throughput", "step_s")
"""What most policies look at, the foremost first."""
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
KNOWN = frozenset({"batch_size", "workers", "lr", "lr_factor", "ramp_steps", *WORDS})


def decided_line(decided: Decided) -> str:
    """``step 320: gns: batch 64 -> 128, lr 0.05 -> 0.0707 (noise scale 412 ± 30)``."""
    outcome = "" if decided.outcome == "applied" else f": {OUTCOMES[decided.outcome]}"
    detail = f", {plain(decided.detail, 200)}" if decided.detail else ""
    why = cause_text(decided.cause)
    told = f"{change_text(decided)}{f' ({why})' if why else ''}"
    return f"step {decided.step}: {plain(decided.policy, 60)}: {told}{outcome}{detail}"


def failed_line(failed: PolicyFailed) -> str:
    """``step 320: gns: after_step failed on worker 1: ZeroDivisionError: ...; it is not called any more``."""
    off = "; it is not called any more" if failed.off else ""
    what = f"{plain(failed.policy, 60)}: {plain(failed.hook, 40)} failed on worker {failed.worker}"
    return f"step {failed.step}: {what}: {plain(failed.detail, 300)}{off}"


def unmeasured_line(told: NotMeasured) -> str:
    """``noise scale is not measured: one pass of a worker is all of the batch, ...``."""
    return f"{plain(told.monitor, 60).replace('_', ' ')} is not measured: {plain(told.why, 300)}"


def change_text(decided: Decided) -> str:
    """``batch 64 -> 128, lr 0.05 -> 0.0707 over 50 steps``: what a decision changes, from what and to what."""
    asked, cause = decided.decision, decided.cause
    parts = [
        f"{words} {getattr(cause, name)} -> {plain(asked[name], 20)}"
        for name, words in (("batch_size", "batch"), ("workers", "workers"))
        if asked.get(name) is not None
    ]
    lr = _new_lr(asked, cause.lr)
    if lr is not None:
        ramp = f" over {plain(asked['ramp_steps'], 20)} steps" if asked.get("ramp_steps") else ""
        parts.append(f"lr {number(cause.lr, 3)} -> {number(lr, 3)}{ramp}")
    said = {name: value for name in WORDS if (value := asked.get(name)) is not None and value is not False}
    parts += [WORDS[name](value) for name, value in said.items()]
    parts += [f"{plain(name, 40)} {plain(value, 40)}" for name, value in asked.items() if name not in KNOWN]
    return ", ".join(parts) or "nothing"


def cause_text(cause: Measured) -> str:
    """``noise scale 412 ± 30, loss 0.31``: the foremost signals that a policy saw."""
    names = [name for name in MAIN_SIGNALS if name in cause.signals]
    names += [name for name in cause.signals if name not in names]
    return ", ".join(signal_text(name, cause.signals[name]) for name in names[:MOST_SIGNALS])


def measured_text(measured: Measured) -> str:
    """``loss 0.312, noise scale 412 ± 30, batch 64, lr 0.05, 2 workers``."""
    foremost = (LOSS, NOISE_SCALE, LEARNERS_DISTANCE)
    parts = [signal_text(name, measured.signals[name]) for name in foremost if name in measured.signals]
    parts += [f"batch {measured.batch_size}", f"lr {number(measured.lr, 3)}", count(measured.workers, "worker")]
    return ", ".join(parts)


def signal_text(name: str, told: SignalValue) -> str:
    """``noise scale 412 ± 30``: three digits of the value, two of its error."""
    value, error = told
    timed = clock(name) is not None
    known = error is not None and math.isfinite(error)
    error_text = f" ± {duration(error) if timed else number(error, 2)}" if known else ""
    words = plain(name.removesuffix("_s") if timed else name, 40).replace("_", " ")
    return f"{words} {duration(value) if timed else number(value, 3)}{error_text}"


def _new_lr(asked: Mapping[str, Any], old: float) -> float | None:
    """The learning rate that ``asked`` leads to: ``lr`` sets it, ``lr_factor`` multiplies it after that."""
    lr, factor = asked.get("lr"), asked.get("lr_factor")
    if not _is_number(lr) and not _is_number(factor):
        return None
    return float(old if lr is None else lr) * float(1.0 if factor is None else factor)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cut_line(told: RoundsShortened) -> str:
    """``rounds of local:learners=8,every=64 end after 47 steps, as each pass over the data does``."""
    return f"rounds of {plain(told.sync, 120)} end after {count(told.steps, 'step')}, as each pass over the data does"


def unreached_line(told: SyncChangesUnreached) -> str:
    """``the schedule's 9000=allreduce never comes: the run has 4690 steps``."""
    return f"the schedule's {plain(told.changes, 200)} never comes: the run has {count(told.steps, 'step')}"


def stages_line(cut: StagesDivided) -> str:
    """Where a pipeline is cut, and how much of the cost each stage has."""
    stages = ", ".join(f"{plain(name, 60)} {share:.0%}" for name, share in zip(cut.names, cut.shares, strict=True))
    return f"{count(len(cut.names), 'stage')}, by {cut.weighed}, each from its first layer on: {stages}"


def begun_line(told: StartedFrom) -> str:
    """What a run took of another model's weights, and what begins fresh."""
    shown = "; ".join(f"{name} ({why})" for name, why in list(told.fresh.items())[:MOST_FRESH])
    more = f" and {len(told.fresh) - MOST_FRESH} more" if len(told.fresh) > MOST_FRESH else ""
    fresh = f"; fresh: {shown}{more}" if told.fresh else ""
    unused = f"; {told.unused} of its tensors unused" if told.unused else ""
    return plain(f"begins with {count(told.taken, 'tensor')} of {told.source}{fresh}{unused}", 600)


def since_line(each: SyncChanged | TopologyChanged) -> str:
    """``step 1000: local:learners=8,every=16 from here on (schedule)``."""
    if isinstance(each, TopologyChanged):
        return f"step {each.step}: sums by {plain(each.topology, 80)} from here on ({plain(each.cause, 300)})"
    return f"step {each.step}: {plain(each.sync, 120)} from here on ({plain(each.why, 100)})"


def left_out_line(left: LearnerLeftOut) -> str:
    """``steps 4 to 6 ended without learner 2 (worker 2): 24 samples left out``."""
    whose = "" if left.worker < 0 else f" (worker {left.worker})"
    steps = f"steps {left.first_step} to {left.last_step}"
    return f"{steps} ended without learner {left.learner}{whose}: {count(left.samples, 'sample')} left out"


# [accepted] The changes of a program, its space or its data that a run or a study went on with, from its journal.


def accepted_lines(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return a line for each time that changes were accepted: from where on, when, and what they are."""
    lines, of_run = [], False
    for entry in entries:
        of_run = of_run or isinstance(entry.record, RunStarted)
        if isinstance(entry.record, ChangesAccepted):
            lines.append(_line(entry.record, entry.at, of_run=of_run))
    return tuple(lines)


def what_text(record: ChangesAccepted) -> str:
    """Return the changes in one line."""
    return plain("; ".join(record.what), 400)


def _line(record: ChangesAccepted, at: float, *, of_run: bool) -> str:
    when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    place = f"step {record.step + 1} (epoch {record.epoch + 1})" if of_run else f"trial {record.first_trial}"
    return f"from {place} on, {when}: {what_text(record)}"
