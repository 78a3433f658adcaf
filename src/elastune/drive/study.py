"""Run a study: ask, execute, tell, several trials at once. The journal is the truth, all else is rebuilt from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from elastune.cluster.base import Cluster
from elastune.cluster.local import LocalCluster
from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError
from elastune.core.run import Adapt, Config, RunSpec
from elastune.drive.adapting import check_adapt, policies_of
from elastune.drive.context import machine_context
from elastune.drive.folders import open_out
from elastune.drive.job import Observe, check_means
from elastune.drive.pool import Ended, Pool
from elastune.drive.requests import StudyRequest
from elastune.drive.results import Study
from elastune.drive.signals import Interrupts
from elastune.drive.trials import CLOCKED, SYSTEM_PARAMETERS, Pricing, judge, settings, system_defaults
from elastune.journal.entry import Entry
from elastune.journal.reader import read
from elastune.journal.records import (
    Record,
    Reported,
    RunFailed,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialReported,
    TrialStarted,
)
from elastune.journal.writer import JournalWriter
from elastune.search.constraint import parse_constraints
from elastune.search.feasible import check_feasible
from elastune.search.objective import parse_objectives
from elastune.search.samplers import check_sampler
from elastune.search.space import Space, probe
from elastune.search.suggest import Suggester, Suggestion
from elastune.train.program import LoadedProgram, load, merge

MIRROR = "optuna.log"
PROBED_FOR_POLICIES = 64  # configurations that are looked at for policies before any runs
HOPELESS_TRIALS = 5  # so many trials that raise, and none that does not, are a bug in the program


@dataclass(frozen=True)
class Plan:
    """A checked request: what to search, from which defaults, by which yardstick."""

    request: StudyRequest
    space: Space
    config: Config
    pricing: Pricing
    program: LoadedProgram

    @property
    def settings(self) -> dict[str, Any]:
        """The request as the journal keeps it."""
        plain = asdict(self.request)
        plain["program"], plain["out"] = str(self.request.program.path), str(self.request.out)
        plain["objectives"] = {o.name: o.direction for o in self.pricing.objectives}
        return {"kind": "tune", **plain}


def check(request: StudyRequest, space: Space | None = None) -> Plan:
    """Raise ``UserError`` for all that can be known to be wrong before a trial runs."""
    if request.trials is None and request.budget_s is None:
        raise UserError("a study needs a budget", "none", "use --trials or --budget")
    if request.trials is not None and request.trials < 1:
        raise UserError("trials must be at least 1", request.trials, "use --trials 1 or more")
    if request.budget_s is not None and not request.budget_s > 0:
        raise UserError("a budget must be positive", request.budget_s, "for example --budget 3m")
    check_means(RunSpec(request.program, request.out, means=request.means))
    if request.workers < 1:
        raise UserError("workers must be at least 1", request.workers, "use --workers 1 or more")
    program = load(request.program)
    found = space or program.space
    if found is None:
        raise UserError("tuning needs a search space", request.program.path, "define space(trial) in the file")
    objectives = parse_objectives(request.objectives or program.objectives or {})
    known = {*program.objectives, *CLOCKED}
    for objective in objectives:
        if program.objectives and objective.name not in known:
            fix = f"use one of {', '.join(sorted(known))}, or add it to the file's objectives"
            raise UserError("an objective must be one that the program names", objective.name, fix)
    check_sampler(request.sampler, objectives)
    config = merge(program.config, request.config)
    constraints = parse_constraints(request.constraints)
    defaults = {**config, **system_defaults(request.means)}

    def complete_space(trial: Any) -> dict[str, Any]:
        return {**defaults, **found(trial)}

    _check_policies(complete_space, program, request.seed)
    check_feasible(complete_space, constraints, {}, request.seed)
    pricing = Pricing(objectives, constraints, request.price_per_worker_hour)
    return Plan(request, complete_space, config, pricing, program)


def _check_policies(space: Space, program: LoadedProgram, seed: int) -> None:
    """Refuse a policy of the space that cannot be made, before hours of trials come upon it."""
    named = [policies_of(sample.values["policy"]) for sample in probe(space, PROBED_FOR_POLICIES, seed)]
    for policies in dict.fromkeys(named):
        check_adapt(Adapt(policies), program)


def tune(
    request: StudyRequest,
    *,
    space: Space | None = None,
    cluster: Cluster | None = None,
    observe: Observe | None = None,
    clock: Clock | None = None,
) -> Study:
    """Search until the budget is spent, the space is exhausted or Ctrl-C; returns what was found.

    Killed at any time, a study resumes with ``request.resume``: finished trials count, unfinished ones never were.
    """
    plan = check(request, space)
    path = open_out(request.out, request.resume)
    before = read(path) if path.exists() else []
    check_same_study(plan.settings, before, path)
    if cluster is not None and cluster.capacity < request.workers:
        rule = "a study's workers must fit into its cluster"
        raise UserError(rule, f"{request.workers} workers, room for {cluster.capacity}", "ask for fewer workers")
    with JournalWriter(path) as journal, Interrupts() as interrupts, ExitStack() as stack:
        place = cluster or stack.enter_context(LocalCluster(capacity=request.workers))

        def keep(record: Record) -> None:
            journal.write(record, durable=isinstance(record, (TrialFinished, StudyFinished)))
            if observe is not None:
                observe(record)

        driver = Driver(plan, place, keep, clock or SystemClock())
        stack.callback(driver.abandon)  # whatever happens: a cluster that is not ours lives on, its trials must not
        driver.replay(before)
        driver.run(lambda: interrupts.count > 0)
    return Study.load(request.out)


class Driver:
    """The loop of a study and what it knows while it runs."""

    def __init__(self, plan: Plan, cluster: Cluster, keep: Callable[[Record], None], clock: Clock) -> None:
        self._plan = plan
        self._request = plan.request
        self._keep = keep
        self._clock = clock
        self._pool = Pool(cluster, capacity=self._request.workers, timeout_s=self._request.trial_timeout_s, clock=clock)
        self._suggester = Suggester(
            plan.space,
            plan.pricing.objectives,
            plan.pricing.constraints,
            sampler=self._request.sampler,
            seed=self._request.seed,
            mirror=self._request.out / MIRROR,
        )
        self._waiting: Suggestion | None = None
        self._known: dict[int, dict[str, Any]] = {}
        self._launched = 0
        self._durations: list[float] = []
        self._crashed_in_a_row = 0
        self._spent_before_s = 0.0
        self._started = clock.now()

    def replay(self, entries: list[Entry]) -> None:
        """Take over what an earlier controller finished."""
        self._suggester.replay(entries)
        finished = [e.record for e in entries if isinstance(e.record, TrialFinished)]
        self._launched = sum(record.state != "rejected" for record in finished)
        self._durations = [record.seconds for record in finished if record.state == "complete"]
        self._spent_before_s = spent_s(entries)
        self._keep(StudyStarted(self._plan.settings, machine_context(), resumed=bool(entries)))

    def run(self, interrupted: Callable[[], bool]) -> None:
        """Until there is nothing more to start and nothing runs."""
        reason = ""
        while True:
            reason = reason or ("interrupted" if interrupted() else self._budget_spent())
            if not reason and not self._fill():
                reason = "the space is exhausted"
            if reason and (self._pool.running == 0 or interrupted() or self._left_s() <= 0):
                break
            self._listen(*self._pool.pump(0.5))
        self.abandon()
        self._keep(StudyFinished(reason, self._elapsed_s()))

    def abandon(self) -> None:
        """End what runs and let go of the search's files. Idempotent."""
        self._pool.abandon()
        self._suggester.close()

    def _elapsed_s(self) -> float:
        return self._spent_before_s + self._clock.now() - self._started

    def _left_s(self) -> float:
        budget_s = self._request.budget_s
        return float("inf") if budget_s is None else budget_s - self._elapsed_s()

    def _budget_spent(self) -> str:
        if self._request.trials is not None and self._launched >= self._request.trials:
            return f"{self._request.trials} trials"
        usual_s = median(self._durations) if self._durations else 0.0
        if self._left_s() <= usual_s:
            return f"a budget of {self._request.budget_s:g} s"
        return ""

    def _fill(self) -> bool:
        """Start trials while there is room. False once the sampler has nothing more and nothing runs."""
        while self._pool.free > 0 and not self._budget_spent():
            if self._waiting is None:
                self._waiting = self._suggester.ask()
            if self._waiting is None:
                return self._pool.running > 0
            config, means, adapt = settings(
                self._waiting.values, self._plan.config, self._request.means, self._request.workers
            )
            check_adapt(adapt, self._plan.program)
            if means.workers > self._pool.free:
                return True  # it comes first once workers are free: no trial is passed over for being wide
            suggestion, self._waiting = self._waiting, None
            number = suggestion.number
            chosen = {**asdict(means), "policy": suggestion.values["policy"]}
            self._known[number] = {**config, **{name: chosen[name] for name in SYSTEM_PARAMETERS}}
            spec = RunSpec(
                program=self._request.program,
                out=self._request.out / "trials" / f"{number:05d}",
                config=config,
                seed=self._request.seed,
                means=means,
                epochs=self._request.epochs,
                checkpoint_every_steps=0,
                adapt=adapt,
            )
            self._keep(
                TrialStarted(
                    trial=number,
                    config=config,
                    means=chosen,
                    seed=spec.seed,
                    params=suggestion.params,
                    distributions=suggestion.distributions,
                )
            )
            self._pool.start(number, spec)
            self._launched += 1
        return True

    def _listen(self, records: list[tuple[int, Record]], ended: list[Ended]) -> None:
        for number, record in records:
            if isinstance(record, Reported):
                self._keep(TrialReported(number, record))
        for job in ended:
            result = judge(job.key, job.outcome, self._known.pop(job.key), job.seconds, self._plan.pricing)
            self._keep(result)
            self._suggester.tell(job.key, result)
            if result.state == "complete":
                self._durations.append(job.seconds)
            self._refuse_hopeless(job)

    def _refuse_hopeless(self, job: Ended) -> None:
        crashed = isinstance(job.outcome, RunFailed) and job.outcome.reason in ("exception", "user_error")
        self._crashed_in_a_row = self._crashed_in_a_row + 1 if crashed else 0
        if isinstance(job.outcome, RunFailed) and not self._durations and self._crashed_in_a_row >= HOPELESS_TRIALS:
            rule = f"of the first {HOPELESS_TRIALS} trials one must not raise"
            raise UserError(rule, job.outcome.detail, f"mend the program; a log is {job.spec.out / 'logs'}")


def spent_s(entries: list[Entry]) -> float:
    """Seconds that controllers have worked on a study: from each start to the last record before the next."""
    total, begun, last = 0.0, None, 0.0
    for entry in entries:
        if isinstance(entry.record, StudyStarted):
            total += last - begun if begun is not None else 0.0
            begun = entry.at
        last = entry.at
    return total + (last - begun if begun is not None else 0.0)


def check_same_study(settings: Mapping[str, Any], entries: list[Entry], path: Path) -> None:
    """Refuse to mix two studies in one journal."""
    started = next((e.record for e in entries if isinstance(e.record, StudyStarted)), None)
    if started is None:
        if entries:
            raise UserError("only a study can be resumed as one", path, "use another --out")
        return
    for name in ("kind", "program", "objectives", "constraints", "config", "seed"):
        old, new = started.settings.get(name), settings[name]
        if json.dumps(old, sort_keys=True) != json.dumps(new, sort_keys=True):
            raise UserError(f"a study resumes with the {name} it was begun with", new, f"use {old}")
