"""The main job: how far does a program scale before accuracy pays, and which settings buy it back?

What is told of W workers was trained as W workers train: with one slot for each part that they cut a batch into (one a
worker, but where these divide layers), which has its own random stream and batch statistics. In exact mode it does not
show in the result who computes a slot, so one worker does it all (*emulated*), and the command that is printed has the
same result to the last bit. In fast mode it does, and W workers train, however few cores there are. Times are measured
where this machine has the cores and modelled beyond. Phases, each a schedule of one study loop: calibrate, throughput
(means that the space names, and those that give the same bits sooner), naive rule, policies that were given, search,
confirm, time what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from elastune.cluster.base import Cluster
from elastune.cluster.hosts import HostsCluster
from elastune.cluster.kinds.kind import ClusterRequest, RoomWanted, opened
from elastune.cluster.local import LocalCluster
from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.core.sync_choice import SYNC_NAMES
from elastune.frontier.calibration import Calibration, Timing, batches_to_measure, layouts
from elastune.frontier.choice import FRESH_SEEDS, Cell, Choice, Confirm
from elastune.frontier.conclusion import conclude
from elastune.frontier.crews import timed_with
from elastune.frontier.criteria import FrontierCriteria, Times, batch_of
from elastune.frontier.experiment import FrontierExperiment
from elastune.frontier.found_crews import found_crews
from elastune.frontier.plan import FrontierPlan, check
from elastune.frontier.throughput import MeansClimb
from elastune.frontier.trainings import Trainings, name_of
from elastune.frontier.volumes import sides
from elastune.frontier.ways import Recipe, StepKind
from elastune.job.output_dir import check_out
from elastune.job.output_journal import journal_in
from elastune.job.pool import Pool
from elastune.job.run import Observe
from elastune.job.signals import Interrupted, Interrupts
from elastune.job.validate_adapt import policies_of
from elastune.journal.entry import Entry
from elastune.journal.reader import read
from elastune.journal.records import (
    FrontierFound,
    LinkMeasured,
    Phase,
    Record,
    StudyFinished,
    ThroughputTuned,
    TimesFitted,
    TrialFinished,
    TrialPaused,
)
from elastune.journal.trials import fold
from elastune.plan.steps.data_parallel import DataParallelStep
from elastune.search.samplers.suggest import Suggester
from elastune.search.stopping.registry import make_schedule
from elastune.search.stopping.schedule import FixedTrial, Schedule
from elastune.study.allocation.rebalancer import sharing
from elastune.study.changes import study_changes
from elastune.study.loop.async_suggester import Proposals
from elastune.study.loop.budget import Bounds
from elastune.study.loop.fixed_trials import FixedTrials
from elastune.study.loop.keeper import Keeper
from elastune.study.loop.retention import KeepNothing
from elastune.study.loop.study_loop import StudyLoop
from elastune.study.request import FrontierRequest
from elastune.study.tuning import trials_left
from elastune.study.validate import check_same_study
from elastune.train.machine import cores

CONFIRM_SHARE = 0.4  # of the budget is kept for confirming what the search found with fresh seeds
MOST_NAMED = 8  # kinds of steps that a space names, and that are timed before it is searched
LASTING = (TrialFinished, TrialPaused, FrontierFound, StudyFinished)


def frontier(
    request: FrontierRequest,
    *,
    cluster: Cluster | ClusterRequest | None = None,
    observe: Observe | None = None,
    clock: Clock | None = None,
) -> FrontierFound:
    """Answer the question within ``request.budget_s`` (the naive rule's trainings are always finished).

    The journal, from which ``elastune report`` draws the report, lies in ``request.out``; a frontier that was killed
    resumes from it, unfinished trainings from their last checkpoints.

    A ``cluster`` of other hosts that is asked for is opened once all is checked, with room for the most workers asked
    about: step times are measured there, on as few hosts as it takes, and none is modelled for want of cores.
    Trainings that have outlived their controller, by ``request.grace_s``, come to their ends before that.

    Raises:
        UserError: for a request that is wrong, or a program that fails with its own settings.
        Interrupted: where it was interrupted before there was anything to tell.
    """
    plan, before = checked(request, cluster)
    elsewhere = _elsewhere(cluster)
    changed = study_changes(plan.settings, before, request.program, request.accept_changes)
    widest = plan.crews[-1].workers
    most = widest if plan.together else 1
    wanted = widest if elsewhere else max(cores(), most)
    room = RoomWanted(
        request.out, wanted, wanted, grows=False, grace_s=request.grace_s, adopts=trials_left(request.out, before)
    )
    with (
        journal_in(request.out, request.resume) as journal,  # first: its lock says who may go on
        opened(cluster, room) as found,
        Interrupts() as interrupts,
        ExitStack() as stack,
    ):
        place = found or stack.enter_context(LocalCluster(capacity=wanted))

        def keep(record: Record) -> None:
            journal.write(record, durable=isinstance(record, LASTING))
            if observe is not None:
                observe(record)

        # A training that is wider than the machine runs by itself.
        pool = Pool(place, most=None if elsewhere or isinstance(cluster, Cluster) else cores(), clock=clock)
        job = _Frontier(plan, place, pool, keep, clock or SystemClock(), lambda: interrupts.count, before)
        stack.callback(job.loop.close)  # whatever happens: a cluster that is not ours lives on, its trainings must not
        job.resume(changed)
        if isinstance(cluster, ClusterRequest) and isinstance(place, HostsCluster):
            place.gather(wanted, cluster.access.gather_s, lambda: interrupts.count > 0)
        return job.run(place.capacity if elsewhere else cores(), 1 if elsewhere else cores())


def checked(
    request: FrontierRequest, cluster: Cluster | ClusterRequest | None = None
) -> tuple[FrontierPlan, list[Entry]]:
    """All that ``frontier`` checks before it opens its journal and its cluster. Nothing is written or started.

    Args:
        request: As ``frontier`` takes it.
        cluster: As ``frontier`` takes it.

    Returns:
        The plan, and what the journal has already.

    Raises:
        UserError: As ``frontier`` raises it.

    Example:
        >>> plan, before = checked(request)
    """
    plan = check(request, None if _elsewhere(cluster) else cores())
    path = check_out(request.out, request.resume)
    before = read(path) if path.exists() else []
    check_same_study(plan.settings, before, path)
    most = plan.crews[-1].workers if plan.together else 1
    if isinstance(cluster, Cluster) and cluster.capacity < most:
        rule = "in fast mode, and under a policy, only so many workers train as so many do"
        fix = "use --mode exact and no policy, or fewer --workers"
        raise UserError(rule, f"{most} workers, room for {cluster.capacity}", fix)
    return plan, before


def _elsewhere(cluster: Cluster | ClusterRequest | None) -> bool:
    """Whether workers run on other hosts."""
    return cluster.varies if isinstance(cluster, Cluster) else cluster is not None and not cluster.kind.here


class _Frontier:
    """The phases in order, and what they know."""

    def __init__(
        self,
        plan: FrontierPlan,
        cluster: Cluster,
        pool: Pool,
        keep: Callable[[Record], None],
        clock: Clock,
        interrupts: Callable[[], int],
        before: Sequence[Entry],
    ) -> None:
        request = self._request = plan.request
        self._plan = plan
        self._keep_record = keep
        self._interrupts = interrupts
        self._before = before
        begun_s = before[0].at if before else clock.wall()
        self._prices = None if request.prices is None else request.prices.since(begun_s)
        self._experiment = FrontierExperiment(plan, cluster.files)
        self._search = make_schedule(request.stopping, plan.searched, request.seed)
        suggester = Suggester(plan.space, plan.searched, plan.constraints, sampler=request.sampler, seed=request.seed)
        self.loop = StudyLoop(
            self._experiment,
            self._search,
            Proposals(suggester, inline=False),
            pool,
            clock,
            self._keep,
            Keeper(KeepNothing(), cluster.files, request.out),
            share=sharing(request.trial_workers, plan.means(plan.parts[-1])),
        )
        self._trainings = Trainings(self.loop.table)
        self._choice = Choice(plan, self._trainings)
        self._calibration: Calibration | None = None
        self._cluster = cluster
        self._workers_per_host: int | None = None
        self._timeable = 0
        self._tuned: list[ThroughputTuned] = []

    def run(self, timeable: int, threads: int) -> FrontierFound:
        """From measuring step times to the answer.

        ``timeable``: workers whose steps can be timed, one each a core; ``threads``: that they may share, all together.
        """
        request, choice, rooms = self._request, self._choice, self._cluster.host_rooms
        self._workers_per_host, self._timeable = rooms[0] if len(rooms) > 1 else None, timeable
        calibration = self._calibration = Calibration(self._plan, self.loop.table, self._workers_per_host)
        try:
            self._measure(calibration, self._wanted())
            self._throughput(calibration, threads)
            by = self._fitted(calibration)
            self._naive()
        except Interrupted:
            self.loop.finish("interrupted")
            raise
        reserve_s = CONFIRM_SHARE * request.budget_s
        if self.loop.elapsed_s < request.budget_s - reserve_s:
            self._run(self._search, Bounds(budget_s=request.budget_s, reserve_s=reserve_s))
        for crew in found_crews(self._plan, [*self._trainings.done.values(), *self._experiment.twins], by):
            self._plan.lineup.join(crew)
        compared = sides(self._plan, choice, self._trainings.searched, by)
        self._confirm(by, [cell for side in reversed(compared) for cell in side.cells])
        tuned = {parts: choice.bests(parts, by, confirmed_only=True) for parts in self._plan.lineup.parts}
        found = [t for parts, each in tuned.items() for recipe in each for t in self._to_measure(parts, recipe, by)]
        if found:
            self._run(calibration.schedule(found, may_fail=True), Bounds())  # what is not measured is modelled
        by = self._fitted(calibration)
        rules, untimed = self._experiment.rules, calibration.untimed(found)
        answer = conclude(self._plan, choice, tuned, rules, by, compared, self._tuned, untimed)
        self.loop.tell(answer)
        self.loop.finish("interrupted" if self._interrupts() else f"a budget of {request.budget_s:g} s")
        return answer

    def resume(self, changed: Sequence[str]) -> None:
        """Take over what earlier controllers have done; the search learns of it by the step times that they knew.

        ``changed``: what is another now, as was accepted.

        Trainings that have outlived their controller come to their ends: beside them no step could be timed.
        """
        earlier = fold(self._before)
        fits = [entry.record for entry in self._before if isinstance(entry.record, TimesFitted)]
        if fits:
            self._experiment.by = self._criteria(Times(DataParallelStep.from_record(fits[-1]), {}))
        for life in earlier.trials.values():
            if rule := life.started.tags.get("lr_rule"):
                self._experiment.rules[name_of(life.started.config)] = rule
        self.loop.replay(self._before, self._plan.settings, self._request.command, changed)
        self._experiment.look_at(self._trainings)
        self.loop.await_running(self._interrupts)

    def _keep(self, record: Record) -> None:
        if isinstance(record, LinkMeasured) and self._calibration is not None:
            self._calibration.links.append(record)
        self._keep_record(record)

    def _criteria(self, times: Times) -> FrontierCriteria:
        request = self._request
        return FrontierCriteria(
            self._plan.quality, request.target, request.price_per_worker_hour, times, request.margin, self._prices
        )

    def _fitted(self, calibration: Calibration) -> FrontierCriteria:
        times, record = calibration.fit()
        self.loop.tell(record)
        self._experiment.by = self._criteria(times)
        return self._experiment.by

    def _run(self, schedule: Schedule, bounds: Bounds) -> None:
        self.loop.run(bounds, self._interrupts, schedule)

    # -- phases -------------------------------------------------------------------------------------------------------

    def _measure(self, calibration: Calibration, wanted: Sequence[Timing]) -> None:
        """Time a few steps of each, and of two workers for each link that none of these has told of."""
        crews = self._plan.crews
        self._run(calibration.schedule(wanted), Bounds())
        several = crews[-1].workers > 1 and self._timeable > 1
        pair = layouts(self._plan.base_batch * 2, timed_with(crews, 2), self._workers_per_host) if several else []
        for timing in pair:
            across = timing.spread or self._workers_per_host == 1
            if not any((link.hosts > 1) == across for link in calibration.links) and not self._interrupts():
                self._run(calibration.schedule([timing]), Bounds())
        if self._interrupts():
            raise Interrupted

    def _wanted(self) -> list[Timing]:
        base, crews = self._plan.base_batch, self._plan.crews
        one = [Timing(batch, timed_with(crews, 1)) for batch in batches_to_measure(base, self._plan.parts)]
        timeable = [crew for crew in crews if crew.workers <= self._timeable]
        return one + [t for crew in timeable for t in layouts(base * crew.num_slots, crew, self._workers_per_host)]

    def _throughput(self, calibration: Calibration, threads: int) -> None:
        """Time what the space names beside what was asked for; look for means that give the same bits sooner."""
        self._run(calibration.schedule(self._named(), "throughput", may_fail=True), Bounds())
        for crew in [crew for crew in self._plan.crews if self._request.throughput and crew.workers <= self._timeable]:
            free = self._request.means.mechanism == "replicated" and crew.mesh is None
            climb = MeansClimb(crew, self._plan.base_batch * crew.num_slots, threads, free)
            for means in climb.rounds():
                timings = [Timing(climb.batch, each, nth=int(climb.repeats)) for each in means]
                self._run(calibration.schedule(timings, "throughput", may_fail=True), Bounds())
                if self._interrupts():
                    raise Interrupted
                for timing in timings:
                    climb.hear(timing.crew, calibration.run_of(timing))
            self._plan.lineup.speed_up(crew, climb.best)
            self._tuned.append(climb.found)
            self.loop.tell(climb.found)

    def _named(self) -> list[Timing]:
        """The kinds of steps that the space names, each on who it names or, where these are too many, on fewer."""
        lineup, found = self._plan.lineup, dict[StepKind, Timing]()
        widest = [crew for crew in self._plan.crews if crew.workers <= self._timeable][-1:]
        for crew, way in self._plan.named:
            if way.agreed.sync.in_rounds:
                continue  # the median step of a few tells nothing of rounds
            for each in [crew] if crew.workers <= self._timeable else widest:
                means = lineup.by(each, way)
                kind = lineup.kind_of(means)
                if (kind.apart or kind.workers > 1) and self._plan.goes(each, replace(way, policies=())):
                    batch = self._plan.base_batch * each.num_slots
                    found.setdefault(kind, Timing(batch, means))
        return list(found.values())[:MOST_NAMED]

    def _naive(self) -> None:
        """Batch and learning rate x W, whatever comes of it; then the same under each policy that was given."""
        given: list[tuple[Phase, list[tuple[str, ...]]]]
        given = [("naive", [()]), ("policy", [policies_of(text) for text in self._request.policies])]
        for phase, each in given:
            cells = [(self._plan.naive_recipe(n, policies), n) for policies in each for n in self._plan.parts]
            self._run(FixedTrials(phase, self._fixed(phase, cells)), Bounds())
        if self._interrupts():
            raise Interrupted  # a missing row would read as one that diverged

    def _confirm(self, by: FrontierCriteria, compared: list[Cell]) -> None:
        """Train what looks best with fresh seeds, then what is ``compared``, seed by seed, while the budget lasts."""

        def wanted() -> list[FixedTrial]:
            best = self._fixed("confirm", self._choice.unconfirmed(by), FRESH_SEEDS)
            return best or sorted(self._fixed("confirm", compared, FRESH_SEEDS), key=lambda trial: trial.seed)

        schedule = Confirm(wanted, lambda: bool(self._trainings.open("confirm")))
        self._run(schedule, Bounds(budget_s=self._request.budget_s, reserve_s=0.0))

    def _fixed(self, phase: Phase, cells: list[Cell], first: int = 0) -> list[FixedTrial]:
        found = []
        for recipe, parts, seed in self._choice.missing(phase, cells, first):
            means, told = self._plan.means(parts, recipe.way), recipe.way.told(Means())
            beside = {name: told[name] for name in ("policy", *SYNC_NAMES) if name in told}
            found.append(FixedTrial(recipe.config, seed, means, phase, told=beside, parts=parts))
        return found

    def _to_measure(self, parts: int, recipe: Recipe, by: FrontierCriteria) -> list[Timing]:
        """The steps to time for rows, where this machine can and the program is the one that was calibrated.

        Rounds are not seen in the median step: of these there are models alone.
        """
        run = next((t.run for t in self._choice.tried(recipe, parts) if t.run is not None), None)
        same = run is not None and run.grad_bytes == by.times.model.grad_bytes
        steps, lineup = not recipe.way.agreed.sync.in_rounds, self._plan.lineup
        crews = [crew for crew in lineup.crews if crew.num_slots == parts and self._plan.goes(crew, recipe.way)]
        timed = [lineup.by(crew, recipe.way) for crew in crews if same and steps]
        return [Timing(batch_of(recipe.config), means) for means in timed if means.workers <= self._timeable]
