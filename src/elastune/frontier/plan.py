"""A checked frontier request: the base settings, the naive rule, and the space that is searched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastune.core.cost import MEASURED
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Config, Elastic, Means, RunSpec, number
from elastune.core.sync_choice import SyncChoice, strategy_settings
from elastune.frontier.crews import crews_of, first_of, trainer_of
from elastune.job.validate_means import check_means
from elastune.plan.scaling import LR_RULES, scaled_lr
from elastune.search.samplers.registry import check_sampler
from elastune.search.space.constraint import Constraint, parse_constraints
from elastune.search.space.feasible import check_feasible
from elastune.search.space.objective import Objective, parse_objectives
from elastune.search.space.space import Space, corners, probe
from elastune.search.stopping.registry import make_schedule
from elastune.study.request import FrontierRequest
from elastune.study.trial_results import OF_MEANS, SYSTEM_PARAMETERS
from elastune.train.program.load import load_as_guest, merge

PROBED = 64  # configurations that are looked at before any is trained


@dataclass(frozen=True)
class FrontierPlan:
    """What a frontier trains and searches. ``axes`` are the front's objectives, ``searched`` the sampler's."""

    request: FrontierRequest
    config: Config
    quality: Objective
    user_space: Space
    constraints: tuple[Constraint, ...]
    crews: tuple[Means, ...]

    @property
    def axes(self) -> tuple[Objective, ...]:
        """Quality, time and cost."""
        return (self.quality, *parse_objectives({"seconds": "min", "cost": "min"}))

    @property
    def searched(self) -> tuple[Objective, ...]:
        """Quality, and time at the largest worker count."""
        return (self.quality, *parse_objectives({"seconds": "min"}))

    @property
    def base_batch(self) -> int:
        """The program's own batch size, that of one worker."""
        return int(number(self.config, "batch_size"))

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts the crews cut a batch, ascending: quality depends on no more of a crew."""
        return tuple(sorted({crew.num_slots for crew in self.crews}))

    def naive(self, parts: int) -> Config:
        """The naive rule: global batch and learning rate x ``parts``."""
        lr = number(self.config, "lr") * parts
        return {**self.config, "batch_size": self.base_batch * parts, "lr": lr}

    def means(self, parts: int) -> Means:
        """How a training is run that speaks for the crews of ``parts``: each part is one slot."""
        return trainer_of(self.crews, parts)

    def mesh(self, parts: int) -> Mesh:
        """The first mesh with so many parts: settings are ranked by their time there."""
        return first_of(self.crews, parts).first_mesh

    @property
    def widest(self) -> Mesh:
        """That of the most workers."""
        return self.crews[-1].first_mesh

    def searched_for(self, batch: int) -> int:
        """For how many parts the search trains a ``batch``: the most that it fills.

        Each of them then has as many samples as the program's own batch. So passes stay as large as those that the
        program was written for, and the search does not pay for many small ones.
        """
        least = (self.request.trial_workers or (1, 1))[1]
        enough = [parts for parts in self.parts if parts >= least]
        return max((parts for parts in enough if parts * self.base_batch <= batch), default=enough[0])

    def space(self, trial: Any) -> dict[str, Any]:
        """The user's space; a batch size, where it has none; and a rule by which the learning rate follows it.

        Raises:
            UserError: Where it sets what a frontier sets itself: a sampler would search what shows nowhere.
        """
        found = dict(self.user_space(trial))
        if taken := [name for name in found if name in (*OF_MEANS, "policy")]:
            rule = "a frontier's space sets the program's own settings: means and policies are compared for each worker"
            fix = "leave them out of space(trial): use --workers, --mesh and the like, or elastune tune"
            raise UserError(rule, ", ".join(taken), fix)
        if "batch_size" not in found:
            sizes = sorted({self.base_batch * parts for parts in (1, *self.parts)})
            found["batch_size"] = trial.suggest_categorical("batch_size", sizes)
        found["lr_rule"] = trial.suggest_categorical("lr_rule", list(LR_RULES))
        return {**self.config, **found}

    def resolve(self, values: Mapping[str, Any]) -> tuple[Config, str]:
        """The configuration that ``values`` of the space stand for, its learning rate scaled, and the rule."""
        system = {*SYSTEM_PARAMETERS, *strategy_settings(values, self.config), "lr_rule"}
        plain = {k: v for k, v in values.items() if k not in system}
        config = merge(self.config, plain)
        rule = str(values["lr_rule"])
        lr = scaled_lr(number(config, "lr"), int(number(config, "batch_size")), self.base_batch, rule)
        return {**config, "lr": lr}, rule

    @property
    def settings(self) -> dict[str, Any]:
        """The request as the journal keeps it."""
        prices = self.request.prices
        plain = asdict(replace(self.request, prices=None))
        plain["prices"] = None if prices is None else prices.digest  # a trace may be long
        plain["program"], plain["out"] = str(self.request.program.path), str(self.request.out)
        plain["data"] = self.request.program.told_data
        plain["means"] = self.request.means.to_json()
        plain["workers"] = list(self.request.workers)
        plain["meshes"] = [str(mesh) for mesh in self.request.meshes]
        plain["constraints"] = list(self.request.constraints)
        plain["objectives"] = {o.name: o.direction for o in self.axes}
        return {"kind": "frontier", **plain}


def check(request: FrontierRequest, timeable: int | None = None) -> FrontierPlan:
    """Raise ``UserError`` for all that can be known to be wrong before anything runs.

    ``timeable``: the most workers whose steps can be timed; None: as many as are asked about.
    """
    counts = request.workers
    if not (counts or request.meshes) or any(w < 1 for w in counts) or list(counts) != sorted(set(counts)):
        raise UserError("worker counts must ascend from at least 1", counts, "for example --workers 1,2,4,8")
    if not request.budget_s > 0:
        raise UserError("a budget must be positive", request.budget_s, "for example --budget 3m")
    if not request.price_per_worker_hour > 0:
        raise UserError("a price must be positive", request.price_per_worker_hour, "for example --price 2.5")
    if request.seeds < 2:
        raise UserError("confidence intervals need at least 2 seeds", request.seeds, "use --seeds 3")
    if request.margin is not None and not 0 < request.margin < math.inf:
        raise UserError("a margin must be above 0", request.margin, "for example --margin 0.01")
    crews = _checked_crews(request, timeable)
    program = load_as_guest(request.program)
    if program.space is None:
        raise UserError("a frontier needs a search space", request.program.path, "define space(trial) in the file")
    config = merge(program.config, request.config)
    for name in ("lr", "batch_size"):
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            rule = "the naive rule multiplies config lr and batch_size, so both must be positive numbers"
            raise UserError(rule, f"{name} = {value!r}", "name the program's settings lr and batch_size")
    objectives = [(n, d) for n, d in program.objectives.items() if n not in MEASURED]
    if not objectives:
        raise UserError("a frontier needs a quality objective", "none", "objectives = {'accuracy': 'max'} in the file")
    name = request.quality or objectives[0][0]
    if name not in dict(objectives):
        known = ", ".join(n for n, _ in objectives)
        raise UserError("the quality must be one of the program's objectives", name, f"use one of {known}")
    (quality,) = parse_objectives({name: dict(objectives)[name]})
    plan = FrontierPlan(request, config, quality, program.space, parse_constraints(request.constraints), crews)
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
    if request.trial_workers is not None and request.means.mode == "fast":
        rule = "workers can change only where they do not show in the result"
        raise UserError(rule, "--trial-workers with --mode fast", "use --mode exact")
    corner_samples = corners(plan.space, request.seed)  # a space that raises does so before anything is trained
    for sample in (*corner_samples, *probe(plan.space, PROBED, request.seed)):
        if (agreed := SyncChoice.of(sample.values, config)) != SyncChoice():
            rule = "a frontier's step times are those of gradients that are summed in every step"
            raise UserError(rule, agreed.to_json(), "compare strategies with elastune tune, workers in space(trial)")
    check_feasible(plan.space, plan.constraints, {}, request.seed)
    return plan


def _checked_crews(request: FrontierRequest, timeable: int | None) -> tuple[Means, ...]:
    """Raise ``UserError`` for workers that cannot run, that cannot be timed, or that no training could speak for."""
    crews = crews_of(request.means, request.workers, request.meshes)
    for crew in crews:
        elastic = Elastic(collective_timeout_s=request.collective_timeout_s)
        check_means(RunSpec(request.program, request.out, seed=request.seed, means=crew, elastic=elastic))
        if timeable is not None and crew.first_mesh.tensor > 1 and crew.workers > timeable:
            rule = "what dividing layers saves is measured here, not modelled"
            fix = f"use meshes along tensor of at most {timeable} workers, or a larger machine"
            raise UserError(rule, f"{crew.first_mesh} on {timeable} cores", fix)
        same = first_of(crews, crew.num_slots)
        if crew.mode == "fast" and same is not crew:
            rule = "in fast mode a mesh shows in the result, so that only one may cut a batch into as many parts"
            raise UserError(
                rule, f"{first_of(crews, crew.num_slots).first_mesh}, {crew.first_mesh}", "use --mode exact"
            )
    return crews
