"""Progress of a run or a study: live on a terminal, an occasional plain line elsewhere. Always on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastune.core.formatting import count, duration, plain, printable, settings_text
from elastune.core.journal import logs
from elastune.core.journal.files import read
from elastune.core.journal.folds import fold
from elastune.core.journal.records import (
    Adopted,
    ChangesAccepted,
    Checkpointed,
    CheckpointFailed,
    ConnectionsRefused,
    Decided,
    Entry,
    FaultInjected,
    FrontierFound,
    LearnerLeftOut,
    Measured,
    MembershipEvent,
    NotMeasured,
    PhasesPlanned,
    PolicyFailed,
    Record,
    Regrouped,
    Reported,
    Restarted,
    RoundsShortened,
    RunFinished,
    RunStarted,
    StagesDivided,
    StartedFrom,
    StepsPlanned,
    StragglerDetected,
    StreamPriced,
    StudyFinished,
    StudyStarted,
    SyncChanged,
    SyncChangesUnreached,
    TimesFitted,
    TopologyChanged,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialStarted,
    VerificationEnded,
    WarmStarted,
    WorkerGone,
    WorkerWrong,
)
from elastune.core.slots import slot_cost_text
from elastune.elastic.wire.server import refusal_line
from elastune.report.lines import (
    cut_line,
    decided_line,
    failed_line,
    left_out_line,
    measured_text,
    restart_line,
    since_line,
    stages_line,
    start_line,
    unmeasured_line,
    unreached_line,
    verification_line,
    what_text,
)
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.run import Observe
from elastune.tuning.search.objective import valued

PLAIN_EVERY_S = 5.0
REFRESHES_PER_S = 4
ASKED = ("requested", "notice")  # endings of a run that a person or a notice has stopped


class Tracker(Protocol):
    """The progress of one kind of work, as lines and as a part; ``elapsed_s`` is the time since this command began."""

    def observe(self, record: Record) -> tuple[str, bool]:
        """Return a line about ``record`` ("" for none), and whether it must be shown."""
        ...

    def state(self) -> str:
        """Return the current state in a few words."""
        ...

    def done(self, elapsed_s: float) -> float | None:
        """Return the part that is done, from 0 to 1; None if it cannot be known."""
        ...


class RunTracker:
    """One run of ``epochs`` epochs, or of ``max_steps`` steps; ``first``: the lines to begin with, once it trains."""

    def __init__(self, epochs: int | None, max_steps: int | None, first: Sequence[str] = ()) -> None:
        self.epochs = epochs
        self._max_steps = max_steps
        self._first = [line for line in first if line]  # shown once it trains: a refused run prints one line alone
        self._slots = self._workers = 0
        self._view = -1  # the newest view, and how many workers have begun in it
        self._last = ""
        self._measured = ""
        self._over = self._room_low = False
        self._parts: dict[str, float] = {}  # done, by what bounds the run

    def observe(self, record: Record) -> tuple[str, bool]:
        match record:
            case RunStarted(resumed_step=step) if step is not None:
                instead = f", since a newer checkpoint is damaged: {plain('; '.join(record.damaged), 400)}"
                return f"resumed after step {step}{instead if record.damaged else ''}", True
            case StartedFrom():
                return start_line(record), True
            case ChangesAccepted():
                return f"goes on with accepted changes: {what_text(record)}", True
            case Adopted():
                on = count(len(record.workers), "worker")
                return f"took over {on}, which had lost their controller, after {duration(record.seconds)}", True
            case RunStarted(execution={"mode": "exact", "num_slots": int(slots), "workers": int(workers)}):
                self._slots, self._workers = slots, workers
            case MembershipEvent(event={"event": "running", "version": int(view)}):
                self._workers = self._workers + 1 if view == self._view else 1
                self._view = view
            case StepsPlanned():
                if line := self._opening():
                    return line, True
            case Reported():
                if self.epochs:
                    self._parts["epochs"] = record.epoch / self.epochs
                self._count(record.step)
                of = f"/{self.epochs}" if self.epochs else ""
                self._last = f"epoch {record.epoch}{of}, step {record.step}: {_metrics(record.metrics)}"
                if line := self._opening():
                    return line, True
                return self.state(), False
            case Measured():
                self._measured = f"step {record.step}: {measured_text(record)}"
                self._count(record.step)
                return self.state(), False
            case Decided():
                return decided_line(record), True
            case PolicyFailed():
                return failed_line(record), True
            case NotMeasured():
                return unmeasured_line(record), True
            case WorkerGone(how="lost"):
                return f"worker {record.worker} is lost: {plain(record.why)}", True
            case WorkerGone():
                return f"worker {record.worker} has left", True
            case Regrouped():
                on = count(len(record.members), "worker")
                return f"on {on} from step {record.step} on, after {duration(record.pause_s)}", True
            case Restarted():
                return restart_line(record), True
            case StragglerDetected() | StreamPriced():
                return plain(record.line, 400), True
            case LearnerLeftOut():
                return left_out_line(record), True
            case SyncChanged() | TopologyChanged():
                return since_line(record), True
            case RoundsShortened():
                return cut_line(record), True
            case SyncChangesUnreached():
                return unreached_line(record), True
            case StagesDivided():
                return stages_line(record), True
            case CheckpointFailed():
                newest = "" if record.newest is None else f" (the newest is of step {record.newest})"
                why = plain(record.why, 300)
                return f"no checkpoint after step {record.step}, older ones stay{newest}: {why}", True
            case Checkpointed(low=low) if low and not self._room_low:
                self._room_low = True
                return f"after the checkpoint of step {record.step} the disk has {plain(low, 300)}", True
            case ConnectionsRefused():
                return plain(refusal_line(record), 400), True
            case WorkerWrong() | VerificationEnded():
                return verification_line(record), True
            case FaultInjected():
                at = "" if record.worker is None else f" of worker {record.worker}"
                return f"chaos: {plain(record.fault)}{at}", True
            case RunFinished(stopped=stopped):
                self._over = True
                # What was asked to stop is not done, and the command's last line says so.
                return ("", False) if stopped in ASKED else (f"done: {_metrics(record.metrics)}", True)
        return "", False

    def _opening(self) -> str:
        """The next line that the run begins with; "" once all were returned."""
        if self._first:
            return self._first.pop(0)
        text = slot_cost_text(self._slots, self._workers) if self._slots and self._workers else ""
        self._slots = 0
        return text

    def state(self) -> str:
        return "; ".join(filter(None, (self._last, self._measured))) or "starting"

    def done(self, elapsed_s: float) -> float | None:
        if self._over:
            return 1.0
        return min(1.0, max(self._parts.values())) if self._parts else None

    def _count(self, step: int) -> None:
        if self._max_steps:
            self._parts["steps"] = step / self._max_steps


class StudyTracker:
    """A study or frontier bounded by ``trials``, by ``budget_s``, or by both; ``before``: what it did so far."""

    def __init__(self, trials: int | None, budget_s: float | None, before: Iterable[Entry] = ()) -> None:
        self._trials = trials
        self._budget_s = budget_s
        self._table = fold(before)
        self._phase = "starting"
        self._over = False
        self._halves = False

    def observe(self, record: Record) -> tuple[str, bool]:
        self._table.observe(Entry(time.time(), record))
        match record:
            case StudyStarted():
                from elastune.tuning.search.registry import halves

                self._halves = halves(str(record.settings.get("stopping", "none")))
                return ("resumed", True) if record.resumed else ("", False)
            case WarmStarted():
                return warm_line(record), True
            case ChangesAccepted():
                apart = f"; front and pick are of trials from {record.first_trial} on"
                return f"goes on with accepted changes: {what_text(record)}{apart}", True
            case TrialStarted():
                changed, self._phase = self._phase != record.phase, record.phase
                return (f"phase: {record.phase}", True) if changed else ("", False)
            case TrialAdopted():
                on = count(len(record.adopted.workers), "worker")
                return f"trial {record.trial} goes on: took over {on}, which had lost their controller", True
            case TrialPaused():
                why = plain(record.reason) or "no reason given"
                return f"trial {record.trial} paused after epoch {record.epoch}: {why}", False
            case TrialReallocated():
                why = f" ({plain(record.reason)})" if record.reason else ""
                return f"trial {record.trial}: {record.before} -> {count(record.after, 'worker')}{why}", False
            case TrialFinished():
                return self._ended(record), False
            case PhasesPlanned():
                self._budget_s = record.budget_s
                return ("", False) if record.took else (planned_line(record), True)
            case TimesFitted():
                return f"a step takes {duration(record.base_s)} + {duration(record.per_sample_s)} a sample", True
            case FrontierFound() | StudyFinished(reason="interrupted"):
                return "", False
            case StudyFinished():
                self._over = True
                over = count(len(self._table.ended), "trial")
                return f"ended ({plain(record.reason)}): {over} over{self._paused()}", True
        return "", False

    def _ended(self, record: TrialFinished) -> str:
        life = self._table.trials.get(record.trial)
        what = f" ({settings_text(life.started.config)})" if life is not None and life.started.config else ""
        result = _metrics(record.values or record.metrics) if record.state == "complete" else plain(record.reason)
        return f"trial {record.trial} {record.state}: {result}{what}"

    def _paused(self) -> str:
        paused = len(self._table.of("paused"))
        return f", {paused} paused" if paused else ""

    def state(self) -> str:
        ended, running = count(len(self._table.ended), "trial"), len(self._table.of("running"))
        return f"{self._phase}, {ended} ended, {running} running{self._paused()}"

    def done(self, elapsed_s: float) -> float | None:
        if self._over:
            return 1.0
        parts = [elapsed_s / self._budget_s] if self._budget_s else []
        paused = len(self._table.of("paused")) if self._halves else 0  # most of which will not go on
        parts += [(len(self._table.ended) + paused) / self._trials] if self._trials else []
        return min(1.0, max(parts)) if parts else None


def planned_line(record: PhasesPlanned) -> str:
    """How a frontier's budget is split, and what is left out."""
    shares = ", ".join(f"{name} {duration(seconds)}" for name, seconds in record.planned.items() if seconds > 0)
    left_out = "".join(f"; left out: {plain(words, 300)}" for words in record.left_out)
    return f"a budget of {duration(record.budget_s)}: {shares}; {count(record.seeds, 'seed')} a row{left_out}"


def warm_line(record: WarmStarted) -> str:
    """A line about the trials taken from an earlier study, and the reasons why others were not."""
    why = "; ".join(f"{n}: {plain(reason)}" for reason, n in record.left_out.items())
    taken = f"{record.taken} of {count(record.of, 'trial')} taken" + (f" ({why})" if why else "")
    use = f"{len(record.results)} count as results, {len(record.proposed)} are tried first"
    other = f" ({plain('; '.join(record.differs), 300)})" if record.differs else ""
    return f"warm start from {plain(record.source)}: {taken}; context {record.similarity:.2g} alike{other}: {use}"


def earlier_entries(out: Path, resume: bool) -> list[Entry]:
    """The journal entries of a study that is to be resumed; none if it begins anew."""
    path = out / JOURNAL
    return read(path) if resume and path.exists() else []


@dataclass(frozen=True)
class PaceStart:
    """When work began: ``done`` of it was done after ``elapsed_s`` of the command."""

    elapsed_s: float = 0.0
    done: float = 0.0


def eta_s(done: float | None, elapsed_s: float, since: PaceStart = PaceStart()) -> float | None:
    """Seconds still to go at the pace since work began. The time before, such as a wait for hosts, is not counted."""
    if done is None or done <= since.done:
        return None
    return (elapsed_s - since.elapsed_s) * (1 - done) / (done - since.done)


class Progress:
    """A context that shows the progress of a run or study: ``tracker`` turns the observed records into lines."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._began = time.monotonic()
        self._shown_s = -PLAIN_EVERY_S
        self._pace: PaceStart | None = None
        self._goes_on = False  # work was done before this command began
        self._console = Console(stderr=True)
        self._live: Live | None = None
        if self._console.is_terminal and not logs.active():  # log lines would tear the bar apart
            self._live = Live(
                get_renderable=self._view,
                console=self._console,
                refresh_per_second=REFRESHES_PER_S,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def observe(self, record: Record) -> None:
        """Show ``record``: on a terminal at once, elsewhere at most every ``PLAIN_EVERY_S`` unless it must be shown."""
        line, must = self._tracker.observe(record)
        self._begin_pace(record)
        if not line:
            return
        line = printable(line)
        if self._live is not None:
            if must:
                self._console.print(Text(line, style="dim"))
            return
        elapsed_s = self._elapsed_s()
        if must or elapsed_s - self._shown_s >= PLAIN_EVERY_S:
            self._shown_s = self._shown_s if must else elapsed_s
            sys.stderr.write(f"[{elapsed_s:7.1f} s] {line}{self._remaining(elapsed_s)}\n")
            sys.stderr.flush()

    def say(self, line: str) -> None:
        """Show ``line``, from any thread, at any time: a logger has failed, for example."""
        self._console.print(Text(f"elastune: {printable(line)}"), soft_wrap=True)

    def _begin_pace(self, record: Record) -> None:
        """Note the start of the pace: training begins or, of work that goes on, its state becomes known."""
        self._goes_on |= isinstance(record, Adopted | TrialAdopted)
        self._goes_on |= isinstance(record, RunStarted) and record.resumed_step is not None
        self._goes_on |= isinstance(record, StudyStarted) and record.resumed
        if self._pace is not None:
            return
        elapsed_s = self._elapsed_s()
        done = self._tracker.done(elapsed_s)
        if self._goes_on and done is not None:
            self._pace = PaceStart(elapsed_s, done)
        elif not self._goes_on and isinstance(record, StepsPlanned | TrialStarted):
            self._pace = PaceStart(elapsed_s, done or 0.0)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _remaining(self, elapsed_s: float) -> str:
        left_s = eta_s(self._tracker.done(elapsed_s), elapsed_s, self._pace or PaceStart())
        return f", {duration(left_s)} to go" if left_s else ""

    def _view(self) -> Table:
        elapsed_s = self._elapsed_s()
        done = self._tracker.done(elapsed_s)
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=1.0, completed=done or 0.0, pulse=done is None, width=24)
        state = Text(printable(self._tracker.state()))
        row.add_row(bar, Text(f"{duration(elapsed_s)}{self._remaining(elapsed_s)}"), state)
        return row

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()


CELL_EVERY_S = 0.5
MOST_CELL_LINES = 8


class CellProgress:
    """A context that shows progress below a notebook's cell: a few lines, replaced at most twice a second."""

    def __init__(self, tracker: Tracker, show: Callable[[str], None]) -> None:
        self._tracker, self._show = tracker, show
        self._lines: list[str] = []
        self._began = time.monotonic()
        self._shown_s = -math.inf

    def observe(self, record: Record) -> None:
        """Note ``record``, and show it if it is time."""
        line, must = self._tracker.observe(record)
        if line and must:
            self._lines = [*self._lines, printable(line)][-MOST_CELL_LINES:]
        elapsed_s = time.monotonic() - self._began
        if elapsed_s - self._shown_s >= CELL_EVERY_S:
            self._shown_s = elapsed_s
            self.show()

    def show(self) -> None:
        """Show the last lines and the state."""
        elapsed_s = time.monotonic() - self._began
        done = self._tracker.done(elapsed_s)
        part = "" if done is None else f"{done:4.0%} "
        self._show("\n".join([*self._lines, f"{part}[{duration(elapsed_s)}] {printable(self._tracker.state())}"]))


@contextmanager
def below_cell(kind: str, *bounds: Any) -> Iterator[Observe]:
    """Show progress below the cell that runs, and leave its last state there; ``bounds``: as the trackers take them."""
    from IPython.display import display

    handle: Any = display({"text/plain": ""}, raw=True, display_id=True)
    tracker: Tracker = RunTracker(*bounds) if kind == "run" else StudyTracker(*bounds)
    progress = CellProgress(tracker, lambda text: handle.update({"text/plain": text}, raw=True))
    try:
        yield progress.observe
    finally:
        progress.show()


def _metrics(metrics: dict[str, float]) -> str:
    return ", ".join(f"{plain(name, 40)} {valued(name, value)}" for name, value in metrics.items()) or "no metrics"
