"""``--dry-run``: print what a command would start, after every check that needs no worker."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastune.cli.output import OK, print_json
from elastune.core.formatting import count, duration, number, plain, settings_text
from elastune.core.plan.memory import copies_text
from elastune.core.run import ExecutionSettings, Program, RunSpec

if TYPE_CHECKING:
    from elastune.tuning.frontier.checked_request import CheckedFrontier
    from elastune.tuning.study.validate import Plan

BATCH = "batch_size"  # by this name a program has its batch in its config
LAUNCHER = "launcher"
WORDS = {"local": "this machine", LAUNCHER: "the workers that torchrun, srun or mpirun started"}


def print_dry_run(facts: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the facts of a dry run; return the exit code."""
    if as_json:
        print_json({"kind": "dry_run", **facts})
    else:
        print("\n".join(dry_run_lines(facts)))
    return OK


def dry_run_lines(facts: Mapping[str, Any]) -> list[str]:
    """The ``facts`` of one of the functions below as lines for people."""
    rows = {name: text for name, text in _rows(facts).items() if text}
    return [f"dry run of elastune {facts['command']}: all checks passed, nothing was started or written", *(
        f"{name:<9} {text}" for name, text in rows.items()
    )]  # fmt: skip


def of_run(spec: RunSpec, cluster: str) -> dict[str, Any]:
    """The facts of a run. Raises ``UserError`` as the run itself does before its first worker."""
    from elastune.runtime.job.validation import check_run
    from elastune.train.program.load import load_as_guest, merge

    check_run(spec)
    config = merge(load_as_guest(spec.program, spec.seed).config, spec.config)
    bounds = {"epochs": spec.epochs or config.get("epochs"), "max_steps": spec.max_steps}
    return {
        "command": "run",
        **_common_facts(spec.program, spec.out, cluster, spec.seed, config),
        **_execution_facts(spec.execution),
        "most_workers": spec.most_workers,
        "sync": str(spec.sync),
        "policies": list(spec.adapt.policies),
        "copies_note": copies_text(spec.execution),
        **{name: value for name, value in bounds.items() if value is not None},
    }


def of_study(plan: Plan, cluster: str) -> dict[str, Any]:
    """The facts of a study, from its checked request."""
    request = plan.request
    return {
        "command": "tune",
        **_common_facts(request.program, request.out, cluster, request.seed, plan.config),
        **_execution_facts(request.execution),
        "study_workers": request.workers,
        "trial_workers": request.trial_workers,
        "trials": request.trials,
        "budget_s": request.budget_s,
        "worker_hours": request.worker_hours,
        "objectives": {objective.name: objective.direction for objective in plan.pricing.objectives},
        "sampler": request.sampler,
        "stopping": request.stopping,
        "copies_note": copies_text(request.execution),
    }


def of_frontier(plan: CheckedFrontier, cluster: str) -> dict[str, Any]:
    """The facts of a frontier, from its checked request."""
    request = plan.request
    return {
        "command": "frontier",
        **_common_facts(request.program, request.out, cluster, request.seed, plan.config),
        "mode": request.execution.mode,
        "device": request.execution.device,
        "asked": [{"workers": layout.workers, "mesh": str(layout.first_mesh)} for layout in plan.layouts],
        "budget_s": request.budget_s,
        "quality": plan.quality.name,
        "target": request.target,
        "sampler": request.sampler,
        "stopping": request.stopping,
        "policies": list(request.policies),
    }


def _common_facts(program: Program, out: Path, cluster: str, seed: int, config: Mapping[str, Any]) -> dict[str, Any]:
    batch = config.get(BATCH)
    batch_fact = {BATCH: batch} if isinstance(batch, int) and not isinstance(batch, bool) else {}
    return {
        "program": str(program.path) if program.command is None else shlex.join(program.command.words),
        "out": str(out),
        "cluster": cluster,
        "seed": seed,
        "config": dict(config),
        **batch_fact,
    }


def _execution_facts(execution: ExecutionSettings) -> dict[str, Any]:
    return {
        "workers": execution.workers,
        "mesh": str(execution.first_mesh),
        "mechanism": execution.mechanism,
        "mode": execution.mode,
        "num_slots": execution.num_slots,
        "micro_batch": execution.micro_batch,
        "device": execution.device,
    }


def _rows(facts: Mapping[str, Any]) -> dict[str, str]:
    where = WORDS.get(facts["cluster"], f"--cluster {facts['cluster']}")
    return {
        "program": plain(facts["program"]),
        "workers": _workers(facts),
        "state": facts.get("copies_note", ""),
        "batch": _batch(facts),
        "search": _search(facts),
        "length": ", ".join(_length(facts)),
        "cluster": f"{where}, device {facts['device']}",
        "settings": f"{settings_text(facts['config'])}; seed {facts['seed']}",
        "results": f"{plain(facts['out'])} (not made)",
    }


def _workers(facts: Mapping[str, Any]) -> str:
    if facts["command"] == "frontier":
        workers_text = ", ".join(f"{layout['workers']} ({layout['mesh']})" for layout in facts["asked"])
        return f"{workers_text}; {facts['mode']} mode"
    layout = f"{facts['mesh']}, {facts['mechanism']}, {facts['mode']} mode, {count(facts['num_slots'], 'slot')}"
    if facts["command"] == "tune":
        shared = facts["trial_workers"]
        workers_text = f"{shared[0]} to {shared[1]} a trial" if shared else f"{facts['workers']} a trial"
        return f"{count(facts['study_workers'], 'worker')}, {workers_text} ({layout})"
    most = facts["most_workers"]
    changing = f", at most {most}" if most > facts["workers"] else ""
    return f"{count(facts['workers'], 'worker')}{changing} ({layout})"


def _batch(facts: Mapping[str, Any]) -> str:
    if BATCH not in facts:
        return "as the program asks for it (its config has no batch_size)"
    micro = facts.get("micro_batch")
    passes = "" if micro is None else f", in passes of at most {micro:,} on a worker"
    return f"{count(facts[BATCH], 'sample')} a step{passes}"


def _search(facts: Mapping[str, Any]) -> str:
    if facts["command"] == "run":
        return ""
    goal = (
        ", ".join(f"{name}:{direction}" for name, direction in facts.get("objectives", {}).items()) or facts["quality"]
    )
    target = "" if facts.get("target") is None else f", target {number(facts['target'])}"
    return f"{goal}{target}; sampler {facts['sampler']}, early stopping {facts['stopping']}"


def _length(facts: Mapping[str, Any]) -> list[str]:
    """The limits on the length, as far as options set them."""
    limits = [] if facts.get("trials") is None else [count(facts["trials"], "trial")]
    limits += [] if facts.get("budget_s") is None else [f"a budget of {duration(facts['budget_s'])}"]
    limits += [] if facts.get("worker_hours") is None else [f"{number(facts['worker_hours'])} worker-hours"]
    limits += [] if "epochs" not in facts else [f"epochs {facts['epochs']}"]
    return limits + ([] if "max_steps" not in facts else [f"at most {count(facts['max_steps'], 'step')}"])
