"""How a run adapted: measurements, policies' decisions, sync strategies and topologies over time.

The facts are gathered once (``Adaptation``, ``SyncHistory``). The tables and the figure, which shows loss, noise scale,
batch, learning rate, workers and strategy on one axis of time, read both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from elastune.core.communication import Topology
from elastune.core.formatting import byte_count, count, duration, number, plain, whole
from elastune.core.journal.execution_records import BY_CHECKPOINT
from elastune.core.journal.records import (
    Decided,
    Entry,
    Measured,
    NotMeasured,
    PolicyFailed,
    Reported,
    Restarted,
    RunFinished,
    RunStarted,
    SyncChanged,
    TopologyChanged,
)
from elastune.core.plan.batch_size import batch_against_noise
from elastune.core.sync_plan import SyncPlan
from elastune.report import figures as palette
from elastune.report.figures import Axis, Bars, Figure, Mark, Marker, Panel, Series
from elastune.report.lines import (
    LEARNERS_DISTANCE,
    LOSS,
    NOISE_SCALE,
    OUTCOMES,
    SENT_BYTES,
    SignalValue,
    cause_text,
    change_text,
    decided_line,
    measured_text,
    signal_text,
)
from elastune.report.overviews import RunOverview
from elastune.report.tables import Table
from elastune.tuning.study.trials import Trial

AT_FIRST = "asked for at the start"
DEFAULT = "the default"
PLAIN = {"strategy": str(SyncPlan()), "topology": str(Topology())}
"""The strategy and topology of a run that asks for none."""
UNROUTED = ("native", "auto")  # auto: as long as no links have called for routes

BAND_THICKNESS = 0.7
MOST_BAND_LETTERS = 70
MOST_LABELS = 12  # decisions; the labels of more would cover each other
MOST_MARKS = 80
MOST_LETTERS = 18
MOST_COUNTS = 8  # worker counts that an axis names one by one


# --- measurements and decisions ---


@dataclass(frozen=True)
class Adaptation:
    """What a run measured and decided, gathered from its journal.

    The records are those of the last attempt and of the steps that this attempt resumed from. ``policies`` and
    ``monitors`` are those asked for. ``last_signals``: the signals at the end of training, if the run has ended.
    """

    policies: tuple[str, ...] = ()
    monitors: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()
    decided: tuple[Decided, ...] = ()
    failed: tuple[PolicyFailed, ...] = ()
    unmeasured: tuple[NotMeasured, ...] = ()
    last_signals: Mapping[str, SignalValue] | None = None

    @property
    def any(self) -> bool:
        """Whether the run was to adapt or to measure, or decided something; any run measures learners."""
        return bool(self.policies or self.monitors or self.decided or self.failed or self.unmeasured)

    @property
    def outcomes(self) -> Counter[str]:
        """The number of decisions by outcome: applied, disagreed, refused."""
        return Counter(each.outcome for each in self.decided)

    def signal(self, name: str) -> SignalValue | None:
        """The newest value and standard error of signal ``name``; None if it was never measured."""
        sources = [self.last_signals or {}, *(m.signals for m in reversed(self.measured))]
        return next((signals[name] for signals in sources if name in signals), None)


def gather_adaptation(entries: Iterable[Entry]) -> Adaptation:
    """Gather what a run measured and decided, without records beyond the step that a later attempt resumed from."""
    policies: list[str] = []
    monitors: list[str] = []
    kept: list[Measured | Decided | PolicyFailed] = []
    unmeasured: list[NotMeasured] = []
    last_signals: Mapping[str, SignalValue] | None = None
    for record in (entry.record for entry in entries):
        match record:
            case RunStarted(adapt=adapt, resumed_step=step):
                policies, monitors = adapt.get("policies", []), adapt.get("monitors", [])
                kept = [each for each in kept if step is not None and each.step <= step]
                last_signals, unmeasured = None, []
            case Restarted(step=step):
                kept = [each for each in kept if each.step <= step]
            case Measured() | Decided() | PolicyFailed():
                kept.append(record)
            case NotMeasured():
                unmeasured.append(record)
            case RunFinished(signals=signals):
                last_signals = signals
            case _:
                pass
    return Adaptation(
        policies=tuple(policies),
        monitors=tuple(monitors),
        measured=tuple(each for each in kept if isinstance(each, Measured)),
        decided=tuple(each for each in kept if isinstance(each, Decided)),
        failed=tuple(each for each in kept if isinstance(each, PolicyFailed)),
        unmeasured=tuple(unmeasured),
        last_signals=last_signals,
    )


def adaptation_json(adaptation: Adaptation) -> dict[str, Any]:
    """The object ``adapt`` of a run's result; {} if the run asked for nothing and decided nothing."""
    if not adaptation.any:
        return {}
    last = adaptation.measured[-1] if adaptation.measured else None
    noise_scale, error = adaptation.signal(NOISE_SCALE) or (None, None)
    return {
        "adapt": {
            "policies": list(adaptation.policies),
            "decisions": adaptation.outcomes["applied"],
            "disagreed": adaptation.outcomes["disagreed"],
            "refused": adaptation.outcomes["refused"],
            "failed": len(adaptation.failed),
            "not_measured": {each.monitor: each.why for each in adaptation.unmeasured},
            "noise_scale": noise_scale,
            "noise_scale_error": error,
            "batch_verdict": batch_line(adaptation) or None,
            "batch_size": last.batch_size if last else None,
            "lr": last.lr if last else None,
        }
    }


def adaptation_line(adaptation: Adaptation) -> str:
    """``3 decisions applied, 1 refused, noise scale 412 ± 30, batch 128, lr 0.0707``; empty without any."""
    outcomes = adaptation.outcomes
    parts = [f"{count(outcomes['applied'], 'decision')} applied"] if adaptation.policies or adaptation.decided else []
    parts += [f"{outcomes['disagreed']} that workers disagreed on"] if outcomes["disagreed"] else []
    parts += [f"{outcomes['refused']} refused"] if outcomes["refused"] else []
    parts += [f"{count(len(adaptation.failed), 'call')} of a policy failed"] if adaptation.failed else []
    parts += [f"{plain(each.monitor, 60).replace('_', ' ')} not measured" for each in adaptation.unmeasured]
    if adaptation.measured and adaptation.any:
        last = adaptation.measured[-1]
        parts += [signal_text(name, value) for name in (NOISE_SCALE,) if (value := adaptation.signal(name))]
        parts += [f"batch {last.batch_size}", f"lr {number(last.lr, 3)}"]
    return ", ".join(parts)


def batch_line(adaptation: Adaptation) -> str:
    """A sentence that compares the run's last batch with its noise scale; empty if no noise scale was measured."""
    noise_scale = adaptation.signal(NOISE_SCALE)
    if noise_scale is None or not adaptation.measured:
        return ""
    ended = NOISE_SCALE in (adaptation.last_signals or {})
    when = "at the end of training" if ended else "when last measured"
    words = batch_against_noise(adaptation.measured[-1].batch_size, *noise_scale, whose="the run's", when=when)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def trial_batch_line(trial: Trial) -> str:
    """A sentence that compares a trial's batch with its noise scale; empty if one of them is not known."""
    if trial.noise_scale is None or trial.batch_size is None:
        return ""
    tried = "; what it reaches was trained and measured, which outweighs this estimate"
    whose = f"trial {trial.number}'s"
    words = batch_against_noise(trial.batch_size, *trial.noise_scale, whose=whose, outweighed=tried)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def decisions_table(adaptation: Adaptation) -> Table:
    """One row for each decision: when, by which policy, what, why, and the outcome."""
    rows = tuple(
        (
            whole(each.step),
            plain(each.policy, 60),
            change_text(each),
            cause_text(each.cause),
            plain(f"{OUTCOMES[each.outcome]}{f': {each.detail}' if each.detail else ''}", 300),
        )
        for each in adaptation.decided
    )
    return Table(f"Decisions ({len(rows)})", ("step", "policy", "what", "why", "outcome"), rows, frozenset({0}))


def failures_table(adaptation: Adaptation) -> Table:
    """One row for each call of a policy that raised."""
    rows = tuple(
        (
            whole(each.step),
            plain(each.policy, 60),
            plain(each.hook),
            str(each.worker),
            plain(each.detail, 300),
            "switched off" if each.off else "",
        )
        for each in adaptation.failed
    )
    header = ("step", "policy", "hook", "worker", "error", "since then")
    return Table(f"Calls of policies that failed ({len(rows)})", header, rows, frozenset({0, 3}))


# --- sync strategies and topologies over time ---


@dataclass(frozen=True)
class SyncPeriod:
    """A period of one strategy or topology: ``what`` is in use after ``step`` steps and ``seconds`` of training.

    The period ends where the next one begins. ``record``: the change that began it; None at the start of a run.
    """

    which: Literal["strategy", "topology"]
    what: str
    step: int
    seconds: float
    why: str
    record: SyncChanged | TopologyChanged | None = None


@dataclass(frozen=True)
class SyncHistory:
    """The strategies and topologies of a run, in order: how its workers agreed, and by which routes sums travelled.

    ``topologies`` is empty if the run never laid routes. ``seconds``: the training time in the newest record.
    """

    strategies: tuple[SyncPeriod, ...] = ()
    topologies: tuple[SyncPeriod, ...] = ()
    seconds: float = 0.0

    @property
    def any(self) -> bool:
        """Whether the run had another strategy than all-reduce, or a topology of its own."""
        return any(each.what != PLAIN[each.which] for each in self.all)

    @property
    def all(self) -> tuple[SyncPeriod, ...]:
        """Strategies and topologies, in order of steps."""
        return tuple(sorted((*self.strategies, *self.topologies), key=lambda each: each.step))

    @property
    def changes(self) -> tuple[SyncPeriod, ...]:
        """The periods that began with a change after the first step."""
        return tuple(each for each in self.all if each.record is not None and each.step > 0)


def gather_sync(entries: Iterable[Entry]) -> SyncHistory:
    """Gather a run's strategies and topologies, without changes beyond the step that a later attempt resumed from."""
    strategies: list[SyncPeriod] = []
    topologies: list[SyncPeriod] = []
    clock: list[tuple[int, float]] = []  # steps and seconds of all records that have both

    def go_back(step: int) -> None:
        for periods in (strategies, topologies):
            periods[:] = [each for each in periods if each.step <= step]
        clock[:] = [each for each in clock if each[0] <= step]

    for record in (entry.record for entry in entries):
        match record:
            case RunStarted(resumed_step=step, sync=sync, execution=execution):
                go_back(-1 if step is None else step)
                start_step, seconds = step or 0, max((time for _, time in clock), default=0.0)
                if not strategies:  # otherwise the run goes on with the strategy of its checkpoint
                    strategies.append(_first("strategy", sync, start_step, seconds))
                requested = str(execution.get("topology", PLAIN["topology"]))
                _add(topologies, _first("topology", requested, start_step, seconds))
            case Restarted(step=step):
                go_back(step)
            case SyncChanged(step=step, sync=sync, why=why, seconds=seconds):
                _add(strategies, SyncPeriod("strategy", sync, step, seconds, why, record))
            case TopologyChanged(step=step, topology=topology, cause=why, seconds=seconds):
                if why == BY_CHECKPOINT and topologies and topologies[-1].record is None:
                    topologies.pop()  # the checkpoint's topology replaces the one that the resumed run asked for
                _add(topologies, SyncPeriod("topology", topology, step, seconds, why, record))
            case Measured(step=step, seconds=seconds) | Reported(step=step, seconds=seconds):
                clock.append((step, seconds))
            case RunFinished(steps=step, seconds=seconds):
                clock.append((step, seconds))
            case _:
                pass
    times = [*(seconds for _, seconds in clock), *(each.seconds for each in (*strategies, *topologies))]
    laid = topologies if any(each.what not in UNROUTED for each in topologies) else []
    return SyncHistory(tuple(strategies), tuple(laid), max(times, default=0.0))


def _first(which: Literal["strategy", "topology"], what: str, step: int, seconds: float) -> SyncPeriod:
    """The first strategy or topology of a run: the one asked for, or the default."""
    return SyncPeriod(which, what, step, seconds, DEFAULT if what == PLAIN[which] else AT_FIRST)


def _add(periods: list[SyncPeriod], period: SyncPeriod) -> None:
    """Append a period unless it continues the last one."""
    if not periods or periods[-1].what != period.what:
        periods.append(period)


def sync_line(history: SyncHistory) -> str:
    """``local:learners=8,every=16 -> allreduce (2 changes), sums by tree``; empty for a plain run."""
    if not history.any:
        return ""
    strategies = [plain(each.what, 80) for each in history.strategies]
    shown = [*strategies[:1], *(["..."] if len(strategies) > 3 else []), *strategies[1:][-2:]]
    text = " -> ".join(shown) + (f" ({count(len(strategies) - 1, 'change')})" if strategies[1:] else "")
    laid = list(dict.fromkeys(plain(each.what, 60) for each in history.topologies))
    return f"{text}, sums by {', then '.join(laid[:3])}{', ...' if laid[3:] else ''}" if laid else text


def sync_table(history: SyncHistory) -> Table:
    """One row for each period of a strategy or topology, with its duration; no rows for a plain run."""
    both = (
        [*spans(history.strategies, history.seconds), *spans(history.topologies, history.seconds)]
        if history.any
        else []
    )
    rows = tuple(
        (whole(each.step), each.which, plain(each.what, 120), duration(end - begin), plain(each.why, 300))
        for each, begin, end in sorted(both, key=lambda span: span[0].step)
    )
    return Table("How workers agreed", ("from step", "which", "what", "for", "why"), rows, frozenset({0, 3}))


def spans(periods: Sequence[SyncPeriod], seconds: float) -> list[tuple[SyncPeriod, float, float]]:
    """Each period with its begin and end in seconds. ``seconds``: the end of the last period."""
    ends = [each.seconds for each in periods] + [seconds]
    return [(each, each.seconds, max(each.seconds, end)) for each, end in zip(periods, ends[1:], strict=True)]


def bands(history: SyncHistory) -> Panel:
    """A panel over training time: a row of bands for strategies and one for topologies, one colour for each."""
    rows = [periods for periods in (history.topologies, history.strategies) if periods] if history.any else []
    bars: dict[tuple[str, str], Bars] = {}
    for place, periods in enumerate(rows):
        for each, begin, end in spans(periods, history.seconds):
            key = (each.which, each.what)
            color = palette.SEQUENCE[len(bars) % len(palette.SEQUENCE)]
            band = bars.setdefault(key, Bars(_name(each), color, (), (), (), (), ()))
            bars[key] = replace(
                band,
                y=(*band.y, float(place)),
                begin=(*band.begin, begin),
                end=(*band.end, end),
                thickness=(*band.thickness, BAND_THICKNESS),
                labels=(*band.labels, _band_label(each, begin, end)),
            )
    ticks, names = tuple(float(place) for place in range(len(rows))), tuple(periods[0].which for periods in rows)
    return Panel("", Axis(""), Axis("", ticks=ticks, names=names), (), bars=tuple(bars.values()))


def distances(measured: Sequence[Measured]) -> tuple[Series, ...]:
    """How far apart learners were; a line for each period in which the run had learners."""
    return tuple(
        _signal_line("learners' distance", part, LEARNERS_DISTANCE, palette.PICK)
        for has, group in groupby(measured, lambda m: _has_signal(m, LEARNERS_DISTANCE))
        if has and (part := list(group))
    )


def sent(measured: Sequence[Measured]) -> tuple[Series, ...]:
    """The bytes that workers sent in a step; no line if they sent none, as one worker alone does."""
    sending = [m for m in measured if _has_signal(m, SENT_BYTES) and m.signals[SENT_BYTES][0] > 0]
    return (_signal_line("bytes a step", sending, SENT_BYTES, palette.AFTER),) if sending else ()


def _signal_line(name: str, measured: Sequence[Measured], signal: str, color: str) -> Series:
    values = tuple(m.signals[signal][0] for m in measured)
    shown = [byte_count(round(value)) if signal == SENT_BYTES else number(value, 3) for value in values]
    labels = tuple(
        f"step {m.step}, {number(m.seconds, 4)} s; {name} {text}" for m, text in zip(measured, shown, strict=True)
    )
    marker: Marker | None = "circle" if len(measured) == 1 else None
    return Series(name, tuple(m.seconds for m in measured), values, color, marker=marker, line="solid", labels=labels)


def _has_signal(measured: Measured, signal: str) -> bool:
    return math.isfinite(measured.signals.get(signal, (math.nan, None))[0])


def _name(each: SyncPeriod) -> str:
    return plain(each.what if each.which == "strategy" else f"sums by {each.what}", MOST_BAND_LETTERS)


def _band_label(each: SyncPeriod, begin: float, end: float) -> str:
    what = plain(each.what, 120).replace("; ", ", ")
    why = plain(each.why, 200).replace("; ", ", ")
    return f"{each.which} {what}; from step {each.step}, {number(begin, 4)} s, for {duration(end - begin)}; {why}"


# --- the figure: everything on one axis of training time ---


def adaptation_figure(run: RunOverview, adaptation: Adaptation, history: SyncHistory | None = None) -> Figure | None:
    """All measurements over training time, with decisions as vertical lines and strategies and topologies as bands.

    None if the run measured nothing and has a plain sync history.
    """
    measured, history = adaptation.measured, history or SyncHistory()
    if not measured and not history.any:
        return None
    panels = [
        _panel("loss", _losses(run, measured)),
        _panel("samples", (*_noise_scale(measured), _batch(measured)), log=True),
        _panel("learning rate", (_steps("learning rate", measured, lambda m: m.lr, 3),)),
        _workers_panel(measured),
        _panel("learners' distance", distances(measured)),
        _panel("bytes a step", sent(measured), log=True),
        bands(history),
    ]
    drawn = [panel for panel in panels if panel.bars or any(series.x for series in panel.series)]
    drawn[-1] = replace(drawn[-1], x=Axis("training time (s)"))
    decided = adaptation.decided
    words = []
    if panels[4].series:
        words.append(
            "Learners' distance: root mean square from their mean where a round ends, over the norm of the mean."
        )
    if panels[5].series:
        words.append("Bytes: of all workers' collectives.")
    if any(series.band for panel in drawn for series in panel.series):
        words.append("Shaded: one standard error.")
    if decided:
        words.append("Vertical lines: decisions, dotted where nothing was changed.")
    if len(decided) > MOST_MARKS:
        words.append(f"The last {MOST_MARKS} of {count(len(decided), 'decision')} are drawn; the table has all.")
    return Figure(
        "adapting",
        "Noise scale and batch size over training" if len(panels[1].series) > 1 else "What was measured over training",
        tuple(drawn),
        " ".join(words),
        stacked=True,
        marks=_marks(decided),
    )


def _panel(label: str, series: Sequence[Series], log: bool = False, ticks: tuple[float, ...] = ()) -> Panel:
    return Panel("", Axis(""), Axis(label, log=log, ticks=ticks), tuple(series))


def _workers_panel(measured: Sequence[Measured]) -> Panel:
    panel = _panel("workers", (_steps("workers", measured, lambda m: float(m.workers), 1),), ticks=_counts(measured))
    return replace(panel, y=replace(panel.y, whole=True))


def _counts(measured: Sequence[Measured]) -> tuple[float, ...]:
    """The ticks of the axis of workers: every count that the run had, or () if these are many."""
    counts = sorted({float(m.workers) for m in measured})
    return tuple(counts) if len(counts) <= MOST_COUNTS else ()


def _losses(run: RunOverview, measured: Sequence[Measured]) -> tuple[Series, ...]:
    """The measured training loss; if no monitor measured one, the loss that the program reported."""
    losses = [(m, value) for m in measured if (value := _signal(m, LOSS)[0]) is not None]
    if losses:
        return (_measured_line("loss", losses, palette.INK),)
    reports = [r for r in run.reports if math.isfinite(r.metrics.get(LOSS, math.nan))]
    if not reports:
        return ()
    x, y = tuple(r.seconds for r in reports), tuple(r.metrics[LOSS] for r in reports)
    return (Series("reported loss", x, y, palette.INK, line="solid"),)


def _noise_scale(measured: Sequence[Measured]) -> tuple[Series, ...]:
    signals = [(m, *_signal(m, NOISE_SCALE)) for m in measured]
    points = [(m, value, error) for m, value, error in signals if value is not None and value > 0]
    if not points:
        return ()
    series = _measured_line("gradient noise scale", [(m, value) for m, value, _ in points], palette.BEST)
    errors = tuple(None if error is None else (error, error) for _, _, error in points)
    return (replace(series, error=errors, band=True) if any(errors) else series,)


def _batch(measured: Sequence[Measured]) -> Series:
    return _steps("batch size", measured, lambda m: float(m.batch_size), 0)


def _measured_line(name: str, points: Sequence[tuple[Measured, float]], color: str) -> Series:
    return Series(
        name,
        tuple(m.seconds for m, _ in points),
        tuple(value for _, value in points),
        color,
        marker=_marker(len(points)),
        line="solid",
        labels=tuple(_signal_label(m) for m, _ in points),
    )


def _steps(name: str, measured: Sequence[Measured], value: Callable[[Measured], float], color: int) -> Series:
    """A stair: each value holds until the next one."""
    x, y = tuple(m.seconds for m in measured), tuple(value(m) for m in measured)
    return Series(name, x, y, palette.SEQUENCE[color], marker=_marker(len(x)), line="steps")


def _marks(decided: Sequence[Decided]) -> tuple[Mark, ...]:
    shown = decided[-MOST_MARKS:]
    return tuple(
        Mark(
            each.cause.seconds,
            _first_change(each) if len(shown) <= MOST_LABELS else "",
            decided_line(each),
            strange=each.outcome != "applied",
        )
        for each in shown
    )


def _first_change(decided: Decided) -> str:
    """``batch 32→64``: the label of a vertical line; hovering and the table show the rest."""
    first = change_text(decided).partition(", ")[0].partition(" over ")[0]
    return plain(first.replace(" -> ", "→"), MOST_LETTERS)


def _marker(points: int) -> Marker | None:
    """No markers on a line, unless it has one point only."""
    return None if points > 1 else "circle"


def _signal(measured: Measured, name: str) -> tuple[float | None, float | None]:
    """A signal's value and error, each None if it is missing or not finite."""
    value, error = measured.signals.get(name, (math.nan, None))
    finite_error = error if error is not None and math.isfinite(error) else None
    return (value, finite_error) if math.isfinite(value) else (None, None)


def _signal_label(m: Measured) -> str:
    text = measured_text(m).replace(", ", "; ")
    return f"step {m.step}, {number(m.seconds, 4)} s; {text}"
