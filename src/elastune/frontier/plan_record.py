"""A cluster's plan as plain JSON: what ``elastune plan --json`` prints, its journal keeps, and a report reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from elastune.core.run import Program
from elastune.frontier.cluster_planning import PlanFound, PlanRequest
from elastune.frontier.measured_plans import BATCH, MeasuredPlan, TrainingPlan
from elastune.job.output_dir import JOURNAL
from elastune.journal.records import PlanMade
from elastune.journal.writer import JournalWriter
from elastune.plan.cluster_plan import ClusterPlan
from elastune.plan.search_time import SearchModel
from elastune.study.results.command import run_command


def record_of(request: PlanRequest, found: PlanFound) -> PlanMade:
    """What the journal of a plan keeps."""
    return PlanMade(str(request.program.path), asked_json(request), plan_json(request, found), dict(found.constants))


def keep_plan(request: PlanRequest, found: PlanFound) -> PlanMade:
    """What the journal keeps, written where the request has a folder for it."""
    record = record_of(request, found)
    if request.out is not None:
        with JournalWriter(request.out / JOURNAL) as journal:
            journal.write(record, durable=True)
    return record


def asked_json(request: PlanRequest) -> dict[str, Any]:
    """The request, without the program's path and the folders."""
    return {
        "nodes": request.nodes.count,
        "workers_each": request.nodes.workers_each,
        "mesh": None if request.mesh is None else str(request.mesh),
        "memory_bytes": request.bounds.memory_bytes,
        "deadline_s": request.bounds.deadline_s,
        "price_per_worker_hour": request.bounds.price_per_worker_hour,
        "link_seconds_per_byte": request.link.seconds_per_byte,
        "calibrate_s": request.calibrate_s,
        "config": dict(request.config),
        "seed": request.seed,
    }


def plan_json(request: PlanRequest, found: PlanFound) -> dict[str, Any]:
    """The answer; numbers that are not finite are None."""
    plain = asdict(found)
    plain["plans"] = [_plan(each, request, found) for each in found.plans]
    plain["measured"] = [_measured(each) for each in found.measured]
    del plain["doublings"]
    plain["gains"] = {axis: each.factor for axis, each in found.doublings.items() if each.factor is not None}
    plain["reasons"] = {axis: each.why for axis, each in found.doublings.items()}
    told: dict[str, Any] = _finite(plain)
    return told


def command_of(plan: ClusterPlan, program: Program, config: Mapping[str, Any], seed: int, own_batch: int) -> str:
    """The command that trains once as ``plan`` does. ``own_batch``: the program's, which needs no setting."""
    means = TrainingPlan(plan.mesh, plan.batch, plan.micro, plan.sharded).means
    settings = {**config, **({} if plan.batch == own_batch else {BATCH: plan.batch})}
    told = {name: value for name, value in means.to_json().items() if value is not None and name != "device"}
    return run_command(str(program.path), settings, told, seed, data=program.told_data)


def search_command_of(
    plan: ClusterPlan,
    program: Program,
    config: Mapping[str, Any],
    seed: int,
    own_batch: int,
    search: SearchModel,
    sampler: str = "auto",
) -> str:
    """The command that searches as ``plan`` does: so many trainings at once, and as many in all as they then need."""
    one = command_of(plan, program, config, seed, own_batch).replace("elastune run ", "elastune tune ", 1)
    trials = math.ceil(search.needed(np.array([float(plan.width)]))[0])
    stopping = "" if search.kept == 1 else " --stopping asha"
    by = "" if sampler == "auto" else f" --sampler {sampler}"
    return f"{one} --workers {plan.workers} --trials {trials}{by}{stopping}"


def _plan(each: ClusterPlan, request: PlanRequest, found: PlanFound) -> dict[str, Any]:
    deadline_s, own = request.bounds.deadline_s, found.size.batch_size
    told = each, request.program, request.config, request.seed, own
    return {
        **asdict(each),
        "mesh": str(each.mesh),
        "workers": each.workers,
        "cost_interval": each.cost_interval,
        "odds": None if deadline_s is None else each.odds(deadline_s),
        "command": command_of(*told),
        "search_command": search_command_of(*told, found.search, request.sampler),
    }


def _measured(each: MeasuredPlan) -> dict[str, Any]:
    errors = {"step_error": each.step_error, "memory_error": each.memory_error, "within": each.within}
    return {**asdict(each), "mesh": str(each.mesh), **errors}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
