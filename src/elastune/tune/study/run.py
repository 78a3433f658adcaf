"""Tune a program: check the request, run the study loop on a cluster, hand out what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from os.path import abspath
from typing import Any

from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    Entry,
    Record,
    ScalingPredicted,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPaused,
    TrialStarted,
)
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.kind import CapacityRequest, ClusterRequest, opened
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.interrupts import Interrupts
from elastune.runtime.job.output import check_out
from elastune.runtime.job.pool import MoneyMeter, Pool
from elastune.runtime.job.run import Observe, journal_in
from elastune.train.program.space import Space, corners, probe
from elastune.tune.search.constraint import parse_constraints
from elastune.tune.search.early_stopping import make_schedule
from elastune.tune.search.samplers import generation_size
from elastune.tune.search.schedule import Schedule
from elastune.tune.search.suggester import Suggester
from elastune.tune.study.budget import Bounds, StopRules, resume_meter
from elastune.tune.study.experiment import Tuning, trials_left
from elastune.tune.study.proposals import NoProposals, Proposals
from elastune.tune.study.rebalancer import MAX_WAIT_S, MakeRebalancer, parse_allocation, sharing
from elastune.tune.study.request import StudyRequest
from elastune.tune.study.results import Study
from elastune.tune.study.resume import study_changes
from elastune.tune.study.retention import Keeper, KeepNothing, retention_of
from elastune.tune.study.study_loop import StudyLoop
from elastune.tune.study.throughput import BATCH, plan_in, predict_scaling, predicted_in, scaling_prior
from elastune.tune.study.trial_progress import HeldTrials
from elastune.tune.study.validate import PROBED, Plan, check, check_same_study
from elastune.tune.study.warm_start import EarlierStudy, earlier_studies, take_over

LASTING = (TrialFinished, TrialPaused, StudyFinished)  # what must be on the disk before anything rests on it


@dataclass(frozen=True)
class Environment:
    """What a simulation swaps: the clock, and what only real time asks for.

    ``background``: proposals are made in a thread of their own, so that trials are heard meanwhile. ``durable``:
    results are on the disk before anything rests on them.
    """

    clock: Clock = field(default_factory=SystemClock)
    background: bool = True
    durable: bool = True


def tune(
    request: StudyRequest,
    *,
    space: Space | None = None,
    cluster: Cluster | ClusterRequest | None = None,
    observe: Observe | None = None,
    environment: Environment | None = None,
    given: Schedule | None = None,
) -> Study:
    """Search until the budget is spent, the space is exhausted or Ctrl-C; returns what was found.

    Killed at any time, a study resumes with ``request.resume``: finished trials count, unfinished ones go on with
    their own workers within ``request.grace_s``, else from their last checkpoints or their beginnings.

    Args:
        request: what is searched, and for how long.
        space: the search space; by default the program's own.
        cluster: where trials run; by default on this machine, ``request.workers`` at a time. One that is asked for is
            opened once all is checked, and closed. Where its room varies trials wait for some, and go on elsewhere.
        observe: called with every record of the journal.
        environment: what a simulated study swaps.
        given: instead of a search, trials of given settings (``FixedTrials("member", ...)``), and those of a call
            before that was cut off. Neither the study's budget nor the rules by which it ends bound them.

    Raises:
        UserError: for a request that is wrong, a program that cannot be trained, a folder of something else.
    """
    ready = checked(request, space, cluster)
    plan, before, earlier, told = ready.plan, ready.before, ready.earlier, ready.told
    asked = plan.settings if given is None else {**plan.settings, **_space_in(before)}
    changed = study_changes(asked, before, request.program, request.accept_changes)
    around = environment or Environment()
    with (
        journal_in(request.out, request.resume, around.clock.wall) as journal,  # first: its lock says who may go on
        opened(cluster, _room(request, before)) as found,
        Interrupts() as interrupts,
        ExitStack() as stack,
    ):
        place = found or stack.enter_context(LocalCluster(capacity=request.workers))

        def keep(record: Record) -> None:
            journal.write(record, durable=around.durable and isinstance(record, LASTING))
            if observe is not None:
                observe(record)

        meter = resume_meter(request.prices, before, around.clock)
        loop = _loop(plan, place, around, keep, journal.settle, meter, None if given is None else before, told)
        stack.callback(loop.close)  # whatever happens: a cluster that is not ours lives on, its trials must not
        loop.replay(before, asked, request.command, changed)
        if told is not None and predicted_in(before) is None:
            keep(told)
        if given is not None:
            reason = loop.run(Bounds(), lambda: interrupts.count, given)
            loop.finish(reason if reason == "interrupted" else "all that was given is trained")
            return Study.load(request.out)
        for taken in take_over(plan, earlier, place, around.clock, lambda: interrupts.count):
            loop.learn(taken)
        bounds = Bounds(request.trials, request.budget_s, request.worker_hours)
        loop.finish(loop.run(bounds, lambda: interrupts.count))
    return Study.load(request.out)


@dataclass(frozen=True)
class CheckedStudy:
    """A request that ``tune`` can begin with, and what it rests on.

    ``before``: what its journal has already; ``earlier``: studies that it starts warm from; ``told``: what a plan
    predicts of its trials.
    """

    plan: Plan
    before: list[Entry]
    earlier: Sequence[EarlierStudy]
    told: ScalingPredicted | None


def checked(
    request: StudyRequest, space: Space | None = None, cluster: Cluster | ClusterRequest | None = None
) -> CheckedStudy:
    """All that ``tune`` checks before it opens its journal and its cluster. Nothing is written or started.

    Args:
        request: As ``tune`` takes it.
        space: As ``tune`` takes it.
        cluster: As ``tune`` takes it.

    Returns:
        What ``tune`` begins with.

    Raises:
        UserError: As ``tune`` raises it.

    Example:
        >>> print(checked(request).plan.config)
    """
    plan = check(request, space)
    path = check_out(request.out, request.resume)
    before = read(path) if path.exists() else []
    check_same_study(plan.settings, before, path)
    plan = replace(plan, request=_with_kept_rules(plan.request, before))
    if isinstance(cluster, Cluster) and cluster.capacity < request.workers and not cluster.varies:
        rule = "a study's workers must fit into its cluster"
        raise UserError(rule, f"{request.workers} workers, room for {cluster.capacity}", "ask for fewer workers")
    return CheckedStudy(plan, before, earlier_studies(request, before), _study_prediction(plan, before))


def _space_in(before: Sequence[Entry]) -> dict[str, Any]:
    """The space that a study searched before trials of given settings."""
    begun = [entry.record.settings for entry in before if isinstance(entry.record, StudyStarted)]
    return {"space": begun[-1].get("space", {}) if begun else {}}


def _room(request: StudyRequest, before: Sequence[Entry]) -> CapacityRequest:
    """A study begins once one trial can, and gives workers to its trials itself."""
    fewest = request.execution.workers if request.trial_workers is None else request.trial_workers[0]
    return CapacityRequest(
        request.out,
        min(fewest, request.workers),
        request.workers,
        grows=False,
        grace_s=request.grace_s,
        adopts=trials_left(request.out, before),
    )


def _with_kept_rules(request: StudyRequest, before: Sequence[Entry]) -> StudyRequest:
    """The request with the rules that an earlier controller ended by, where it names none of its own."""
    begun = [entry.record.settings for entry in before if isinstance(entry.record, StudyStarted)]
    if not begun:
        return request
    until, patience = begun[-1].get("until", ()), begun[-1].get("patience")
    kept = request.patience if request.patience is not None else patience
    return replace(request, until=request.until or tuple(until), patience=kept)


def _loop(
    plan: Plan,
    cluster: Cluster,
    around: Environment,
    keep: Callable[[Record], None],
    flush: Callable[[], None],
    meter: MoneyMeter | None,
    unsearched: Sequence[Entry] | None,
    told: ScalingPredicted | None,
) -> StudyLoop:
    """``unsearched``: what the journal tells already, where nothing is searched; None: there is a search. ``told``:
    what was predicted of its trials."""
    request, pricing = plan.request, plan.pricing
    schedule = make_schedule(
        request.stopping, pricing.objectives, request.seed, space=plan.space, constraints=pricing.constraints
    )
    proposals: Proposals = NoProposals(unsearched or ())
    rules = StopRules()
    if unsearched is None:
        suggester = Suggester(
            plan.space, pricing.objectives, pricing.learnt, sampler=request.sampler, seed=request.seed
        )
        proposals = Proposals(suggester, inline=not around.background)
        every = generation_size(request.sampler)
        rules = StopRules(parse_constraints(request.until), request.patience, every, pricing.objectives)
    retention = retention_of(request.keep, request.keep_bytes, population=schedule.parents)
    share, holding = _allocation(request, told, holds=not schedule.parents and unsearched is None)
    pauses = schedule.pauses or holding is not None
    return StudyLoop(
        Tuning(plan, cluster.files, checkpoints=pauses or cluster.varies or retention != KeepNothing()),
        schedule,
        proposals,
        Pool(cluster, most=request.workers, timeout_s=request.trial_timeout_s, clock=around.clock, meter=meter),
        around.clock,
        keep,
        Keeper(retention, cluster.files, request.out, request.keep_bytes),
        flush=flush,
        share=share,
        holding=holding,
        rules=rules,
    )


def _study_prediction(plan: Plan, before: Sequence[Entry]) -> ScalingPredicted | None:
    """What is predicted of the study's trials: what its journal has, since all that was shared out rests on that."""
    known, asked = predicted_in(before), plan.request.plan
    begun = any(isinstance(entry.record, TrialStarted) for entry in before)
    if asked is None or not (known or begun):
        return known or _predicted(plan)
    if known is None or abspath(asked) != abspath(known.source):
        fix = "leave out --plan" if known is None else f"use {known.source}, or leave out --plan"
        raise UserError("a study resumes with the plan it was begun with", asked, fix)
    return known


def _predicted(plan: Plan) -> ScalingPredicted | None:
    """What the request's plan says of the study's trials, if it names one."""
    request = plan.request
    if request.plan is None or request.trial_workers is None:
        return None
    made = plan_in(request.plan)
    samples = [*corners(plan.space, request.seed), *probe(plan.space, PROBED, request.seed)]
    told = [each.values.get(BATCH, plan.config.get(BATCH)) for each in samples]
    batches = [each for each in told if isinstance(each, int) and each > 0] or [int(made.found["size"]["batch_size"])]
    return predict_scaling(made, request.plan, request.program.path, request.execution, batches, request.trial_workers)


def _allocation(
    request: StudyRequest, told: ScalingPredicted | None, *, holds: bool
) -> tuple[MakeRebalancer | None, HeldTrials | None]:
    """How trials share workers, and which of them are held back (``holds``: some may be)."""
    choice = parse_allocation(request.allocation)
    if request.trial_workers is None or not choice.from_journal:
        return sharing(request.trial_workers, request.execution, choice, predicted=told), None
    replica = 1 if request.execution.mesh is None else request.execution.first_mesh.replica
    courses = choice.courses(replica, scaling_prior(told, replica))
    share = sharing(request.trial_workers, request.execution, choice, courses, told)
    return share, HeldTrials(courses, choice.held if holds else 0.0, MAX_WAIT_S)
