"""By which routes a run's sums travel among its present workers, and what the journal records of it.

When routes or workers change, all workers compare what they know and sum a few numbers along the new routes before
the next step does. Under ``auto`` the links between hosts are measured when a view begins, and again when reductions
take longer than usual. A model fitted to the measurements proposes; a trial sum on the old and new routes decides.
All workers choose alike, because all use the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from elastune.core.communication import Topology, routes_of
from elastune.core.errors import UserError
from elastune.core.journal.execution_records import BY_CHECKPOINT
from elastune.core.journal.records import Record, TopologyChanged
from elastune.core.plan.links import HostLinks, Sums
from elastune.core.plan.links import best_topology as best
from elastune.core.run import RunSpec
from elastune.elastic.stragglers import lines_by_rank
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.comm.network_probe import probe_links, time_routes
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.comm.reducer import BUCKET_BYTES
from elastune.parallel.comm.relay import RouteMismatch, adds_up, known, unlike
from elastune.train.progress import Progress
from elastune.train.training_state import TrainingState

# [link watch] Whether reductions still take as long as they did when their topology was chosen. Pure.

STEPS = 5  # that are looked at together
FACTOR = 1.5  # by which a median has to differ
LEAST_S = 0.005  # and by so much


@dataclass
class LinkWatch:
    """Hears how long each step's reduction took; equal on all workers, since all hear the same.

    ``due``: links are to be measured anew.
    """

    due: bool = False
    _times: list[float] = field(default_factory=list)
    _usual_s: float | None = None

    def begin(self) -> None:
        """Links were measured, or something else has begun: what comes now is the usual."""
        self.due, self._times, self._usual_s = False, [], None

    def hear(self, waits_s: Sequence[float]) -> None:
        """How long each worker waited in a step: the last to come has waited for the links alone."""
        told = [wait_s for wait_s in waits_s if wait_s > 0]
        if not told:
            return
        self._times = [*self._times, min(told)][-STEPS:]
        if len(self._times) < STEPS:
            return
        now_s = median(self._times)
        if self._usual_s is None:
            self._usual_s, self._times = now_s, []
            return
        low, high = sorted((now_s, self._usual_s))
        self.due = self.due or (high > FACTOR * low and high > low + LEAST_S)


# [routing] By which routes a run's sums travel among the workers that it has just now, and what the journal is told of it.
#
# Where routes or the workers on them change, all workers compare what they know of them, and sum a few numbers along
# them, before the next step does. Under ``auto`` the links between hosts are measured when a view begins, and again when
# reductions take otherwise than they did; a model fitted to that (``plan.route_times``) proposes, and a sum on these
# routes and on those in use decides. All workers choose alike, from what all have heard.

NATIVE = Topology("native")
ITEM_BYTES = 4
SETTLING = "how sums travel"
WRONG_SUM = "has another sum than the numbers of all have"
MEASURES, CHECKS, TRIES = 0.0, 1.0, 2.0
"""What a worker does in the one kind of gather that there is here: after a loss another may do another thing."""
LONGEST_S = 0.3  # of one sum that is tried, by the model: all wait meanwhile
SHORTER = 0.95  # routes are used that have been seen to take no more than so much of what those in use take


class Routing:
    """Lays routes, alike on every worker: what the run asks for is a part of its progress, which all have.

    A list of parents is for one number of workers. While there are others sums go in the backend's own way; when there
    are as many again, so are its routes.
    """

    def __init__(self, spec: RunSpec, workers: WorkerGroup, progress: Progress, send: Callable[[Record], None]) -> None:
        self._means = spec.execution
        self._workers = workers
        self._progress = progress
        self._send = send
        self._laid = str(Topology())
        self._cause = "the run's means"
        self._auto = NATIVE  # what auto has come to
        self._probed = -1  # the view whose links were measured
        self._watch = LinkWatch()
        self._unchecked = True  # what was laid last

    @property
    def asked(self) -> Topology:
        """What the run asks for."""
        changed = self._progress.topology
        return self._means.topology if changed is None else Topology.parse(changed)

    def lay(self, comms: Comms, auto: Topology = NATIVE, measured: str = "") -> None:
        """Let the sums of ``comms`` travel as the run asks; before they begin, or between two steps.

        ``auto``: what that is to mean where links were ``measured``, which says how; whoever comes anew knows no more
        than the default.
        """
        group, asked = comms.group("data"), self.asked
        self._auto = auto
        why = self._why_not(asked, comms)
        used = NATIVE if why else auto if asked.shape == "auto" else asked
        group.routes, group.chunk_kib = routes_of(used, group.size, comms.hosts), used.chunk_kib
        self._unchecked = True
        if group.size < 2 or str(used) == self._laid or {str(used), self._laid} == {"auto", "native"}:
            return
        self._laid = str(used)
        if comms.rank == 0:
            why = why or ("links are not measured yet" if asked.shape == "auto" else "")
            cause = measured or (f"{self._cause}: {asked}; {why}" if why else self._cause)
            step, seconds = self._progress.position.step, self._progress.times.seconds
            self._send(TopologyChanged(step, str(used), group.size, cause, seconds))

    def check(self, asked: Topology) -> None:
        """Raise ``UserError`` where the workers that there are cannot have it."""
        asked.check(self._workers.size, self._means.mechanism)
        if asked.routed and self._means.compress is not None:
            told = f"{asked} with {self._means.compress}"
            raise UserError("compressed gradients go from everybody to everybody", told, "use native")
        why = self._why_not(asked, self._workers.comms)
        if why:
            raise UserError("a topology must suit the workers that there are", why, "use native")

    def change(self, asked: Topology, trained: TrainingState, cause: str) -> None:
        """From the next step on, on the same groups. All workers come here between the same two steps."""
        self._progress.topology, self._cause, self._probed = str(asked), cause, -1
        self.lay(self._workers.comms)
        trained.sync.regroup(self._workers.comms)

    def reload(self, trained: TrainingState) -> None:
        """What the run asks for may have come with a checkpoint."""
        if self._progress.topology is not None:
            self._cause = BY_CHECKPOINT
            self.lay(self._workers.comms)
            trained.sync.regroup(self._workers.comms)

    def settle(self, trained: TrainingState) -> None:
        """Between two steps, with all workers: measure links where that is due, choose by them, and see that what was
        laid last is the same for all and adds up.

        Whoever completes a gather after a loss has the rows of those before: what they say decides, alike everywhere.
        Where one worker has completed what another has not, they are of different minds as to what comes next. So all
        gather by one name, say what they do, and begin again here until all do the same in the view that there is. What
        a death breaks otherwise ends likewise: all come here again. While a round goes on without some who were lost in
        it nothing is settled: who has begun it does not come here before its end. Raises ``RouteMismatch``.
        """
        if self._workers.assignment_view != self._workers.view:
            return
        self._measure(trained)
        while self._unchecked and self._in_use and self._workers.synchronised and not self._checked():
            self._measure(trained)

    def _gather(self, does: float, own: Sequence[float]) -> list[list[float]]:
        """What each worker brings, by rank; empty where it is not this of all workers, or in different views."""
        mine = [float(self._workers.view), does, *own]
        rows = self._workers.gather(mine, SETTLING)
        alike = len({(row[0], row[1], len(row)) for row in rows}) == 1 and rows[0][1] == does
        return [list(row) for row in rows] if alike and len(rows[0]) == len(mine) else []

    # -- checked on every change --------------------------------------------------------------------------------------

    def _checked(self) -> bool:
        """Whether all of one view have compared what they know of their routes, and have summed along them."""
        group = self._workers.comms.group("data")
        rows = self._gather(CHECKS, known(group))
        if not rows or rows[0][0] != self._workers.view:
            return False
        self._refuse(unlike([row[2:] for row in rows]))
        try:
            right = not group.routes or adds_up(group)
        except GroupBroken:  # those who are left have routes of their own
            return False
        rows = self._gather(CHECKS, [*known(group), float(right)])
        if not rows:
            return False
        self._refuse(dict.fromkeys((rank for rank, row in enumerate(rows) if not row[-1]), WRONG_SUM))
        self._unchecked = rows[0][0] != self._workers.view
        return True

    @property
    def _in_use(self) -> bool:
        """Whether there are routes, or were any: equal on all workers, those that have just come included."""
        comms = self._workers.comms
        if comms.everyone.size < 2 or comms.everyone.backend != "gloo" or comms.mesh.replica > 1:
            return False
        return self._means.topology.routed or self._progress.topology is not None or self._auto.routed

    def _refuse(self, told: Mapping[int, str]) -> None:
        if told:
            where = f"after step {self._progress.position.step}, view {self._workers.view}, {self._laid}"
            raise RouteMismatch(f"workers must sum along the same routes ({where}): {lines_by_rank(told)}")

    # -- auto ---------------------------------------------------------------------------------------------------------

    @property
    def watches(self) -> bool:
        """Whether links are measured: there are several hosts, and nobody has said how sums are to travel."""
        comms, execution = self._workers.comms, self._means
        if len(set(comms.hosts)) < 2:
            return False
        ours = execution.mechanism == "replicated" and execution.compress is None and comms.everyone.backend == "gloo"
        return ours and self.asked.shape == "auto"

    def hear(self, times: Sequence[float]) -> None:
        """Three numbers for each rank (``monitors.base.WorkerTimes``), the same on all workers."""
        if self.watches:
            self._watch.hear(times[2::3])

    def _measure(self, trained: TrainingState) -> None:
        """All meet in one gather before they measure and again with what they have found. Only where all were in the
        view that there is now do they send each other anything but gathers.
        """
        while self.watches and (self._probed != self._workers.view or self._watch.due):
            rows = self._gather(MEASURES, [])
            if not rows or rows[0][0] != self._workers.view:
                continue
            comms = self._workers.comms
            try:
                rows = self._gather(MEASURES, probe_links(comms.everyone, comms.hosts))
            except GroupBroken:  # it is measured among those who are left
                continue
            if rows:
                self._watch.begin()
                self._probed = int(rows[0][0])
                if self._probed == self._workers.view:
                    self._choose(trained, rows)

    def _choose(self, trained: TrainingState, rows: Sequence[Sequence[float]]) -> None:
        comms, execution = self._workers.comms, self._means
        names = tuple(dict.fromkeys(comms.hosts))
        first = [rows[comms.hosts.index(name)][2:] for name in names]
        links = HostLinks.steadied(names, [row[::2] for row in first], [row[1::2] for row in first])
        numel, plan = max(1, min(trained.gradient_bytes, BUCKET_BYTES) // ITEM_BYTES), trained.sync.plan
        num_slots = plan.learners if plan.in_rounds else execution.num_slots if execution.mode == "exact" else 0
        sums = Sums(numel, ITEM_BYTES, comms.hosts, num_slots)
        chosen, seconds = best(sums, links, self._auto)
        if chosen == self._auto:
            return
        try:
            tried = self._try(sums, {way: seconds[str(way)] for way in (self._auto, chosen)})
        except GroupBroken:
            tried = []
        if not tried:
            self._probed = -1  # begin again, with those who are left
        elif self._probed == self._workers.view and tried[1] <= SHORTER * tried[0]:
            slowest = min(names, key=lambda name: min(links.rates(name)))
            rates, modelled = min(links.rates(slowest)), (seconds[str(chosen)], seconds[str(NATIVE)])
            measured = (
                f"links measured: the slowest is that of {slowest}, {rates / 1e6:.3g} MB/s; "
                f"modelled: {1e3 * modelled[0]:.3g} ms, native {1e3 * modelled[1]:.3g} ms; "
                f"tried: {1e3 * tried[1]:.3g} ms, {self._auto} {1e3 * tried[0]:.3g} ms"
            )
            self.lay(comms, chosen, measured)
            trained.sync.regroup(comms)

    def _try(self, sums: Sums, modelled: Mapping[Topology, float]) -> Sequence[float]:
        """Seconds of ``sums``, or of as many numbers as take no longer than ``LONGEST_S`` by the model, on each of the
        ways that were ``modelled``. The same on all workers; none where not all have tried them.

        Raises ``GroupBroken``.
        """
        group = self._workers.comms.group("data")
        laid = [(routes_of(way, group.size, sums.hosts), way.chunk_kib) for way in modelled]
        numel = math.ceil(sums.numel * min(1.0, LONGEST_S / max(modelled.values())))
        self._workers.say("gathering", self._progress.position.step, numel * ITEM_BYTES, SETTLING)
        rows = self._gather(TRIES, time_routes(group, laid, numel, sums.num_slots))
        return rows[0][2:] if rows else []

    @staticmethod
    def _why_not(asked: Topology, comms: Comms) -> str:
        """Why these workers cannot have it; "" where they can."""
        group = comms.group("data")
        if group.size < 2 or not asked.routed:
            return ""
        if group.backend != "gloo":
            return f"{group.backend} has ways of its own"
        if comms.mesh.replica > 1:
            return f"in {comms.mesh} a replica lies on several workers"
        return "" if asked.fits(group.size) else f"{len(asked.parents)} parents, {group.size} workers"
