"""Tune a program: check the request, run the study loop on a cluster, return the study."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from os.path import abspath
from pathlib import Path
from typing import Any

from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    Entry,
    Proved,
    Record,
    ScalingPredicted,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPaused,
    TrialStarted,
)
from elastune.core.run import Program
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.command import CommandCluster
from elastune.runtime.clusters.kind import CapacityRequest, ClusterRequest, opened
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.interrupts import Interrupts
from elastune.runtime.job.output import check_out
from elastune.runtime.job.pool import MoneyMeter, Pool
from elastune.runtime.job.preflight import is_checked
from elastune.runtime.job.run import Observe, journal_in
from elastune.runtime.placement import refuse_launcher
from elastune.train.program.space import Space, corners, probe
from elastune.tuning.search.constraint import parse_constraints
from elastune.tuning.search.registry import generation_size, make_schedule
from elastune.tuning.search.schedule import Schedule
from elastune.tuning.search.suggester import Suggester
from elastune.tuning.study.budget import Bounds, StopRules, resume_meter
from elastune.tuning.study.control.acts import StudyControl
from elastune.tuning.study.control.requests import Inbox
from elastune.tuning.study.experiment import TrialProofs, Tuning, trials_left
from elastune.tuning.study.proposals import NoProposals, Proposals
from elastune.tuning.study.rebalancer import MAX_WAIT_S, MakeRebalancer, parse_allocation, sharing
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.resume import study_changes
from elastune.tuning.study.retention import Keeper, KeepNothing, retention_of
from elastune.tuning.study.study_loop import StudyLoop
from elastune.tuning.study.throughput import BATCH, plan_in, predict_scaling, predicted_in, scaling_prior
from elastune.tuning.study.trial_progress import HeldTrials
from elastune.tuning.study.validate import PROBED, Plan, check, check_same_study
from elastune.tuning.study.warm_start import EarlierStudy, earlier_studies, take_over

LASTING = (TrialFinished, TrialPaused, StudyFinished)  # records that must be on the disk before the study goes on


@dataclass(frozen=True)
class Environment:
    """The clock of a study, and the measures that only real time needs; a simulation replaces it.

    Attributes:
        clock: The clock.
        background: Compute proposals in a thread of their own, so that the loop goes on meanwhile.
        durable: Write results to the disk before the study goes on.
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
    fixed_trials: Schedule | None = None,
) -> Study:
    """Search until the budget is spent, the space is exhausted or the user presses Ctrl-C.

    A study that was killed at any time resumes with ``request.resume``. Finished trials count. Unfinished ones go on
    with their own workers within ``request.grace_s``, else from their last checkpoints or their beginnings.

    Args:
        request: The study.
        space: The search space; by default the program's own.
        cluster: Where trials run; by default on this machine, ``request.workers`` at a time. A ``ClusterRequest`` is
            opened after all checks, and closed at the end. If the size of the cluster varies, trials wait for free
            workers, and go on on other hosts.
        observe: Receives every record of the journal.
        environment: The clock of a simulated study.
        given: Trials with fixed settings (``FixedTrials("member", ...)``) instead of a search, also those of an earlier
            call that was cut off. The budget of the study and its stop rules do not bound them.

    Returns:
        The study.

    Raises:
        UserError: For a wrong request, a program that cannot be trained, or a folder with other content.
    """
    refuse_launcher(os.environ, "a study")
    study = checked(request, space, cluster)
    plan, before, earlier, predicted = study.plan, study.before, study.earlier, study.predicted
    settings = plan.settings if fixed_trials is None else {**plan.settings, **_space_in(before)}
    changed = study_changes(settings, before, request.program, request.accept_changes)
    surroundings = environment or Environment()
    with (
        # the journal first, since its lock decides which controller may go on
        journal_in(request.out, request.resume, surroundings.clock.wall) as journal,
        opened(cluster, _room(request, before)) as opened_cluster,
        Interrupts() as interrupts,
        ExitStack() as stack,
    ):
        place = opened_cluster or stack.enter_context(local_cluster(request.program, request.workers))

        def keep(record: Record) -> None:
            journal.write(record, durable=surroundings.durable and isinstance(record, LASTING))
            if observe is not None:
                observe(record)

        meter = resume_meter(request.prices, before, surroundings.clock)
        loop = _loop(
            plan, place, surroundings, keep, journal.settle, meter, None if fixed_trials is None else before, predicted
        )
        stack.callback(loop.close)  # also after an error: a cluster of the caller stays open, but its trials must end
        loop.replay(before, settings, request.command, changed)
        if not (before or request.simulated) and is_checked(request.program):
            keep(Proved("checked"))
        if predicted is not None and predicted_in(before) is None:
            keep(predicted)
        if fixed_trials is not None:
            reason = loop.run(Bounds(), lambda: interrupts.count, fixed_trials)
            loop.finish(reason if reason == "interrupted" else "all that was given is trained")
            return Study.load(request.out)
        for earlier_results in take_over(plan, earlier, place, surroundings.clock, lambda: interrupts.count):
            loop.learn(earlier_results)
        bounds = Bounds(request.trials, request.budget_s, request.worker_hours)
        loop.finish(loop.run(bounds, lambda: interrupts.count))
    return Study.load(request.out)


def local_cluster(program: Program, capacity: int) -> Cluster:
    """Return a cluster on this machine: of workers, or of the processes of the program's command."""
    return LocalCluster(capacity=capacity) if program.command is None else CommandCluster(capacity=capacity)


def refuse_other_hosts(program: Program, cluster: Cluster | ClusterRequest | None) -> None:
    """Raise ``UserError`` if a command is to run on other hosts than this one."""
    if program.command is None or cluster is None or isinstance(cluster, CommandCluster):
        return
    if isinstance(cluster, Cluster) or not cluster.kind.here:
        value = type(cluster).__name__ if isinstance(cluster, Cluster) else f"--cluster {cluster.kind.name}"
        fix = "use --cluster local, or convert the script: elastune init --from"
        raise UserError("the processes of --command run on this machine", value, fix)


@dataclass(frozen=True)
class CheckedStudy:
    """The result of ``checked``: all that ``tune`` needs to begin.

    Attributes:
        plan: The checked request.
        before: The journal so far.
        earlier: The earlier studies of a warm start.
        predicted: The scaling of trials by a plan, if any.
    """

    plan: Plan
    before: list[Entry]
    earlier: Sequence[EarlierStudy]
    predicted: ScalingPredicted | None


def checked(
    request: StudyRequest, space: Space | None = None, cluster: Cluster | ClusterRequest | None = None
) -> CheckedStudy:
    """Make all checks of ``tune`` that need no journal and no cluster. Nothing is written or started.

    Args:
        request: As ``tune`` takes it.
        space: As ``tune`` takes it.
        cluster: As ``tune`` takes it.

    Returns:
        All that ``tune`` needs to begin.

    Raises:
        UserError: As ``tune`` raises it.

    Example:
        >>> print(checked(request).plan.config)
    """
    refuse_other_hosts(request.program, cluster)
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
    """The summary of the space in the journal: trials with fixed settings keep it."""
    settings = [entry.record.settings for entry in before if isinstance(entry.record, StudyStarted)]
    return {"space": settings[-1].get("space", {}) if settings else {}}


def _room(request: StudyRequest, before: Sequence[Entry]) -> CapacityRequest:
    """The workers that a study needs: it begins once one trial can, and distributes workers itself."""
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
    """The request with the stop rules of an earlier controller, unless it has rules of its own."""
    settings = [entry.record.settings for entry in before if isinstance(entry.record, StudyStarted)]
    if not settings:
        return request
    until, patience = settings[-1].get("until", ()), settings[-1].get("patience")
    kept = request.patience if request.patience is not None else patience
    return replace(request, until=request.until or tuple(until), patience=kept)


def _loop(
    plan: Plan,
    cluster: Cluster,
    environment: Environment,
    keep: Callable[[Record], None],
    flush: Callable[[], None],
    meter: MoneyMeter | None,
    unsearched: Sequence[Entry] | None,
    predicted: ScalingPredicted | None,
) -> StudyLoop:
    """Build the study loop of a checked request.

    ``unsearched`` is the journal so far of a study without a search; None: there is a search. ``predicted`` is the
    scaling of its trials by a plan.
    """
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
        proposals = Proposals(suggester, inline=not environment.background)
        every = generation_size(request.sampler)
        rules = StopRules(parse_constraints(request.until), request.patience, every, pricing.objectives)
    retention = retention_of(request.keep, request.keep_bytes, population=schedule.parents)
    share, holding = _allocation(request, predicted, holds=not schedule.parents and unsearched is None)
    pauses = schedule.pauses or holding is not None
    return StudyLoop(
        Tuning(plan, cluster.files, checkpoints=pauses or cluster.varies or retention != KeepNothing()),
        schedule,
        proposals,
        Pool(cluster, most=request.workers, timeout_s=request.trial_timeout_s, clock=environment.clock, meter=meter),
        environment.clock,
        keep,
        Keeper(retention, cluster.files, request.out, request.keep_bytes),
        flush=flush,
        share=share,
        holding=holding,
        rules=rules,
        proofs=TrialProofs(unchecked=request.unchecked or request.program.command is not None),
        control=StudyControl(
            None if request.simulated else Inbox(request.out),
            fewest=request.execution.workers if request.trial_workers is None else request.trial_workers[0],
        ),
    )


def _study_prediction(plan: Plan, before: Sequence[Entry]) -> ScalingPredicted | None:
    """The predicted scaling of trials. A prediction in the journal comes first, since earlier decisions used it."""
    journaled, plan_folder = predicted_in(before), plan.request.plan
    has_trials = any(isinstance(entry.record, TrialStarted) for entry in before)
    if plan_folder is None or not (journaled or has_trials):
        return journaled or _predict(plan)
    if journaled is None or abspath(plan_folder) != abspath(journaled.source):
        fix = "leave out --plan" if journaled is None else f"use {journaled.source}, or leave out --plan"
        raise UserError("a study resumes with the plan it was begun with", plan_folder, fix)
    return journaled


def _predict(plan: Plan) -> ScalingPredicted | None:
    """The scaling of trials by the request's plan, if any."""
    request = plan.request
    if request.plan is None or request.trial_workers is None:
        return None
    folder = Path(request.plan)
    made = plan_in(folder)
    samples = [*corners(plan.space, request.seed), *probe(plan.space, PROBED, request.seed)]
    sizes = [each.values.get(BATCH, plan.config.get(BATCH)) for each in samples]
    batches = [each for each in sizes if isinstance(each, int) and each > 0] or [int(made.answer["size"]["batch_size"])]
    return predict_scaling(made, folder, request.program.path, request.execution, batches, request.trial_workers)


def _allocation(
    request: StudyRequest, predicted: ScalingPredicted | None, *, holds: bool
) -> tuple[MakeRebalancer | None, HeldTrials | None]:
    """How trials share workers, and which trials are held back; ``holds``: whether any may be."""
    choice = parse_allocation(request.allocation)
    if request.trial_workers is None or not choice.from_journal:
        return sharing(request.trial_workers, request.execution, choice, predicted=predicted), None
    replica = 1 if request.execution.mesh is None else request.execution.first_mesh.replica
    courses = choice.courses(replica, scaling_prior(predicted, replica))
    share = sharing(request.trial_workers, request.execution, choice, courses, predicted)
    return share, HeldTrials(courses, choice.held if holds else 0.0, MAX_WAIT_S)
