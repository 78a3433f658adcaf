"""How a run's workers agreed and by which routes their sums travelled, from when to when: gathered from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from elastune.core.sync_plan import SyncPlan
from elastune.core.text import count, duration, plain, whole
from elastune.core.topology import Topology
from elastune.journal.entry import Entry
from elastune.journal.link_records import BY_CHECKPOINT
from elastune.journal.records import (
    Measured,
    Reported,
    Restarted,
    RunFinished,
    RunStarted,
    SyncChanged,
    TopologyLaid,
)
from elastune.report.tables.tables import Table

AT_FIRST = "asked for at the start"
DEFAULT = "the default"
PLAIN = {"strategy": str(SyncPlan()), "topology": str(Topology())}  # what a run has that asks for nothing

UNROUTED = ("native", "auto")  # auto: as long as no links have called for routes


@dataclass(frozen=True)
class Since:
    """From ``step`` steps and ``seconds`` of training on, ``what`` is the run's strategy or topology."""

    which: Literal["strategy", "topology"]
    what: str
    step: int
    seconds: float
    why: str
    record: SyncChanged | TopologyLaid | None = None


@dataclass(frozen=True)
class SyncStory:
    """Strategies and topologies in order; none of a topology's where the sums of all went as the run decides itself.

    ``seconds``: of training, as told last.
    """

    strategies: tuple[Since, ...] = ()
    topologies: tuple[Since, ...] = ()
    seconds: float = 0.0

    @property
    def any(self) -> bool:
        """Whether there is anything to tell: a strategy beside all-reduce, or a topology that was laid."""
        return any(each.what != PLAIN[each.which] for each in self.all)

    @property
    def all(self) -> tuple[Since, ...]:
        """Both, in order of steps."""
        return tuple(sorted((*self.strategies, *self.topologies), key=lambda each: each.step))

    @property
    def changes(self) -> tuple[Since, ...]:
        """What took another's place while the run went on."""
        return tuple(each for each in self.all if each.record is not None and each.step > 0)


def gather_sync(entries: Iterable[Entry]) -> SyncStory:
    """What the journal of a run tells. What lay beyond the step that a run went on from is taken back."""
    strategies: list[Since] = []
    topologies: list[Since] = []
    clock: list[tuple[int, float]] = []  # steps and seconds, as told

    def go_back(step: int) -> None:
        for told in (strategies, topologies):
            told[:] = [each for each in told if each.step <= step]
        clock[:] = [each for each in clock if each[0] <= step]

    for record in (entry.record for entry in entries):
        match record:
            case RunStarted(resumed_step=step, sync=sync, means=means):
                go_back(-1 if step is None else step)
                begun, seconds = step or 0, max((told for _, told in clock), default=0.0)
                if not strategies:  # else it goes on with what the checkpoint has
                    strategies.append(_first("strategy", sync, begun, seconds))
                asked = str(means.get("topology", PLAIN["topology"]))
                _add(topologies, _first("topology", asked, begun, seconds))
            case Restarted(step=step):
                go_back(step)
            case SyncChanged(step=step, sync=sync, why=why, seconds=seconds):
                _add(strategies, Since("strategy", sync, step, seconds, why, record))
            case TopologyLaid(step=step, topology=topology, cause=why, seconds=seconds):
                if why == BY_CHECKPOINT and topologies and topologies[-1].record is None:
                    topologies.pop()  # what that resumed run would have begun with, but for its checkpoint
                _add(topologies, Since("topology", topology, step, seconds, why, record))
            case Measured(step=step, seconds=seconds) | Reported(step=step, seconds=seconds):
                clock.append((step, seconds))
            case RunFinished(steps=step, seconds=seconds):
                clock.append((step, seconds))
            case _:
                pass
    told = [*(seconds for _, seconds in clock), *(each.seconds for each in (*strategies, *topologies))]
    laid = topologies if any(each.what not in UNROUTED for each in topologies) else []
    return SyncStory(tuple(strategies), tuple(laid), max(told, default=0.0))


def _first(which: Literal["strategy", "topology"], what: str, step: int, seconds: float) -> Since:
    """What a run begins with, by its options or by what is so without any."""
    return Since(which, what, step, seconds, DEFAULT if what == PLAIN[which] else AT_FIRST)


def _add(told: list[Since], each: Since) -> None:
    """What is in use already does not begin again."""
    if not told or told[-1].what != each.what:
        told.append(each)


def sync_line(story: SyncStory) -> str:
    """``local:learners=8,every=16 -> allreduce (2 changes), sums by tree``; empty where there is nothing to tell."""
    if not story.any:
        return ""
    strategies = [plain(each.what, 80) for each in story.strategies]
    shown = [*strategies[:1], *(["..."] if len(strategies) > 3 else []), *strategies[1:][-2:]]
    told = " -> ".join(shown) + (f" ({count(len(strategies) - 1, 'change')})" if strategies[1:] else "")
    laid = list(dict.fromkeys(plain(each.what, 60) for each in story.topologies))
    return f"{told}, sums by {', then '.join(laid[:3])}{', ...' if laid[3:] else ''}" if laid else told


def sync_table(story: SyncStory) -> Table:
    """One line a strategy and a topology, with how long it was in use; no rows where there is nothing to tell."""
    both = [*spans(story.strategies, story.seconds), *spans(story.topologies, story.seconds)] if story.any else []
    rows = tuple(
        (whole(each.step), each.which, plain(each.what, 120), duration(end - begin), plain(each.why, 300))
        for each, begin, end in sorted(both, key=lambda span: span[0].step)
    )
    return Table("How workers agreed", ("from step", "which", "what", "for", "why"), rows, frozenset({0, 3}))


def spans(told: Sequence[Since], seconds: float) -> list[tuple[Since, float, float]]:
    """Each with the seconds from which and until which it was in use; ``seconds``: the run's."""
    ends = [each.seconds for each in told] + [seconds]
    return [(each, each.seconds, max(each.seconds, end)) for each, end in zip(told, ends[1:], strict=True)]
