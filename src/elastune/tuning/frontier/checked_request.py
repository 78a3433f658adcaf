"""A checked frontier request: the program's own settings, the naive rule, and the space that is searched.

``check`` refuses a wrong request before anything is written or started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elastune.adapt.policies.library.registry import NO_POLICY, build, policies_of
from elastune.core.checkpoint_keeping import KeepCheckpoints
from elastune.core.cost import MEASURED
from elastune.core.errors import UserError
from elastune.core.plan.batch_size import LR_RULES, scaled_lr
from elastune.core.run import Adapt, Config, Elastic, ExecutionSettings, ProgramSource, RunSpec, number
from elastune.core.sync_plan import SyncChoice, in_full, strategy_settings
from elastune.runtime.job.validation import check_adapt, check_execution, spot_of
from elastune.train.program.load import LoadedProgram, load_as_guest, merge
from elastune.train.program.overrides import override
from elastune.train.program.source import source_of
from elastune.train.program.space import Sample, Space, corners, probe
from elastune.tuning.frontier.trainings import VARIANT_SETTINGS, Recipe, StepKind, Training, Variant
from elastune.tuning.frontier.worker_layouts import WorkerLayouts, chosen_layout, first_of, layout_key, layouts_of
from elastune.tuning.search.constraint import Constraint, all_texts, parse_constraints, violations
from elastune.tuning.search.objective import Objective, parse_objectives
from elastune.tuning.search.registry import check_sampler, make_schedule
from elastune.tuning.study.request import FrontierRequest
from elastune.tuning.study.resume import SpaceSummary, summarize_space
from elastune.tuning.study.trial_results import EXECUTION_PARAMETERS, SYSTEM_PARAMETERS
from elastune.tuning.study.validate import check_feasible

PROBED = 64  # configurations that are checked before any is trained
ONE_STRATEGY = "a frontier's step times are those of one strategy"


@dataclass(frozen=True)
class Proposed:
    """A training that the search proposes.

    Attributes:
        recipe: The configuration, and the variant of its execution.
        rule: The rule by which its learning rate follows its batch.
        layout: The worker layout that it is for.
        chosen: Whether the space chose the layout. Otherwise it is the widest layout that the batch fills.
    """

    recipe: Recipe
    rule: str
    layout: ExecutionSettings
    chosen: bool


@dataclass(frozen=True)
class CheckedFrontier:
    """A frontier's request after all checks, with everything that follows from it: what it trains and searches.

    Attributes:
        request: The request.
        config: The program's own settings, with those that the request replaces.
        quality: The objective that must hold.
        user_space: The program's search space.
        constraints: The constraints of program and request.
        worker_layouts: The worker layouts that the frontier answers for; the search adds to them.
        program: The loaded program.
        named: The layouts and variants that the space chose in the configurations that were checked.
        timeable: The most workers whose steps can be timed; None: any number.
        source: A digest of the program's source, for resuming.
        seen: A summary of the space, for resuming.
        samples: The size of the training set, once a run has reported it; None: not known, and no batch is cut.
        beyond: Of a command: further worker counts, whose times are modelled only.
    """

    request: FrontierRequest
    config: Config
    quality: Objective
    user_space: Space
    constraints: tuple[Constraint, ...]
    worker_layouts: WorkerLayouts
    program: LoadedProgram
    named: tuple[tuple[ExecutionSettings, Variant], ...] = ()
    timeable: int | None = None
    source: ProgramSource = field(default_factory=dict)
    seen: SpaceSummary = field(default_factory=dict)
    samples: int | None = None
    beyond: tuple[int, ...] = ()

    @property
    def layouts(self) -> tuple[ExecutionSettings, ...]:
        """The worker layouts asked about."""
        return self.worker_layouts.requested

    @property
    def variant(self) -> Variant:
        """The variant that was asked for."""
        return self.worker_layouts.variant

    @property
    def together(self) -> bool:
        """Whether some training needs as many workers as it is for, because they show in its result."""
        return bool(self.request.policies) or not all(
            variant.alone for variant in (self.variant, *(variant for _, variant in self.named))
        )

    @property
    def axes(self) -> tuple[Objective, ...]:
        """The objectives of the front: quality, time and cost."""
        return (self.quality, *parse_objectives({"seconds": "min", "cost": "min"}))

    @property
    def searched(self) -> tuple[Objective, ...]:
        """The objectives of the sampler: quality, and time at the largest worker count."""
        return (self.quality, *parse_objectives({"seconds": "min"}))

    @property
    def base_batch(self) -> int:
        """The program's own batch size, that of one worker."""
        return int(number(self.config, "batch_size"))

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts the layouts cut a batch, ascending. Quality depends on nothing else of a layout."""
        return tuple(sorted({layout.num_slots for layout in self.layouts}))

    def real_batch(self, batch: int) -> int:
        """``batch``, cut at the size of the training set."""
        return batch if self.samples is None else min(batch, self.samples)

    def naive_batch(self, parts: int) -> int:
        """The global batch of the naive rule: the program's own x ``parts``, cut at the size of the training set."""
        return self.real_batch(self.base_batch * parts)

    def naive(self, parts: int) -> Config:
        """The naive rule: global batch and learning rate x ``parts``, cut at the size of the training set."""
        batch, base = self.naive_batch(parts), self.real_batch(self.base_batch)
        lr = number(self.config, "lr") * (batch / base)
        return {**self.config, "batch_size": batch if batch != base else self.base_batch, "lr": lr}

    @property
    def cut(self) -> tuple[str, ...]:
        """A line for each batch of the naive rule that exceeds the training set."""
        return tuple(
            f"batch {self.base_batch * parts:,} of {parts} workers is cut to the {self.samples:,} samples of the "
            f"training set, and its learning rate to {self.naive(parts)['lr']:.4g}"
            for parts in self.parts
            if self.samples is not None and self.base_batch * parts > self.samples
        )

    def naive_recipe(self, parts: int, policies: tuple[str, ...] = ()) -> Recipe:
        """The naive rule in the variant that was asked for, perhaps under policies."""
        return Recipe(self.naive(parts), replace(self.variant, policies=policies))

    def execution(self, parts: int, variant: Variant | None = None) -> ExecutionSettings:
        """The execution settings of a training for layouts of ``parts``: one slot each, unless learners need more."""
        return (variant or self.variant).trainer(self.worker_layouts.first(parts))

    def kind(self, parts: int, variant: Variant | None = None) -> StepKind:
        """The kind of steps of the first layout with so many parts. Settings are ranked by their time on it."""
        return self.worker_layouts.kind(self.worker_layouts.first(parts), variant or self.variant)

    def kind_of(self, training: Training) -> StepKind:
        """The kind of steps of the layout that ``training`` was for."""
        if training.layout is None and training.parts in self.worker_layouts.parts:
            return self.kind(training.parts, training.variant)
        return self.kind_for_search(training)  # its layout is no longer asked about: the widest

    def kind_for_search(self, training: Training) -> StepKind:
        """The kind of steps by which the search judges it: of the layout that its space chose, or else the widest."""
        layout = self.worker_layouts.widest if training.layout is None else training.layout
        return self.worker_layouts.kind(layout, training.variant)

    def searched_for(self, batch: int) -> int:
        """For how many parts the search trains a ``batch``: the most that it fills.

        Each part then has as many samples as the program's own batch. So passes stay as large as the program was
        written for, and the search does not pay for many small ones.
        """
        least = (self.request.trial_workers or (1, 1))[1]
        enough = [parts for parts in self.parts if parts >= least]
        return max((parts for parts in enough if parts * self.base_batch <= batch), default=enough[0])

    def space(self, trial: Any) -> dict[str, Any]:
        """The space that is searched: the user's space, and the rule by which the learning rate follows the batch.

        If the user's space has no batch size, or none of the given policies, these are added.
        """
        values = dict(self.user_space(trial))
        if self.request.policies and "policy" not in values:
            values["policy"] = trial.suggest_categorical("policy", [NO_POLICY, *self.request.policies])
        if "batch_size" not in values:
            sizes = sorted({self.base_batch * parts for parts in (1, *self.parts)})
            values["batch_size"] = trial.suggest_categorical("batch_size", sizes)
        _check_scalable({**self.config, **values})
        values["lr_rule"] = trial.suggest_categorical("lr_rule", list(LR_RULES))
        return in_full({**self.config, **values}, self.config)

    def propose(self, values: Mapping[str, Any]) -> Proposed:
        """The training that ``values`` of the space stand for.

        Raises:
            UserError: If its execution settings cannot be combined.
        """
        config, rule = self.resolve(values)
        agreed = SyncChoice.of(values, self.config)
        layout_settings = {
            name: values[name]
            for name in (*EXECUTION_PARAMETERS, "policy")
            if name in values and name not in self.config
        }
        policies = policies_of(layout_settings.pop("policy", NO_POLICY))
        variant_settings = {name: layout_settings.pop(name) for name in VARIANT_SETTINGS if name in layout_settings}
        variant = Variant.of(replace(self.request.execution, **variant_settings), agreed, policies)
        like = first_of(self.layouts, self.searched_for(int(number(config, "batch_size"))))
        layout = chosen_layout(self.layouts, self.request.execution, like, layout_settings) if layout_settings else like
        self.check_variant(layout, variant)
        return Proposed(Recipe(config, variant), rule, layout, bool(layout_settings))

    def settings_only(self, values: Mapping[str, Any]) -> Proposed:
        """The training of a refused proposal: the settings of ``values`` in the variant that was asked for."""
        config, rule = self.resolve(values)
        layout = first_of(self.layouts, self.searched_for(int(number(config, "batch_size"))))
        return Proposed(Recipe(config, self.variant), rule, layout, False)

    def check_variant(self, layout: ExecutionSettings, variant: Variant) -> None:
        """Raise ``UserError`` if ``layout`` cannot run ``variant``, or if a frontier could not judge it."""
        request, execution = self.request, variant.on(layout)
        _check_timeable(layout, self.timeable)
        if not variant.alone and (request.trial_workers is not None or _stands_in(self.worker_layouts, layout)):
            rule = "in fast mode, and under a policy, workers show in the result"
            fix = "leave out --trial-workers, and all but one mesh of as many parts; or use exact mode without policies"
            raise UserError(
                rule, f"{layout.first_mesh}, {self.worker_layouts.differences(layout, variant) or layout.mode}", fix
            )
        if variant.agreed.schedule.changes:
            raise UserError(ONE_STRATEGY, str(variant.agreed.schedule), "compare schedules with elastune tune")
        sync, adapt = variant.agreed.sync, Adapt(variant.policies)
        spec = RunSpec(request.program, request.out, seed=request.seed, execution=execution, sync=sync, adapt=adapt)
        check_execution(spec)
        check_adapt(adapt, self.program, spec)
        if spot_of(adapt, self.program):
            raise UserError("a deadline is for one run", "the policy spot in a frontier", "leave it out")
        for text in variant.policies:
            if build(text, self.program.policies).policy.strategies(execution.num_slots, execution.workers):
                raise UserError(ONE_STRATEGY, f"the policy {text}", "compare such policies with elastune tune")

    def is_possible(self, layout: ExecutionSettings, variant: Variant) -> bool:
        """Whether ``layout`` can run ``variant``."""
        try:
            self.check_variant(layout, variant)
        except UserError:
            return False
        return True

    def resolve(self, values: Mapping[str, Any]) -> tuple[Config, str]:
        """The configuration that ``values`` of the space stand for, with its learning rate scaled, and the rule."""
        system = {*SYSTEM_PARAMETERS, *strategy_settings(values, self.config)} - set(self.config) | {"lr_rule"}
        plain = {k: v for k, v in values.items() if k not in system}
        config = _with_epochs(merge(self.config, plain), self.request.epochs)
        rule = str(values["lr_rule"])
        batch = self.real_batch(int(number(config, "batch_size")))
        lr = scaled_lr(number(config, "lr"), batch, self.real_batch(self.base_batch), rule)
        cut = {"batch_size": batch} if batch < number(config, "batch_size") else {}
        return {**config, **cut, "lr": lr}, rule

    @property
    def settings(self) -> dict[str, Any]:
        """The request in the form that the journal keeps."""
        prices = self.request.prices
        plain = asdict(replace(self.request, prices=None))
        del plain["command"]  # the journal has it beside the settings
        plain["prices"] = None if prices is None else prices.digest  # a trace may be long
        plain["program"], plain["out"] = str(self.request.program.path), str(self.request.out)
        plain["data"] = self.request.program.data_text
        plain |= {"arguments": list(arguments)} if (arguments := self.request.program.arguments) else {}
        plain |= {} if (command := self.request.program.command) is None else {"training_command": command.to_json()}
        plain["execution"] = self.request.execution.to_json()
        plain["workers"] = list(self.request.workers)
        plain["meshes"] = [str(mesh) for mesh in self.request.grids]
        plain["constraints"] = list(self.request.constraints)
        plain["policies"] = list(self.request.policies)
        plain["objectives"] = {o.name: o.direction for o in self.axes}
        plain["source"], plain["space"] = self.source, self.seen
        del plain["accept_changes"], plain["unchecked"]  # they hold for one call only
        return {"kind": "frontier", **plain}


def check(request: FrontierRequest, timeable: int | None = None) -> CheckedFrontier:
    """Check a request before anything runs.

    Args:
        request: The request.
        timeable: The most workers whose steps can be timed; None: as many as are asked about.

    Returns:
        The checked request, with everything that follows from it.

    Raises:
        UserError: For a wrong request, and for a program that a frontier cannot train.
    """
    counts = request.workers
    if not (counts or request.meshes) or any(w < 1 for w in counts) or list(counts) != sorted(set(counts)):
        raise UserError("worker counts must ascend from at least 1", counts, "for example --workers 1,2,4,8")
    if request.budget_s is not None and not request.budget_s > 0:
        raise UserError("a budget must be positive", request.budget_s, "for example --budget 3m")
    if request.seeds < 2:
        raise UserError("confidence intervals need at least 2 seeds", request.seeds, "use --seeds 3")
    if request.margin is not None and not 0 < request.margin < math.inf:
        raise UserError("a margin must be above 0", request.margin, "for example --margin 0.01")
    layouts = _checked_layouts(request, timeable)
    program = load_as_guest(request.program, request.seed)
    if program.space is None:
        raise UserError("a frontier needs a search space", request.program.path, "define space(trial) in the file")
    config = _with_epochs(override(program.config, request.config, program.space), request.epochs)
    program.check(request.config)
    _check_scalable(config)
    objectives = [(n, d) for n, d in program.objectives.items() if n not in MEASURED]
    if not objectives:
        raise UserError("a frontier needs a quality objective", "none", "objectives = {'accuracy': 'max'} in the file")
    name = request.quality or objectives[0][0]
    if name not in dict(objectives):
        names = ", ".join(n for n, _ in objectives)
        raise UserError("the quality must be one of the program's objectives", name, f"use one of {names}")
    (quality,) = parse_objectives({name: dict(objectives)[name]})
    request = replace(request, constraints=all_texts(program.constraints, request.constraints))
    check_target(request.target, quality)
    KeepCheckpoints.parse(request.keep_checkpoints).directed({quality.name: quality.direction})
    worker_layouts, constraints = WorkerLayouts(layouts, request.execution), parse_constraints(request.constraints)
    plan = CheckedFrontier(
        request, config, quality, program.space, constraints, worker_layouts, program, timeable=timeable
    )
    check_sampler(request.sampler, plan.searched)
    if make_schedule(request.stopping, plan.searched, request.seed, space=plan.space).parents:
        rule = "a frontier needs trainings that their own settings decide"
        raise UserError(
            rule, f"{request.stopping}: children begin with their parents' weights", "use asha or hyperband"
        )
    if request.trial_workers is not None and not 1 <= request.trial_workers[0] <= request.trial_workers[1]:
        low, high = request.trial_workers
        raise UserError("a training's workers must lie between a low and a high", f"{low}:{high}", "for example (1, 2)")
    most = plan.parts[-1]
    if request.trial_workers is not None and request.trial_workers[1] > most:
        rule = f"a training's workers must be within the counts asked about, up to {most}"
        raise UserError(rule, request.trial_workers[1], f"use --trial-workers 1:{most} or larger --workers")
    if request.trial_workers is not None and request.execution.mode == "fast":
        rule = "workers can change only where they do not show in the result"
        raise UserError(rule, "--trial-workers with --mode fast", "use --mode exact")
    _check_policies(plan)
    samples = [*corners(plan.space, request.seed), *probe(plan.space, PROBED, request.seed)]
    named = _named(plan, samples)  # a space with an error raises now, before anything is trained
    check_feasible(plan.space, plan.constraints, {}, request.seed)
    seen = summarize_space(program.space, request.seed)
    return replace(plan, named=named, source=source_of(request.program), seen=seen)


def check_target(target: float | None, quality: Objective, seen: float | None = None) -> None:
    """Raise ``UserError`` for a target that ``quality`` cannot have, by its bounds or by the first value ``seen``.

    A metric of unknown bounds may begin between 0 and 1 while its target is above 1 and at most 100. Then the target is
    taken for a percentage.
    """
    if target is None or (seen is not None and not math.isfinite(seen)):
        return
    low, high = quality.low, quality.high
    if not math.isfinite(target) or not low <= target <= high:
        where = (
            f"between {low:g} and {high:g}" if high < math.inf else f"at least {low:g}" if low > -math.inf else "finite"
        )
        part = target / 100
        hint = f"use --target {part:g}" if low <= part <= high and target > 1 else "use a target that can be reached"
        raise UserError(f"a target must be a value that {quality.name} can have, {where}", f"{target:g}", hint)
    unbounded = quality.direction == "max" and (low, high) == (-math.inf, math.inf)
    if seen is not None and unbounded and 0 < seen <= 1 < target <= 100:
        rule = f"a target must be a value that {quality.name} can have"
        fix = (
            f"use --target {target / 100:g}, or declare bounds, such as objectives = {{'{quality.name}': 'max 0..100'}}"
        )
        raise UserError(rule, f"{target:g}, where the first value is {seen:.3g}", fix)


def _with_epochs(config: Config, epochs: int | None) -> Config:
    """``config`` with the number of epochs replaced, if it has such a setting."""
    return {**config, "epochs": epochs} if epochs is not None and "epochs" in config else config


def _check_scalable(config: Mapping[str, Any]) -> None:
    for name in ("lr", "batch_size"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            rule = "the naive rule multiplies config lr and batch_size, so both must be positive numbers"
            raise UserError(rule, f"{name} = {value!r}"[:100], "name the program's settings lr and batch_size")


def _check_policies(plan: CheckedFrontier) -> None:
    """Refuse given policies that cannot be compared with static settings."""
    policies = plan.request.policies
    if len({policies_of(text) for text in (NO_POLICY, *policies)}) <= len(policies):
        fix = "leave out none, and what is named twice"
        raise UserError("each policy is compared with none, once", ", ".join(policies), fix)
    for text in policies:
        for layout in plan.layouts:
            plan.check_variant(layout, replace(plan.variant, policies=policies_of(text)))


def _named(plan: CheckedFrontier, samples: Sequence[Sample]) -> tuple[tuple[ExecutionSettings, Variant], ...]:
    """The layouts and variants that the space chooses. Raises ``UserError`` if no sample of it can be trained."""
    variants, impossible = dict[str, tuple[ExecutionSettings, Variant]](), None
    for sample in samples:
        if any(violation > 0 for violation in violations(plan.constraints, sample.values).values()):
            continue
        try:
            proposed = plan.propose(sample.values)
        except UserError as error:
            impossible = (
                impossible or error
            )  # some of the space is possible: the search records this part as infeasible
            continue
        each = proposed.layout, proposed.recipe.variant
        variants.setdefault(repr(each), each)
    if impossible is not None and not variants:
        raise impossible
    return tuple(variants.values())


def _stands_in(worker_layouts: WorkerLayouts, layout: ExecutionSettings) -> bool:
    """Whether another layout of as many parts is trained in place of ``layout``."""
    return layout.num_slots in worker_layouts.parts and layout_key(
        worker_layouts.first(layout.num_slots)
    ) != layout_key(layout)


def _check_timeable(layout: ExecutionSettings, timeable: int | None) -> None:
    if timeable is not None and layout.first_mesh.tensor > 1 and layout.workers > timeable:
        rule = "what dividing layers saves is measured here, not modelled"
        fix = f"use meshes along tensor of at most {timeable} workers, or a larger machine"
        raise UserError(rule, f"{layout.first_mesh} on {timeable} cores", fix)


def _checked_layouts(request: FrontierRequest, timeable: int | None) -> tuple[ExecutionSettings, ...]:
    """The layouts asked about. Raises ``UserError`` if one cannot run or be timed, or no training could be for it."""
    layouts = layouts_of(request.execution, tuple(request.workers), request.grids)
    for layout in layouts:
        elastic = Elastic(collective_timeout_s=request.collective_timeout_s)
        check_execution(RunSpec(request.program, request.out, seed=request.seed, execution=layout, elastic=elastic))
        _check_timeable(layout, timeable)
        same = first_of(layouts, layout.num_slots)
        if layout.mode == "fast" and same is not layout:
            rule = "in fast mode a mesh shows in the result, so that only one may cut a batch into as many parts"
            raise UserError(
                rule, f"{first_of(layouts, layout.num_slots).first_mesh}, {layout.first_mesh}", "use --mode exact"
            )
    return layouts
