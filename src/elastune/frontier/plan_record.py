"""A cluster's plan as plain JSON: what ``elastune plan --json`` prints, its journal keeps, and a report reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from elastune.frontier.cluster_planning import PlanFound, PlanRequest
from elastune.frontier.measured_plans import BATCH, MeasuredPlan
from elastune.frontier.plan_commands import (
    PLACEHOLDER,
    command_of,
    lacks_note,
    placeholder_note,
    search_command_of,
    trials_note,
)
from elastune.job.output_dir import JOURNAL
from elastune.journal.records import PlanMade
from elastune.journal.writer import JournalWriter
from elastune.plan.cluster_plan import ClusterPlan
from elastune.plan.devices import device_named


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
        "cluster": request.cluster_words,
        "device": request.device,
        "copies": request.copies,
        "probe": request.probe,
    }


def plan_json(request: PlanRequest, found: PlanFound) -> dict[str, Any]:
    """The answer; numbers that are not finite are None."""
    plain = asdict(found)
    plain["plans"] = [_plan(each, request, found) for each in found.plans]
    plain["measured"] = [_measured(each) for each in found.measured]
    plain["command_notes"] = command_notes(request, found)
    del plain["doublings"]
    plain["gains"] = {axis: each.factor for axis, each in found.doublings.items() if each.factor is not None}
    plain["reasons"] = {axis: each.why for axis, each in found.doublings.items()}
    told: dict[str, Any] = _finite(plain)
    return told


def _plan(each: ClusterPlan, request: PlanRequest, found: PlanFound) -> dict[str, Any]:
    deadline_s, own = request.bounds.deadline_s, found.size.batch_size
    told = each, request.program, request.config, request.seed, own
    device = None if request.device is None else device_named(request.device).kind
    more: dict[str, Any] = {"copies": request.copies, "device": device, "where": _where(request)}
    search = search_command_of(*told, found.search, request.sampler, chosen=found.chosen, **more)
    return {
        **asdict(each),
        "mesh": str(each.mesh),
        "workers": each.workers,
        "cost_interval": each.cost_interval,
        "odds": None if deadline_s is None else each.odds(deadline_s),
        "command": command_of(*told, **more),
        "search_command": None if found.lacks else search,
    }


def _where(request: PlanRequest) -> str:
    """The options that name the cluster in commands: as given, or a placeholder for several nodes."""
    return request.cluster_words or (PLACEHOLDER if request.nodes.count > 1 else "")


def command_notes(request: PlanRequest, found: PlanFound) -> list[str]:
    """What is to be known of the commands of the first plan, in words."""
    best = found.plans[0]
    notes = [lacks_note(found.lacks)] if found.lacks else [trials_note(best, found.search)]
    other = {BATCH} if best.batch != found.size.batch_size else set[str]()
    if not found.lacks and (left := sorted({*request.config, *other} & set(found.chosen))):
        notes.append(f"the search's command leaves {', '.join(left)} to space(trial), which chooses it")
    if not request.cluster_words and request.nodes.count > 1:
        notes.append(placeholder_note(request.nodes.count))
    return [note for note in notes if note]


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
