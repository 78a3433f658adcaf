"""A study's request, checked: everything that can be known to be wrong before a trial runs.

Constraints that no configuration can satisfy are wrong too. They are found by enumerating a small space, and by
sampling a large one.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from elastune.adapt.policies.library.registry import policies_of
from elastune.core.checkpoint_keeping import KeepCheckpoints
from elastune.core.command import TrainingCommand
from elastune.core.cost import MEASURED
from elastune.core.errors import UserError
from elastune.core.journal.folds import Change
from elastune.core.journal.records import Entry, StudyStarted, TrialFinished, TrialStarted
from elastune.core.run import (
    Adapt,
    Config,
    Elastic,
    ExecutionSettings,
    ProgramSource,
    RunSpec,
    changed_settings,
    check_verification,
)
from elastune.core.sync_plan import SyncChoice, chooses, in_full, strategy_settings
from elastune.runtime.job.validation import check_adapt, check_execution, check_values, spot_of, why_impossible
from elastune.train.checkpoints.start_from import digest_of_weights
from elastune.train.program.command import check_executable
from elastune.train.program.command import check_values as check_command_values
from elastune.train.program.load import LoadedProgram, load_as_guest, setting_of
from elastune.train.program.overrides import override
from elastune.train.program.source import program_digest, reported_metrics, source_of
from elastune.train.program.space import Sample, Space, corners, enumerate_all, probe
from elastune.tuning.search.constraint import (
    SECONDS_TO_TARGET,
    Constraint,
    all_texts,
    evaluate,
    parse_constraints,
    parse_target,
    violations,
)
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.registry import check_sampler, generational, make_schedule
from elastune.tuning.study.rebalancer import parse_allocation
from elastune.tuning.study.request import SearchRequest, StudyRequest
from elastune.tuning.study.resume import SpaceSummary, summarize_space
from elastune.tuning.study.resume import changed_settings as differences
from elastune.tuning.study.retention import retention_of
from elastune.tuning.study.trial_results import SYSTEM_PARAMETERS, Pricing, system_defaults
from elastune.tuning.study.trial_results import settings as trial_settings

PROBED = 64  # configurations that are checked before any trial runs
MAX_ENUMERATED = 2000  # a space with no more configurations is checked completely
MAX_SAMPLED = 1000  # configurations of a larger space that are checked
_FIX = "loosen it, or widen the space"
_MIRRORED = {"<=": ">=", "<": ">", ">=": "<=", ">": "<", "==": "=="}
_MARGIN = 1e-9  # of an equality, relative to its number (absolute below 1)


@dataclass(frozen=True)
class Plan:
    """A checked request: the result of ``check``.

    Attributes:
        request: The request, with all constraints.
        space: The space, completed with the program's config and the execution settings.
        config: The program's config with the user's settings.
        pricing: The objectives, constraints and prices by which trials are judged.
        program: The program.
        source: The digests of the program's source.
        seen: A summary of the user's space.
    """

    request: StudyRequest
    space: Space
    config: Config
    pricing: Pricing
    program: LoadedProgram
    source: ProgramSource = field(default_factory=dict)
    seen: SpaceSummary = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The request as the journal holds it."""
        prices = self.request.prices
        plain = asdict(replace(self.request, prices=None))
        del plain["command"]  # the journal has it beside the settings
        plain["prices"] = None if prices is None else prices.digest  # a trace may be long
        plain["train"] = self.request.program.train
        plain["program"], plain["out"] = str(self.request.program.path), str(self.request.out)
        plain["data"] = self.request.program.data_text
        plain |= {"arguments": list(arguments)} if (arguments := self.request.program.arguments) else {}
        plain |= {} if (command := self.request.program.command) is None else {"training_command": command.to_json()}
        plain["start_from"] = self.request.start_from and self.request.start_from.to_json()
        plain["execution"] = self.request.execution.to_json()
        plain |= self.request.sync.to_json()
        plain["objectives"] = {o.name: o.direction for o in self.pricing.objectives}
        plain["defaults"] = self.config
        plain["plan"] = None if self.request.plan is None else str(self.request.plan)
        plain["warm_start"] = [str(path) for path in self.request.warm_start]
        plain["program_digest"] = program_digest(self.request.program)
        plain["source"], plain["space"] = self.source, self.seen
        del plain["accept_changes"], plain["unchecked"], plain["verify"]  # they count for one call only
        return {"kind": "tune", **plain}


def check(request: StudyRequest, space: Space | None = None) -> Plan:
    """Return the checked ``request``. Raises ``UserError`` for all that is known to be wrong before a trial runs."""
    bounds = (request.trials, request.budget_s, request.worker_hours, request.patience)
    ends = request.sampler == "grid" and not request.stopping.startswith("pbt")  # a population never ends by itself
    if not ends and all(bound is None for bound in bounds):
        fix = "use --trials, --budget, --worker-hours or --patience"
        raise UserError("a study needs a budget", "none", fix)
    _check_rules(request)
    if request.trials is not None and request.trials < 1:
        raise UserError("trials must be at least 1", request.trials, "use --trials 1 or more")
    if request.budget_s is not None and not request.budget_s > 0:
        raise UserError("a budget must be positive", request.budget_s, "for example --budget 3m")
    if request.seed < 0:
        raise UserError("a study's seed must be 0 or more", request.seed, "for example --seed 0")
    if request.epochs is not None and request.epochs < 1:
        raise UserError("epochs must be at least 1", request.epochs, "use --epochs 1 or more")
    if request.worker_hours is not None and not 0 < request.worker_hours < math.inf:
        raise UserError("a budget must be positive and finite", request.worker_hours, "for example --worker-hours 8")
    elastic = Elastic(collective_timeout_s=request.collective_timeout_s)
    spec = RunSpec(request.program, request.out, seed=request.seed, execution=request.execution, elastic=elastic)
    spec = replace(spec, sync=request.sync.sync, sync_schedule=request.sync.schedule)
    check_execution(spec)
    check_verification(replace(spec, verify=request.verify_plan, elastic=replace(elastic, high=2)))
    if request.workers < 1:
        raise UserError("workers must be at least 1", request.workers, "use --workers 1 or more")
    program = load_as_guest(request.program, request.seed)
    if not (request.simulated or program.trains):
        rule = f"a program that is trained must define {request.program.train}(session)"
        raise UserError(rule, request.program.path, "add it, or use elastune simulate")
    user_space = space or program.space
    if user_space is None:
        raise UserError("tuning needs a search space", request.program.path, "define space(trial) in the file")
    objectives = parse_objectives(request.objectives or program.objectives or {})
    names = {*program.objectives, *MEASURED, SECONDS_TO_TARGET}
    for objective in objectives:
        if program.objectives and objective.name not in names:
            fix = f"use one of {', '.join(sorted(names))}, or add it to the file's objectives"
            raise UserError("an objective must be one that the program names", objective.name, fix)
    check_sampler(request.sampler, objectives)
    schedule = make_schedule(request.stopping, objectives, request.seed, space=user_space)
    retention_of(request.keep, request.keep_bytes, population=schedule.parents)
    KeepCheckpoints.parse(request.keep_checkpoints).directed({each.name: each.direction for each in objectives})
    if generational(request.sampler) and request.stopping != "none":
        rule = "a generation ends when all of its trials have, so none may pause"
        raise UserError(rule, f"{request.sampler} with {request.stopping}", "use genetic with steady=1, or no stopping")
    config = override(program.config, request.config, user_space)
    program.check(request.config)
    request = replace(request, constraints=all_texts(program.constraints, request.constraints))
    constraints = parse_constraints(request.constraints)

    def complete_space(trial: Any) -> dict[str, Any]:
        returned = user_space(trial)
        chosen = returned if isinstance(returned, Mapping) else {}  # the caller refuses any other result
        agreed = {} if request.sync == SyncChoice() and not chooses(chosen) else request.sync.to_json()
        return in_full({**config, **system_defaults(request.execution, chosen), **agreed, **returned}, config)

    if request.program.command is not None:
        check_command(request, request.program.command, config, user_space)
    samples = [*corners(complete_space, request.seed), *probe(complete_space, PROBED, request.seed)]
    _check_set(request.config, samples)
    _check_until(request, program, {*config, *(name for sample in samples for name in sample.values)})
    _check_policies(samples, program)
    check_adapt(Adapt((), tuple(request.monitors)), program, replace(spec, sync=request.sync.sync))
    _check_bounds(request, samples)
    request = replace(request, execution=_with_slots(request, samples, config))
    _check_trials(request, samples, constraints, config)
    check_feasible(complete_space, constraints, {}, request.seed)
    target = None if request.target is None else parse_target(request.target)
    pricing = Pricing(objectives, constraints, request.price_per_worker_hour, target)
    if pricing.wants_target and target is None:
        fix = 'say which, for example --target "accuracy >= 0.97"'
        raise UserError(f"{SECONDS_TO_TARGET} needs a target", "none", fix)
    if (start := request.start_from) is not None:  # a digest, since the folder may change during the study
        request = replace(request, start_from=replace(start, sha256=digest_of_weights(start.source)))
    source, seen = source_of(request.program), summarize_space(user_space, request.seed)
    return Plan(request, complete_space, config, pricing, program, source, seen)


def check_command(
    request: SearchRequest, command: TrainingCommand, config: Config, user_space: Space, names: Collection[str] = ()
) -> None:
    """Check what only a study of ``--command`` can get wrong. Starts nothing.

    Args:
        request: The study, or the frontier.
        command: The command.
        config: The settings of all trials.
        user_space: The search space.
        names: Settings that every trial has from elsewhere.

    Raises:
        UserError: For a setting that a command cannot have, and as ``check_values`` raises it.
    """
    check_executable(command)
    samples = [*corners(user_space, request.seed), *probe(user_space, PROBED, request.seed)]
    check_command_values(command, {**config, **dict.fromkeys(names, 1)}, samples, SYSTEM_PARAMETERS, request.epochs)
    usual = ExecutionSettings(mode=request.execution.mode)
    free = ("workers", "num_slots", "device")
    for each in fields(ExecutionSettings):
        chosen = getattr(request.execution, each.name)
        if each.name not in free and chosen != getattr(usual, each.name):
            fix = "leave it out, and let the command have an option for it"
            raise UserError("a command decides itself how its processes compute", f"{each.name}={chosen}", fix)
    for name in ("policies", "monitors", "trial_workers", "start_from", "grace_s", "plan"):
        if value := getattr(request, name, None):
            rule = "a command's training cannot change from outside while it runs"
            raise UserError(rule, f"{name}={value}"[:100], "leave it out, or convert the script: elastune init --from")
    if request.stopping.startswith("pbt") or getattr(request, "keep", "none") != "none":
        rule = "elastune neither reads nor copies the checkpoints of a command"
        got = f"stopping={request.stopping}, keep={getattr(request, 'keep', 'none')}"
        raise UserError(rule, got, "use asha, hyperband or none, and leave --keep out")
    if request.stopping != "none" and request.epochs is None and not isinstance(config.get("epochs"), int):
        rule = "early stopping needs the number of epochs of a whole training"
        raise UserError(rule, f"{request.stopping}, no epochs", "put {epochs} into --command, and use --epochs N")


def _check_rules(request: StudyRequest) -> None:
    for rule in parse_constraints(request.until):
        if hidden := sorted(name for name in rule.names if name.startswith("test_")):
            raise UserError("no search sees held-out metrics", hidden[0], "let --until name a validation metric")
    patience = request.patience
    if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
        raise UserError("patience must be a whole number, at least 1", patience, "for example --patience 10")


def _check_until(request: StudyRequest, program: LoadedProgram, settings: set[str]) -> None:
    """Refuse a condition on a metric that the program never reports, where its file shows them all."""
    reported = None if program.surrogate is not None else reported_metrics(request.program)
    if reported is None:
        return
    names = {*settings, *reported, *program.objectives, *MEASURED, SECONDS_TO_TARGET}
    for rule in parse_constraints(request.until):
        if missing := sorted(rule.names - names):
            fix = f"known: {', '.join(sorted(names))}"
            raise UserError("--until may name settings and reported metrics", missing[0], fix)


def _check_set(config: Config, samples: Sequence[Sample]) -> None:
    """Refuse a setting that the space would silently replace."""
    for name, value in config.items():
        plain = json.loads(json.dumps(value))  # as a space's values are
        if any(setting_of(sample.values, name) != plain for sample in samples):
            fix = f"leave out {name} here, or in what space(trial) returns"
            raise UserError("a setting is either set or searched", f"{name}={value!r}", fix)


def _with_slots(request: StudyRequest, samples: Sequence[Sample], config: Config) -> ExecutionSettings:
    """The execution settings with a slot for each worker of the largest trial.

    All trials have as many slots: in ``exact`` mode a trial's number of workers does not show in its result.
    """
    slots = request.execution.num_slots
    for sample in samples:
        try:
            _, execution, _ = trial_settings(sample.values, config, request.execution, request.workers)
        except UserError:  # the trial is refused where all that it chooses is checked
            continue
        slots = max(slots, execution.num_slots)
    return replace(request.execution, num_slots=slots)


def _check_policies(samples: Sequence[Sample], program: LoadedProgram) -> None:
    """Refuse a policy of the space that cannot be built, before trials train for hours."""
    named = [policies_of(sample.values["policy"]) for sample in samples]
    for policies in dict.fromkeys(named):
        check_adapt(Adapt(policies), program)
        if spot_of(Adapt(policies), program):
            raise UserError("a deadline is for one run", "the policy spot in a study", "leave it out of space(trial)")


def _check_trials(
    request: StudyRequest, samples: Sequence[Sample], constraints: Sequence[Constraint], config: Config
) -> None:
    """Refuse a space whose execution settings let no trial run, not counting those that a constraint rejects."""
    seen: set[str] = set()
    possible, impossible = False, None
    for sample in samples:
        if any(violation > 0 for violation in violations(constraints, sample.values).values()):
            continue
        _, execution, _ = trial_settings(sample.values, config, request.execution, request.workers)
        execution = execution if request.trial_workers is None else execution.on(request.trial_workers[0])
        try:
            agreed = SyncChoice.of(sample.values, config)
        except UserError as why:
            if not strategy_settings(sample.values, config):
                raise  # the text itself is wrong, whatever the other parameters
            impossible = impossible or why
            continue
        if request.simulated and agreed != SyncChoice():
            rule = "what a strategy changes about a training is not simulated"
            raise UserError(rule, str(agreed.sync), "leave sync and sync_schedule out of space(trial)")
        if (key := repr((execution, agreed))) not in seen:
            seen.add(key)
            execution = replace(execution, num_slots=agreed.slots(execution.num_slots))
            spec = RunSpec(
                request.program, request.out, execution=execution, sync=agreed.sync, sync_schedule=agreed.schedule
            )
            check_values(spec)
            why_not = why_impossible(spec)  # settings that are impossible here only become infeasible trials
            possible, impossible = possible or why_not is None, impossible or why_not
    if impossible is not None and not possible:
        raise impossible


def _check_bounds(request: StudyRequest, samples: Sequence[Sample]) -> None:
    """Check that workers are distributed among the trials, or searched, or the same for all trials."""
    parse_allocation(request.allocation)
    if request.trial_workers is None:
        if request.allocation != StudyRequest.allocation:
            rule = "an allocation says how workers are shared out among trials that run"
            raise UserError(rule, repr(request.allocation), "add --trial-workers LOW:HIGH, or leave it out")
        if request.plan is not None:
            rule = "a plan says how workers are shared out among trials that run"
            raise UserError(rule, f"--plan {request.plan}", "add --trial-workers LOW:HIGH, or leave it out")
        return
    low, high = request.trial_workers
    if not 1 <= low <= high <= request.workers:
        rule = f"a trial's workers must lie within the study's {request.workers}"
        raise UserError(rule, f"{low}:{high}", "use --trial-workers LOW:HIGH with 1 <= LOW <= HIGH")
    chosen = {name for name in ("workers", "mesh") for sample in samples if _chooses(sample, name, request)}
    if chosen:
        rule = "workers are either a parameter of the space or shared out among the trials"
        raise UserError(rule, f"both, {low}:{high}", f"leave out --trial-workers, or the space's {min(chosen)}")
    replica = request.execution.first_mesh.replica if request.execution.mesh is not None else 1
    if low % replica or high % replica:
        rule = f"trials have whole replicas of {replica} workers, as --mesh says"
        fix = f"use --trial-workers {replica}:{max(high // replica, 1) * replica}"
        raise UserError(rule, f"--trial-workers {low}:{high}", fix)


def _chooses(sample: Sample, name: str, request: StudyRequest) -> bool:
    default = request.execution.to_json().get(name)
    return name in sample.params or (name == "mesh" and sample.values.get(name, default) != default)


def check_feasible(space: Space, constraints: Sequence[Constraint], known: Mapping[str, object], seed: int = 0) -> None:
    """Raise ``UserError`` if the constraints contradict each other, or the space and the ``known`` values beside it.

    Constraints contradict each other if the bounds of one name leave nothing between them. They contradict the space if
    no configuration satisfies all constraints that can be decided before a run. All configurations of a small space are
    tried, or a thousand random ones: a search would not find one either.
    """
    _refuse_contradictions(constraints)
    every = enumerate_all(space, MAX_ENUMERATED)
    samples = probe(space, MAX_SAMPLED, seed) if every is None else every
    closest: dict[str, float] = {}
    for sample in samples:
        measured = violations(constraints, {**known, **sample.values})
        broken = {text: violation for text, violation in measured.items() if violation > 0}
        if not broken:
            return
        if not closest or (len(broken), sum(broken.values())) < (len(closest), sum(closest.values())):
            closest = broken
    tried = f"none of {'the space' if every is not None else 'a thousand random ones'}"
    shown = " and ".join(f"'{text}' by {violation:g}" for text, violation in closest.items())
    rule = f"some configuration must satisfy {_quoted(c.text for c in constraints)}"
    raise UserError(rule, f"{tried} does, the closest breaks {shown}", _FIX)


def _refuse_contradictions(constraints: Iterable[Constraint]) -> None:
    """Refuse bounds of a setting, or of a metric that is still unknown, that leave nothing between them."""
    bounds: dict[str, list[tuple[Constraint, str, float]]] = {}
    for constraint in constraints:
        if bound := _bound(constraint):
            bounds.setdefault(min(constraint.names), []).append((constraint, *bound))
    for name, limits in bounds.items():
        low, high = (-math.inf, False), (math.inf, True)  # (bound, left out?) and (bound, included?)
        for _, comparison, number in limits:
            margin = _MARGIN * max(1.0, abs(number)) if comparison == "==" else 0.0
            if comparison in (">=", ">", "=="):
                low = max(low, (number - margin, comparison == ">"))
            if comparison in ("<=", "<", "=="):
                high = min(high, (number + margin, comparison != "<"))
        if low[0] > high[0] or (low[0] == high[0] and (low[1] or not high[1])):
            rule = f"some {name} must satisfy {_quoted(constraint.text for constraint, _, _ in limits)}"
            raise UserError(rule, f"nothing lies above {low[0]:g} and below {high[0]:g}", _FIX)


def _bound(constraint: Constraint) -> tuple[str, float] | None:
    """``(comparison, number)`` of a constraint of the form "name <= number"; None for any other form."""
    comparison, left, right = constraint.comparison, constraint.left, constraint.right
    if isinstance(right, ast.Name):
        comparison, left, right = _MIRRORED[comparison], right, left
    if not isinstance(left, ast.Name):
        return None
    try:
        return comparison, evaluate(right, {})
    except (KeyError, ArithmeticError, ValueError):  # the other side has a name, or is not a number
        return None


def _quoted(texts: Iterable[str]) -> str:
    return " and ".join(f"'{text}'" for text in texts)


def check_course(entries: Sequence[Entry], path: object) -> None:
    """Refuse a journal whose records of a trial cannot follow one another."""
    running: dict[int, bool] = {}
    for entry in entries:
        record = entry.record
        if isinstance(record, TrialStarted) and record.trial not in running:
            running[record.trial] = True
        elif isinstance(record, TrialStarted | Change) and not running.get(record.trial, False):
            what = "had ended before" if record.trial in running else "was never started"
            rule = "a trial's records must follow one another as they happened"
            raise UserError(rule, f"{path}: trial {record.trial} {what} its {record.kind}", "restore the journal")
        elif isinstance(record, TrialFinished):
            running[record.trial] = False


def check_same_study(settings: Mapping[str, Any], entries: list[Entry], path: object) -> None:
    """Refuse to resume a study with settings of another one."""
    check_course(entries, path)
    started = next((e.record for e in entries if isinstance(e.record, StudyStarted)), None)
    if started is None:
        if entries:
            raise UserError("only a study can be resumed as one", path, "use another --out")
        return
    if started.command is None:  # words of a Python script may say to resume; what its parser makes of them may not
        if started.settings.get("arguments", []) != settings.get("arguments", []):
            _check_parsed(started.settings.get("defaults") or {}, settings.get("defaults") or {})
        settings = {**settings, "arguments": started.settings.get("arguments", [])}
    for difference in differences(started.settings, settings):
        raise difference


def _check_parsed(then: Config, now: Config) -> None:
    """Refuse a study whose script now has other values of its own arguments."""
    for name in changed_settings(then, now):
        old, new = (repr(config.get(name, "not set"))[:80] for config in (then, now))
        fix = f"start the script with {name}={old}, or another --out for another study"
        raise UserError(f"a study resumes with the setting {name} it was begun with", f"{new}, begun with {old}", fix)
