"""The short runs of a frontier: they time steps, look for faster execution, and end within their part of the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from elastune.core.errors import UserError
from elastune.core.text import count
from elastune.frontier.calibration import Calibration, Timing, batches_to_measure, layouts
from elastune.frontier.choice import Choice
from elastune.frontier.crews import timed_with
from elastune.frontier.criteria import FrontierCriteria, batch_of
from elastune.frontier.phase_budget import PhaseBudget, TrainingCost
from elastune.frontier.plan import FrontierPlan, check_target
from elastune.frontier.throughput import MeansClimb
from elastune.frontier.ways import Recipe, StepKind
from elastune.job.signals import Interrupted
from elastune.journal.records import RunFinished, ThroughputTuned
from elastune.search.stopping.schedule import Schedule
from elastune.study.loop.budget import Bounds
from elastune.study.loop.study_loop import StudyLoop

MOST_NAMED = 8  # kinds of steps that a space names, and that are timed before it is searched
CALIBRATE_SLACK = 1.5  # of what calibrating was predicted to take: beyond, short runs are left out


class ShortRuns:
    """Of ``plan``, by ``loop``. ``timeable``: workers whose steps can be timed, one each a core.

    ``workers_per_host``: None where all are on one host. ``phases``: how the budget is split, once that is known.
    ``left_out``: what there was no time for, in words; ``tuned``: what was found for each crew.
    """

    def __init__(
        self,
        plan: FrontierPlan,
        loop: StudyLoop,
        interrupts: Callable[[], int],
        workers_per_host: int | None,
        timeable: int,
    ) -> None:
        self.plan = plan
        self.calibration = Calibration(plan, loop.table, workers_per_host)
        self.budget_s = math.inf if plan.request.budget_s is None else plan.request.budget_s
        self.phases: PhaseBudget | None = None
        self.left_out: list[str] = []
        self.tuned: list[ThroughputTuned] = []
        self._loop = loop
        self._interrupts = interrupts
        self._workers_per_host = workers_per_host
        self._timeable = timeable

    def use(self, plan: FrontierPlan) -> None:
        """Go on with what was learned of ``plan``."""
        self.plan = self.calibration.plan = plan

    def split(self, phases: PhaseBudget) -> None:
        """The budget is split."""
        self.phases = phases
        self.budget_s = self.calibration.budget_s = phases.budget_s

    @property
    def timed_crews(self) -> int:
        """How many of the crews asked about can be timed."""
        return sum(crew.workers <= self._timeable for crew in self.plan.crews)

    @property
    def _cost(self) -> TrainingCost:
        assert self.calibration.cost is not None
        return self.calibration.cost

    def _run(self, schedule: Schedule) -> None:
        """At most until the budget is over."""
        bounds = Bounds() if self.budget_s == math.inf else Bounds(budget_s=self.budget_s, reserve_s=0.0)
        self._loop.run(bounds, self._interrupts, schedule)

    def first_steps(self, learn: Callable[[RunFinished], None]) -> TrainingCost:
        """Time the first steps of the program's own batch, twice: what is begun first also loads what all need.

        Raises ``UserError`` where these take the whole budget, and for a target that the quality cannot have.
        """
        own, found = timed_with(self.plan.crews, 1), None
        for nth in range(2):
            timing = Timing(self.plan.base_batch, own, nth=nth)
            self._run(self.calibration.schedule([timing]))
            if self._interrupts():
                raise Interrupted
            found = self.calibration.learn_cost(timing)
            if found is None:
                rule = "a budget must have time for the steps that are timed first"
                raise UserError(rule, f"{self.budget_s:g} s, of which these take all", "use a larger --budget")
            if (run := self.calibration.run_of(timing)) is not None:
                learn(run)
                check_target(self.plan.request.target, self.plan.quality, run.metrics.get(self.plan.quality.name))
            if nth == 0:
                self.calibration.cost, self.calibration.budget_s = found, self.budget_s
        assert found is not None
        self.calibration.cost = found  # the second: the first may have waited for what all runs need
        return found

    def measure(self) -> None:
        """Time a few steps of each, and of two workers for each link that none of these has told of.

        What would take much longer than was planned is left to the model.
        """
        crews, cost = self.plan.crews, self._cost
        limit_s = CALIBRATE_SLACK * self.phases.calibrate if self.phases is not None else math.inf
        skipped = 0
        for i, timing in enumerate(self.wanted()):
            took_s = cost.timing_s(self.calibration.factor(timing.batch), self.budget_s)
            if i > 0 and self._loop.elapsed_s + took_s > limit_s:
                skipped += 1
                continue
            self._run(self.calibration.schedule([timing]))
            if self._interrupts():
                raise Interrupted
        if skipped:
            runs = count(skipped, "short run")
            self.left_out.append(f"{runs} that would time steps here: these are modelled by fewer")
        several = crews[-1].workers > 1 and self._timeable > 1
        pair = layouts(self._pair_batch, timed_with(crews, 2), self._workers_per_host) if several else []
        for timing in pair:
            across = timing.spread or self._workers_per_host == 1
            if not any((link.hosts > 1) == across for link in self.calibration.links) and not self._interrupts():
                self._run(self.calibration.schedule([timing]))
        if self._interrupts():
            raise Interrupted

    @property
    def _pair_batch(self) -> int:
        return self.plan.real_batch(self.plan.base_batch * 2)

    def wanted(self) -> list[Timing]:
        """What is timed beside the program's own batch on one worker, what tells most first."""
        plan, crews = self.plan, self.plan.crews
        own = timed_with(crews, 1)
        one = [Timing(batch, own) for batch in batches_to_measure(plan.base_batch, plan.parts, plan.samples)[1:]]
        timeable = [crew for crew in crews if crew.workers <= self._timeable]
        several = [
            t for crew in timeable for t in layouts(plan.naive_batch(crew.num_slots), crew, self._workers_per_host)
        ]
        first = Timing(plan.base_batch, own)
        return [t for t in (*one[:1], *several, *one[1:]) if t != first]

    def throughput(self, threads: int) -> None:
        """Time what the space names beside what was asked for; look for means that give the same bits sooner.

        In the time that was planned for it: what does not fit is not tried, and what was best is timed again.
        """
        cost = self._cost
        end_s = self._loop.elapsed_s + (self.phases.throughput if self.phases is not None else math.inf)

        def fits(batch: int, runs: int) -> bool:
            took_s = runs * cost.timing_s(self.calibration.factor(batch), self.budget_s)
            return self._loop.elapsed_s + took_s <= end_s

        for timing in self.named():
            if fits(timing.batch, 1):
                self._run(self.calibration.schedule([timing], "throughput", may_fail=True))
        cut: list[str] = []
        request = self.plan.request
        for crew in self.plan.crews[: self.timed_crews if request.throughput else 0]:
            free = request.means.mechanism == "replicated" and crew.mesh is None
            climb = MeansClimb(crew, self.plan.naive_batch(crew.num_slots), threads, free)
            for means in climb.rounds():
                if not climb.repeats and not fits(climb.batch, len(means) + 2):
                    climb.hurried = True  # the best so far is timed again
                    if not climb.tried:
                        break
                    continue
                if climb.repeats and not fits(climb.batch, len(means)):
                    climb.give_up()
                    break
                timings = [Timing(climb.batch, each, nth=int(climb.repeats)) for each in means]
                self._run(self.calibration.schedule(timings, "throughput", may_fail=True))
                if self._interrupts():
                    raise Interrupted
                for timing in timings:
                    climb.hear(timing.crew, self.calibration.run_of(timing))
            cut += [str(crew.workers)] if climb.hurried else []
            if climb.tried:
                self.plan.lineup.speed_up(crew, climb.best)
                self.tuned.append(climb.found)
                self._loop.tell(climb.found)
        if cut:
            self.left_out.append(f"in the throughput phase, part of what could be tried on {', '.join(cut)} workers")

    def named(self) -> list[Timing]:
        """The kinds of steps that the space names, each on who it names or, where these are too many, on fewer."""
        lineup, found = self.plan.lineup, dict[StepKind, Timing]()
        widest = [crew for crew in self.plan.crews if crew.workers <= self._timeable][-1:]
        for crew, way in self.plan.named:
            if way.agreed.sync.in_rounds:
                continue  # the median step of a few tells nothing of rounds
            for each in [crew] if crew.workers <= self._timeable else widest:
                means = lineup.by(each, way)
                kind = lineup.kind_of(means)
                if (kind.apart or kind.workers > 1) and self.plan.goes(each, replace(way, policies=())):
                    batch = self.plan.base_batch * each.num_slots
                    found.setdefault(kind, Timing(batch, means))
        return list(found.values())[:MOST_NAMED]

    def time(self, found: Sequence[Timing]) -> None:
        """Time the steps of what was found, while the budget lasts; what is not measured is modelled."""
        cost, skipped = self._cost, 0
        for timing in found:
            took_s = cost.timing_s(self.calibration.factor(timing.batch), self.budget_s)
            if self._loop.elapsed_s + took_s > self.budget_s:
                skipped += not self.calibration.asked(timing)
                continue
            self._run(self.calibration.schedule([timing], may_fail=True))
        if skipped:
            self.left_out.append(f"timing the steps of {count(skipped, 'row')}: these are modelled")

    def to_measure(self, parts: int, recipe: Recipe, by: FrontierCriteria, choice: Choice) -> list[Timing]:
        """The steps to time for rows, where this machine can and the program is the one that was calibrated.

        Rounds are not seen in the median step: of these there are models alone.
        """
        run = next((t.run for t in choice.tried(recipe, parts) if t.run is not None), None)
        same = run is not None and run.grad_bytes == by.times.model.grad_bytes
        steps, lineup = not recipe.way.agreed.sync.in_rounds, self.plan.lineup
        crews = [crew for crew in lineup.crews if crew.num_slots == parts and self.plan.goes(crew, recipe.way)]
        timed = [lineup.by(crew, recipe.way) for crew in crews if same and steps]
        return [Timing(batch_of(recipe.config), means) for means in timed if means.workers <= self._timeable]
