"""A recorded offer of machines, replayed on local workers: kill -9 for each that goes, room for each that comes.

Four workers stand for the most machines of the trace. Time is compressed; what changes cost is not, so pauses are told
in seconds, goodput as that of so many times the trace's pace, and the trace's own goodput is reckoned elsewhere.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.elastic_runs import Ran, Runs

from elastune.core.journal.records import Record, RunFinished
from elastune.core.plan.prices import Availability
from elastune.core.run import Elastic, Program
from elastune.runtime.clusters.elastic_cluster import ElasticCluster
from elastune.runtime.clusters.fork import ForkLauncher
from elastune.runtime.clusters.local import WARM
from elastune.runtime.elastic_run import ElasticRun

WORKERS = 4
PROGRAM = Program(Path(__file__).parents[1] / "programs" / "paced_train.py")
SAMPLE_S = 0.002  # declared, of one worker
SAMPLES = 1000  # of an epoch of digits


class OfferLauncher(ForkLauncher):
    """Room for as many of ``WORKERS`` processes as are on ``offer`` now."""

    def __init__(self) -> None:
        super().__init__(WORKERS, preload=WARM)
        self.offer = WORKERS

    @property
    def capacity(self) -> int:
        return self.offer

    @property
    def free(self) -> int:
        return max(0, super().free - (WORKERS - self.offer))


@dataclass(frozen=True)
class Live:
    """What changes cost, in seconds: medians; all that was seen in ``data``, and what was ``wrong``."""

    join_s: float
    loss_s: float
    start_s: float
    data: dict[str, Any] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()


class Replayer:
    """Does to a run what the trace says. ``pace``: seconds of the trace in a second."""

    def __init__(self, offer: Availability, pace: float, launcher: OfferLauncher) -> None:
        self._offer, self._pace, self._launcher = offer, pace, launcher
        self._most = max(n for _, n in offer.steps)
        self._dice = random.Random(1)
        self._begun = self._asked = self._seen = 0.0
        self.killed: set[int] = set()
        self.joins_s: list[float] = []
        self.offered_worker_s = self.member_worker_s = 0.0

    def act(self, handle: ElasticRun, records: list[Record]) -> None:
        """Called again and again."""
        now, living = time.monotonic(), list(handle.members)
        if not self._begun:
            if living:
                self._begun = self._seen = now
                handle.resize(WORKERS, "as many as there is room for")
            return
        self.offered_worker_s += self._launcher.offer * (now - self._seen)
        self.member_worker_s += min(len(living), self._launcher.offer) * (now - self._seen)
        self._seen = now
        offered = self._offer.at(min((now - self._begun) * self._pace, self._offer.end_s))
        room = max(1, round(offered * WORKERS / self._most))
        if self._asked and len(living) >= self._launcher.offer:
            self.joins_s.append(now - self._asked)
            self._asked = 0.0
        if room < self._launcher.offer:
            self._asked = 0.0
        elif room > self._launcher.offer:
            self._asked = now
        self._launcher.offer = room
        ordered = sorted(handle.pids.keys() - self.killed)  # the end of one that was killed is heard later
        for worker in self._dice.sample(ordered, max(0, len(ordered) - room)):
            handle.kill_worker(worker)
            self.killed.add(worker)


def live(offer: Availability, seconds: float) -> Live:
    """Train while ``offer`` is replayed in about so many ``seconds``, and hold the result against one worker's."""
    pace = offer.end_s / seconds
    capacity = offer.worker_seconds(offer.end_s) / max(n for _, n in offer.steps) * WORKERS / pace
    epochs = max(1, round(capacity * 0.75 / SAMPLE_S / SAMPLES))
    launcher = OfferLauncher()
    replayer = Replayer(offer, pace, launcher)
    with tempfile.TemporaryDirectory() as folder, ElasticCluster(launcher) as cluster:
        runs = Runs(cluster, Path(folder), PROGRAM)
        elastic = Elastic(low=1, high=WORKERS, most_losses=1000)
        ran = runs(
            WORKERS, act=replayer.act, elastic=elastic, limit_s=10 * seconds + 120, epochs=epochs, sample_s=SAMPLE_S
        )
        launcher.offer = WORKERS
        alone = runs(1, elastic=Elastic(low=1, high=1), limit_s=10 * seconds + 120, epochs=epochs, sample_s=0.0)
    return _told(ran, alone, replayer, pace)


def _told(ran: Ran, alone: Ran, replayer: Replayer, pace: float) -> Live:
    assert isinstance(alone.outcome, RunFinished), alone.outcome
    wrong = []
    if not isinstance(ran.outcome, RunFinished):
        wrong.append(f"it failed: {ran.outcome}")
    elif ran.sha256 != alone.sha256:
        wrong.append(f"another state: {ran.sha256}, not {alone.sha256}")
    if not ran.ledger.exact:
        wrong.append(f"the ledger: {ran.ledger}")
    planned, forced = (
        [view.pause_s for view in ran.regrouped if view.planned is is_planned] for is_planned in (True, False)
    )
    stood_s = sum(view.pause_s * len(view.members) for view in ran.regrouped)
    offered_s = replayer.offered_worker_s
    data = {
        "seconds_of_trace_in_one": round(pace, 1),
        "offered_worker_s": round(offered_s, 1),
        "goodput_at_that_pace": round((replayer.member_worker_s - stood_s) / offered_s, 4) if offered_s else None,
        "kills": len(replayer.killed),
        "views": len(ran.regrouped),
        "steps": ran.ledger.steps,
        "steps_discarded": sum(view.discarded for view in ran.regrouped),
        "pause_of_a_join_s": _spread(planned),
        "pause_of_a_loss_s": _spread(forced),
        "from_room_to_training_s": _spread(replayer.joins_s),
        "sha256": alone.sha256,
        "equal": not wrong,
        "ledger_exact": ran.ledger.exact,
        "wrong": wrong,
    }
    join_s, loss_s, start_s = (statistics.median(each or [0.0]) for each in (planned, forced, replayer.joins_s))
    return Live(join_s, loss_s, start_s, data, tuple(wrong))


def _spread(values: list[float]) -> dict[str, float | int] | None:
    if not values:
        return None
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    results = {"median": middle, "lower_quartile": low, "upper_quartile": high, "most": max(values)}
    return {**{name: round(value, 4) for name, value in results.items()}, "count": len(values)}
