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
from elastune.core.plan.links import HostLinks, Sums, best_topology
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

STEPS = 5  # whose median is compared
FACTOR = 1.5  # by which a median has to differ
LEAST_S = 0.005  # by which it has to differ, too
ITEM_BYTES = 4

NATIVE = Topology("native")
SETTLING = "how sums travel"
WRONG_SUM = "has another sum than the numbers of all have"
MEASURES, CHECKS, TRIES = 0.0, 1.0, 2.0
"""The purpose of a worker's row in a gather: after a loss another worker may gather for another purpose."""
LONGEST_S = 0.3  # the longest trial sum, by the model: all workers wait meanwhile
SHORTER = 0.95  # new routes may take at most this part of the time on the present ones


class Routing:
    """Sets the routes of a run's sums, alike on every worker.

    The topology that the run asks for is part of its progress, which all workers have. A list of parents is for one
    number of workers. With another number sums travel as the backend sends them; with that number again, on the routes
    again.
    """

    def __init__(self, spec: RunSpec, workers: WorkerGroup, progress: Progress, send: Callable[[Record], None]) -> None:
        self._execution = spec.execution
        self._workers = workers
        self._progress = progress
        self._send = send
        self._laid = str(Topology())
        self._cause = "the run's settings"
        self._auto = NATIVE  # the choice of auto
        self._probed = -1  # the view whose links were measured
        self._watch = LinkWatch()
        self._unchecked = True  # the present routes

    @property
    def requested_topology(self) -> Topology:
        """The topology that the run asks for."""
        changed = self._progress.topology
        return self._execution.topology if changed is None else Topology.parse(changed)

    def lay(self, comms: Comms, auto: Topology = NATIVE, measured: str = "") -> None:
        """Let the sums of ``comms`` travel as the run asks, from the start or between two steps.

        Args:
            comms: The process groups.
            auto: The choice of ``auto``, where links were measured; joiners know only the default.
            measured: The measurement, in words, for the journal.
        """
        group, wanted = comms.group("data"), self.requested_topology
        self._auto = auto
        why = self._why_not(wanted, comms)
        used = NATIVE if why else auto if wanted.shape == "auto" else wanted
        group.routes, group.chunk_kib = routes_of(used, group.size, comms.hosts), used.chunk_kib
        self._unchecked = True
        if group.size < 2 or str(used) == self._laid or {str(used), self._laid} == {"auto", "native"}:
            return
        self._laid = str(used)
        if comms.rank == 0:
            why = why or ("links are not measured yet" if wanted.shape == "auto" else "")
            cause = measured or (f"{self._cause}: {wanted}; {why}" if why else self._cause)
            step, seconds = self._progress.position.step, self._progress.times.seconds
            self._send(TopologyChanged(step, str(used), group.size, cause, seconds))

    def check(self, wanted: Topology) -> None:
        """Raise ``UserError`` if the present workers cannot have this topology."""
        wanted.check(self._workers.size, self._execution.mechanism)
        if wanted.routed and self._execution.compress is not None:
            text = f"{wanted} with {self._execution.compress}"
            raise UserError("compressed gradients go from everybody to everybody", text, "use native")
        why = self._why_not(wanted, self._workers.comms)
        if why:
            raise UserError("a topology must suit the workers that there are", why, "use native")

    def change(self, wanted: Topology, trained: TrainingState, cause: str) -> None:
        """Use another topology from the next step on. All workers call this between the same two steps."""
        self._progress.topology, self._cause, self._probed = str(wanted), cause, -1
        self.lay(self._workers.comms)
        trained.sync.regroup(self._workers.comms)

    def reload(self, trained: TrainingState) -> None:
        """Use the topology that a checkpoint may have brought."""
        if self._progress.topology is not None:
            self._cause = BY_CHECKPOINT
            self.lay(self._workers.comms)
            trained.sync.regroup(self._workers.comms)

    def settle(self, trained: TrainingState) -> None:
        """Between two steps, with all workers: measure links if that is due, choose routes, and check the present ones.

        A worker that completes a gather after a loss has the rows of the workers before the loss; their rows decide,
        alike everywhere. If one worker has completed a gather that another has not, the two disagree about the next
        one. So all gathers have one name, each row states its purpose, and all repeat until they do the same in the
        present view. While a round of learners goes on without workers that were lost in it, nothing is settled: the
        other workers are inside it.

        Raises:
            RouteMismatch: The routes differ between workers, or sums along them are wrong.
        """
        if self._workers.assignment_view != self._workers.view:
            return
        self._measure(trained)
        while self._unchecked and self._in_use and self._workers.synchronised and not self._checked():
            self._measure(trained)

    def _gather(self, does: float, values: Sequence[float]) -> list[list[float]]:
        """The row of each worker, by rank; empty if the rows have different purposes or views."""
        row = [float(self._workers.view), does, *values]
        rows = self._workers.gather(row, SETTLING)
        alike = len({(row[0], row[1], len(row)) for row in rows}) == 1 and rows[0][1] == does
        return [list(row) for row in rows] if alike and len(rows[0]) == len(row) else []

    # -- the check of every change ------------------------------------------------------------------------------------

    def _checked(self) -> bool:
        """Whether all workers of one view have compared their routes, and have summed along them."""
        group = self._workers.comms.group("data")
        rows = self._gather(CHECKS, known(group))
        if not rows or rows[0][0] != self._workers.view:
            return False
        self._refuse(unlike([row[2:] for row in rows]))
        try:
            right = not group.routes or adds_up(group)
        except GroupBroken:  # the survivors get other routes
            return False
        rows = self._gather(CHECKS, [*known(group), float(right)])
        if not rows:
            return False
        self._refuse(dict.fromkeys((rank for rank, row in enumerate(rows) if not row[-1]), WRONG_SUM))
        self._unchecked = rows[0][0] != self._workers.view
        return True

    @property
    def _in_use(self) -> bool:
        """Whether there are routes, or were any: equal on all workers, joiners included."""
        comms = self._workers.comms
        if comms.everyone.size < 2 or comms.everyone.backend != "gloo" or comms.mesh.replica > 1:
            return False
        return self._execution.topology.routed or self._progress.topology is not None or self._auto.routed

    def _refuse(self, problems: Mapping[int, str]) -> None:
        if problems:
            where = f"after step {self._progress.position.step}, view {self._workers.view}, {self._laid}"
            raise RouteMismatch(f"workers must sum along the same routes ({where}): {lines_by_rank(problems)}")

    # -- auto ---------------------------------------------------------------------------------------------------------

    @property
    def watches(self) -> bool:
        """Whether links are measured: the run has several hosts, and the topology is left to ``auto``."""
        comms, execution = self._workers.comms, self._execution
        if len(set(comms.hosts)) < 2:
            return False
        ours = execution.mechanism == "replicated" and execution.compress is None and comms.everyone.backend == "gloo"
        return ours and self.requested_topology.shape == "auto"

    def observe(self, times: Sequence[float]) -> None:
        """Note the times of all workers in a step, three numbers for each rank (``WorkerTimes``)."""
        if self.watches:
            self._watch.observe(times[2::3])

    def _measure(self, trained: TrainingState) -> None:
        """Measure the links between hosts, if that is due.

        All workers meet in one gather before they measure, and in another one with their results. They send other
        messages than gathers only if all were in the present view.
        """
        while self.watches and (self._probed != self._workers.view or self._watch.due):
            rows = self._gather(MEASURES, [])
            if not rows or rows[0][0] != self._workers.view:
                continue
            comms = self._workers.comms
            try:
                rows = self._gather(MEASURES, probe_links(comms.everyone, comms.hosts))
            except GroupBroken:  # the survivors measure again
                continue
            if rows:
                self._watch.begin()
                self._probed = int(rows[0][0])
                if self._probed == self._workers.view:
                    self._choose(trained, rows)

    def _choose(self, trained: TrainingState, rows: Sequence[Sequence[float]]) -> None:
        comms, execution = self._workers.comms, self._execution
        names = tuple(dict.fromkeys(comms.hosts))
        first = [rows[comms.hosts.index(name)][2:] for name in names]
        links = HostLinks.steadied(names, [row[::2] for row in first], [row[1::2] for row in first])
        numel, plan = max(1, min(trained.gradient_bytes, BUCKET_BYTES) // ITEM_BYTES), trained.sync.plan
        num_slots = plan.learners if plan.in_rounds else execution.num_slots if execution.mode == "exact" else 0
        sums = Sums(numel, ITEM_BYTES, comms.hosts, num_slots)
        chosen, seconds = best_topology(sums, links, self._auto)
        if chosen == self._auto:
            return
        try:
            tried = self._try(sums, {topology: seconds[str(topology)] for topology in (self._auto, chosen)})
        except GroupBroken:
            tried = []
        if not tried:
            self._probed = -1  # begin again with the survivors
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
        """Time ``sums`` on each of the ``modelled`` topologies; fewer numbers, where the model exceeds ``LONGEST_S``.

        Returns:
            The seconds on each topology, the same on all workers; empty if not all workers have tried them.

        Raises:
            GroupBroken: A worker was lost.
        """
        group = self._workers.comms.group("data")
        laid = [(routes_of(topology, group.size, sums.hosts), topology.chunk_kib) for topology in modelled]
        numel = math.ceil(sums.numel * min(1.0, LONGEST_S / max(modelled.values())))
        self._workers.set_activity("gathering", self._progress.position.step, numel * ITEM_BYTES, SETTLING)
        rows = self._gather(TRIES, time_routes(group, laid, numel, sums.num_slots))
        return rows[0][2:] if rows else []

    @staticmethod
    def _why_not(wanted: Topology, comms: Comms) -> str:
        """The reason why these workers cannot have this topology; "" if they can."""
        group = comms.group("data")
        if group.size < 2 or not wanted.routed:
            return ""
        if group.backend != "gloo":
            return f"{group.backend} chooses routes itself"
        if comms.mesh.replica > 1:
            return f"in {comms.mesh} a replica lies on several workers"
        return "" if wanted.fits(group.size) else f"{len(wanted.parents)} parents, {group.size} workers"


@dataclass
class LinkWatch:
    """Detects that reductions take longer or shorter than when their topology was chosen; equal on all workers.

    Attributes:
        due: Links are to be measured anew.
    """

    due: bool = False
    _times: list[float] = field(default_factory=list)
    _usual_s: float | None = None

    def begin(self) -> None:
        """Begin anew: links were measured, and the next times are the usual ones."""
        self.due, self._times, self._usual_s = False, [], None

    def observe(self, waits_s: Sequence[float]) -> None:
        """Note how long each worker waited in a step: the last worker to come has waited for the links alone."""
        known_s = [wait_s for wait_s in waits_s if wait_s > 0]
        if not known_s:
            return
        self._times = [*self._times, min(known_s)][-STEPS:]
        if len(self._times) < STEPS:
            return
        now_s = median(self._times)
        if self._usual_s is None:
            self._usual_s, self._times = now_s, []
            return
        low, high = sorted((now_s, self._usual_s))
        self.due = self.due or (high > FACTOR * low and high > low + LEAST_S)
