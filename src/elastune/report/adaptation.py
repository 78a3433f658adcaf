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
from elastune.tune.study.trials import Trial

# [adapting] How a run adapted itself: what its monitors measured and what its policies decided, gathered from its journal.


@dataclass(frozen=True)
class Adaptation:
    """Of the run's last attempt and what it went on from: the policies and monitors asked for, and all they told."""

    policies: tuple[str, ...] = ()
    monitors: tuple[str, ...] = ()
    measured: tuple[Measured, ...] = ()
    decided: tuple[Decided, ...] = ()
    failed: tuple[PolicyFailed, ...] = ()
    unmeasured: tuple[NotMeasured, ...] = ()
    last_signals: Mapping[str, SignalValue] | None = None

    @property
    def any(self) -> bool:
        """Whether it was to adapt or to measure, or something was decided; learners are measured in any run."""
        return bool(self.policies or self.monitors or self.decided or self.failed or self.unmeasured)

    @property
    def outcomes(self) -> Counter[str]:
        """How many decisions were applied, disagreed on, refused."""
        return Counter(each.outcome for each in self.decided)

    def signal(self, name: str) -> SignalValue | None:
        """The last that was said of signal ``name``."""
        told = [self.last_signals or {}, *(m.signals for m in reversed(self.measured))]
        return next((signals[name] for signals in told if name in signals), None)


def gather_adaptation(entries: Iterable[Entry]) -> Adaptation:
    """What the journal of a run tells. What lay beyond the step that a run went on from is taken back."""
    policies: list[str] = []
    monitors: list[str] = []
    told: list[Measured | Decided | PolicyFailed] = []
    unmeasured: list[NotMeasured] = []
    last_signals: Mapping[str, SignalValue] | None = None
    for record in (entry.record for entry in entries):
        match record:
            case RunStarted(adapt=adapt, resumed_step=step):
                policies, monitors = adapt.get("policies", []), adapt.get("monitors", [])
                told = [each for each in told if step is not None and each.step <= step]
                last_signals, unmeasured = None, []
            case Restarted(step=step):
                told = [each for each in told if each.step <= step]
            case Measured() | Decided() | PolicyFailed():
                told.append(record)
            case NotMeasured():
                unmeasured.append(record)
            case RunFinished(signals=signals):
                last_signals = signals
            case _:
                pass
    return Adaptation(
        policies=tuple(policies),
        monitors=tuple(monitors),
        measured=tuple(each for each in told if isinstance(each, Measured)),
        decided=tuple(each for each in told if isinstance(each, Decided)),
        failed=tuple(each for each in told if isinstance(each, PolicyFailed)),
        unmeasured=tuple(unmeasured),
        last_signals=last_signals,
    )


def adaptation_json(adaptation: Adaptation) -> dict[str, Any]:
    """The object ``adapt`` of a run's result; {} where nothing was asked for and nothing decided."""
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
        parts += [signal_text(name, told) for name in (NOISE_SCALE,) if (told := adaptation.signal(name))]
        parts += [f"batch {last.batch_size}", f"lr {number(last.lr, 3)}"]
    return ", ".join(parts)


def batch_line(adaptation: Adaptation) -> str:
    """The run's last batch beside its noise scale, in a sentence; empty where none was measured."""
    told = adaptation.signal(NOISE_SCALE)
    if told is None or not adaptation.measured:
        return ""
    ended = NOISE_SCALE in (adaptation.last_signals or {})
    when = "at the end of training" if ended else "when last measured"
    words = batch_against_noise(adaptation.measured[-1].batch_size, *told, whose="the run's", when=when)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def trial_batch_line(trial: Trial) -> str:
    """The batch of a trial of a study beside its noise scale, in a sentence; empty where one of them is not known."""
    if trial.noise_scale is None or trial.batch_size is None:
        return ""
    tried = "; what it reaches was trained and measured, which outweighs this estimate"
    whose = f"trial {trial.number}'s"
    words = batch_against_noise(trial.batch_size, *trial.noise_scale, whose=whose, outweighed=tried)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def decisions_table(adaptation: Adaptation) -> Table:
    """One line a decision: when, whose, what, why, and what became of it."""
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
    """One line a call of a policy that raised."""
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


# [sync story] How a run's workers agreed and by which routes their sums travelled, from when to when: gathered from its journal.

AT_FIRST = "asked for at the start"
DEFAULT = "the default"
PLAIN = {"strategy": str(SyncPlan()), "topology": str(Topology())}  # what a run has that asks for nothing
UNROUTED = ("native", "auto")  # auto: as long as no links have called for routes


@dataclass(frozen=True)
class SyncPeriod:
    """From ``step`` steps and ``seconds`` of training on, ``what`` is the run's strategy or topology."""

    which: Literal["strategy", "topology"]
    what: str
    step: int
    seconds: float
    why: str
    record: SyncChanged | TopologyChanged | None = None


@dataclass(frozen=True)
class SyncHistory:
    """Strategies and topologies in order; none of a topology's where the sums of all went as the run decides itself.

    ``seconds``: of training, as told last.
    """

    strategies: tuple[SyncPeriod, ...] = ()
    topologies: tuple[SyncPeriod, ...] = ()
    seconds: float = 0.0

    @property
    def any(self) -> bool:
        """Whether there is anything to tell: a strategy beside all-reduce, or a topology that was laid."""
        return any(each.what != PLAIN[each.which] for each in self.all)

    @property
    def all(self) -> tuple[SyncPeriod, ...]:
        """Both, in order of steps."""
        return tuple(sorted((*self.strategies, *self.topologies), key=lambda each: each.step))

    @property
    def changes(self) -> tuple[SyncPeriod, ...]:
        """What took another's place while the run went on."""
        return tuple(each for each in self.all if each.record is not None and each.step > 0)


def gather_sync(entries: Iterable[Entry]) -> SyncHistory:
    """What the journal of a run tells. What lay beyond the step that a run went on from is taken back."""
    strategies: list[SyncPeriod] = []
    topologies: list[SyncPeriod] = []
    clock: list[tuple[int, float]] = []  # steps and seconds, as told

    def go_back(step: int) -> None:
        for told in (strategies, topologies):
            told[:] = [each for each in told if each.step <= step]
        clock[:] = [each for each in clock if each[0] <= step]

    for record in (entry.record for entry in entries):
        match record:
            case RunStarted(resumed_step=step, sync=sync, execution=execution):
                go_back(-1 if step is None else step)
                begun, seconds = step or 0, max((told for _, told in clock), default=0.0)
                if not strategies:  # else it goes on with what the checkpoint has
                    strategies.append(_first("strategy", sync, begun, seconds))
                asked = str(execution.get("topology", PLAIN["topology"]))
                _add(topologies, _first("topology", asked, begun, seconds))
            case Restarted(step=step):
                go_back(step)
            case SyncChanged(step=step, sync=sync, why=why, seconds=seconds):
                _add(strategies, SyncPeriod("strategy", sync, step, seconds, why, record))
            case TopologyChanged(step=step, topology=topology, cause=why, seconds=seconds):
                if why == BY_CHECKPOINT and topologies and topologies[-1].record is None:
                    topologies.pop()  # what that resumed run would have begun with, but for its checkpoint
                _add(topologies, SyncPeriod("topology", topology, step, seconds, why, record))
            case Measured(step=step, seconds=seconds) | Reported(step=step, seconds=seconds):
                clock.append((step, seconds))
            case RunFinished(steps=step, seconds=seconds):
                clock.append((step, seconds))
            case _:
                pass
    told = [*(seconds for _, seconds in clock), *(each.seconds for each in (*strategies, *topologies))]
    laid = topologies if any(each.what not in UNROUTED for each in topologies) else []
    return SyncHistory(tuple(strategies), tuple(laid), max(told, default=0.0))


def _first(which: Literal["strategy", "topology"], what: str, step: int, seconds: float) -> SyncPeriod:
    """What a run begins with, by its options or by what is so without any."""
    return SyncPeriod(which, what, step, seconds, DEFAULT if what == PLAIN[which] else AT_FIRST)


def _add(told: list[SyncPeriod], each: SyncPeriod) -> None:
    """What is in use already does not begin again."""
    if not told or told[-1].what != each.what:
        told.append(each)


def sync_line(story: SyncHistory) -> str:
    """``local:learners=8,every=16 -> allreduce (2 changes), sums by tree``; empty where there is nothing to tell."""
    if not story.any:
        return ""
    strategies = [plain(each.what, 80) for each in story.strategies]
    shown = [*strategies[:1], *(["..."] if len(strategies) > 3 else []), *strategies[1:][-2:]]
    told = " -> ".join(shown) + (f" ({count(len(strategies) - 1, 'change')})" if strategies[1:] else "")
    laid = list(dict.fromkeys(plain(each.what, 60) for each in story.topologies))
    return f"{told}, sums by {', then '.join(laid[:3])}{', ...' if laid[3:] else ''}" if laid else told


def sync_table(story: SyncHistory) -> Table:
    """One line a strategy and a topology, with how long it was in use; no rows where there is nothing to tell."""
    both = [*spans(story.strategies, story.seconds), *spans(story.topologies, story.seconds)] if story.any else []
    rows = tuple(
        (whole(each.step), each.which, plain(each.what, 120), duration(end - begin), plain(each.why, 300))
        for each, begin, end in sorted(both, key=lambda span: span[0].step)
    )
    return Table("How workers agreed", ("from step", "which", "what", "for", "why"), rows, frozenset({0, 3}))


def spans(told: Sequence[SyncPeriod], seconds: float) -> list[tuple[SyncPeriod, float, float]]:
    """Each with the seconds from which and until which it was in use; ``seconds``: the run's."""
    ends = [each.seconds for each in told] + [seconds]
    return [(each, each.seconds, max(each.seconds, end)) for each, end in zip(told, ends[1:], strict=True)]


# [sync bands] How a run's workers agreed, over the seconds of training: strategies and topologies as bands, distance and bytes.

THICK = 0.7
MOST_BAND_LETTERS = 70


def bands(story: SyncHistory) -> Panel:
    """A row of bands for strategies and one for topologies, a colour each; none where there is nothing to tell."""
    rows = [told for told in (story.topologies, story.strategies) if told] if story.any else []
    found: dict[tuple[str, str], Bars] = {}
    for place, told in enumerate(rows):
        for each, begin, end in spans(told, story.seconds):
            key = (each.which, each.what)
            color = palette.SEQUENCE[len(found) % len(palette.SEQUENCE)]
            own = found.setdefault(key, Bars(_name(each), color, (), (), (), (), ()))
            found[key] = replace(
                own,
                y=(*own.y, float(place)),
                begin=(*own.begin, begin),
                end=(*own.end, end),
                thickness=(*own.thickness, THICK),
                labels=(*own.labels, _band_label(each, begin, end)),
            )
    ticks, names = tuple(float(place) for place in range(len(rows))), tuple(told[0].which for told in rows)
    return Panel("", Axis(""), Axis("", ticks=ticks, names=names), (), bars=tuple(found.values()))


def distances(measured: Sequence[Measured]) -> tuple[Series, ...]:
    """How far apart learners were; a line for each time that the run had any."""
    return tuple(
        _signal_line("learners' distance", part, LEARNERS_DISTANCE, palette.PICK)
        for has, group in groupby(measured, lambda m: _known(m, LEARNERS_DISTANCE))
        if has and (part := list(group))
    )


def sent(measured: Sequence[Measured]) -> tuple[Series, ...]:
    """The bytes of a step, where there were any: a worker alone sends none."""
    told = [m for m in measured if _known(m, SENT_BYTES) and m.signals[SENT_BYTES][0] > 0]
    return (_signal_line("bytes a step", told, SENT_BYTES, palette.AFTER),) if told else ()


def _signal_line(name: str, told: Sequence[Measured], signal: str, color: str) -> Series:
    values = tuple(m.signals[signal][0] for m in told)
    shown = [byte_count(round(value)) if signal == SENT_BYTES else number(value, 3) for value in values]
    labels = tuple(
        f"step {m.step}, {number(m.seconds, 4)} s; {name} {text}" for m, text in zip(told, shown, strict=True)
    )
    marker: Marker | None = "circle" if len(told) == 1 else None
    return Series(name, tuple(m.seconds for m in told), values, color, marker=marker, line="solid", labels=labels)


def _known(measured: Measured, signal: str) -> bool:
    return math.isfinite(measured.signals.get(signal, (math.nan, None))[0])


def _name(each: SyncPeriod) -> str:
    return plain(each.what if each.which == "strategy" else f"sums by {each.what}", MOST_BAND_LETTERS)


def _band_label(each: SyncPeriod, begin: float, end: float) -> str:
    what = plain(each.what, 120).replace("; ", ", ")
    why = plain(each.why, 200).replace("; ", ", ")
    return f"{each.which} {what}; from step {each.step}, {number(begin, 4)} s, for {duration(end - begin)}; {why}"


# [adapting] The figure of a run that adapts: loss, noise scale, batch, learning rate, workers and how they agree, on one axis.

MOST_LABELS = 12  # decisions, beyond which their words would cover each other
MOST_MARKS = 80
MOST_LETTERS = 18
MOST_COUNTS = 8  # that an axis can name each of


def over_time(run: RunOverview, adaptation: Adaptation, story: SyncHistory | None = None) -> Figure | None:
    """All that was measured over the seconds of training, decisions as vertical lines, strategies and topologies as
    bands; None where nothing was measured and nothing asked for."""
    measured, story = adaptation.measured, story or SyncHistory()
    if not measured and not story.any:
        return None
    panels = [
        _panel("loss", _losses(run, measured)),
        _panel("samples", (*_noise_scale(measured), _batch(measured)), log=True),
        _panel("learning rate", (_steps("learning rate", measured, lambda m: m.lr, 3),)),
        _panel("workers", (_steps("workers", measured, lambda m: float(m.workers), 1),), ticks=_counts(measured)),
        _panel("learners' distance", distances(measured)),
        _panel("bytes a step", sent(measured), log=True),
        bands(story),
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


def _counts(measured: Sequence[Measured]) -> tuple[float, ...]:
    """The worker counts there were, if they are few: there is no half a worker."""
    counts = sorted({float(m.workers) for m in measured})
    return tuple(counts) if len(counts) <= MOST_COUNTS else ()


def _losses(run: RunOverview, measured: Sequence[Measured]) -> tuple[Series, ...]:
    """The measured training loss; where no monitor told it, what the program reported as its loss."""
    told = [(m, value) for m in measured if (value := _signal(m, LOSS)[0]) is not None]
    if told:
        return (_measured_line("loss", told, palette.INK),)
    reports = [r for r in run.reports if math.isfinite(r.metrics.get(LOSS, math.nan))]
    if not reports:
        return ()
    x, y = tuple(r.seconds for r in reports), tuple(r.metrics[LOSS] for r in reports)
    return (Series("reported loss", x, y, palette.INK, line="solid"),)


def _noise_scale(measured: Sequence[Measured]) -> tuple[Series, ...]:
    told = [(m, *_signal(m, NOISE_SCALE)) for m in measured]
    known = [(m, value, error) for m, value, error in told if value is not None and value > 0]
    if not known:
        return ()
    series = _measured_line("gradient noise scale", [(m, value) for m, value, _ in known], palette.BEST)
    errors = tuple(None if error is None else (error, error) for _, _, error in known)
    return (replace(series, error=errors, band=True) if any(errors) else series,)


def _batch(measured: Sequence[Measured]) -> Series:
    return _steps("batch size", measured, lambda m: float(m.batch_size), 0)


def _measured_line(name: str, told: Sequence[tuple[Measured, float]], color: str) -> Series:
    return Series(
        name,
        tuple(m.seconds for m, _ in told),
        tuple(value for _, value in told),
        color,
        marker=_marker(len(told)),
        line="solid",
        labels=tuple(_signal_label(m) for m, _ in told),
    )


def _steps(name: str, measured: Sequence[Measured], value: Callable[[Measured], float], color: int) -> Series:
    """What holds until it is changed: a stair."""
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
    """``batch 32→64``: what stands at the head of a line; the rest shows on hover and in the table."""
    first = change_text(decided).partition(", ")[0].partition(" over ")[0]
    return plain(first.replace(" -> ", "→"), MOST_LETTERS)


def _marker(points: int) -> Marker | None:
    """Lines stand alone, unless there is nothing to join."""
    return None if points > 1 else "circle"


def _signal(measured: Measured, name: str) -> tuple[float | None, float | None]:
    """A signal's value and error, None where it is missing or not finite."""
    value, error = measured.signals.get(name, (math.nan, None))
    known = error if error is not None and math.isfinite(error) else None
    return (value, known) if math.isfinite(value) else (None, None)


def _signal_label(m: Measured) -> str:
    told = measured_text(m).replace(", ", "; ")
    return f"step {m.step}, {number(m.seconds, 4)} s; {told}"
