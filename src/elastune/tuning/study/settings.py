"""The settings of a study and of a frontier, each declared once.

The command line takes its options from the fields of these classes, and ``elastune.tune`` and
``elastune.find_frontier`` take their keywords. ``tuning/study/request.py`` makes requests of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.fields import COMMON, Notation, documented, setting
from elastune.core.mesh import Mesh
from elastune.core.notation import BOUNDS, COUNTS, MESHES, NAMED, SIZE, TIME, duration, duration_text
from elastune.core.run import ExecutionSettings
from elastune.core.settings import (
    CheckpointSettings,
    LoggerSettings,
    MonitorSettings,
    OutSettings,
    PriceFileSettings,
    PriceSettings,
    ProofSettings,
    ResumeSettings,
    Settings,
    SyncSettings,
    TrainingSettings,
    VerifySettings,
    WaitSettings,
    WeightSettings,
)
from elastune.runtime.settings import ClusterSettings
from elastune.tuning.search.objective import parse_objectives

AUTO = "auto"


def _objectives(texts: Sequence[str], option: str) -> dict[str, str]:
    return {objective.name: objective.direction for objective in parse_objectives(list(texts))}


def _budget(text: str, option: str) -> float | None:
    return None if text == AUTO else duration(text, option)


OBJECTIVES = Notation("NAME:max|min", _objectives, many=True)
BUDGET = Notation("TIME|auto", _budget, lambda seconds: AUTO if seconds is None else duration_text(seconds))


@dataclass(frozen=True, kw_only=True)
class TrialWorkersSettings(Settings):
    """How the workers of a study are shared out among its trials."""

    trial_workers: tuple[int, int] | None = setting(
        None,
        "Share the workers out among the trials that run. Each has HIGH slots and LOW to HIGH workers, whose "
        "number changes while it trains.",
        notation=BOUNDS,
        panel="Search",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = self.trial_workers
        if bounds is not None and [type(each) for each in bounds] != [int, int]:
            raise UserError("a trial's workers must be two whole numbers", bounds, "for example (1, 4)")


@dataclass(frozen=True, kw_only=True)
class SamplerSettings(Settings):
    """What proposes trials, and what ends them early."""

    sampler: str = setting(
        "auto",
        "What proposes the settings of the next trial: auto, random, grid, tpe, gp, nsga2, nsga3, genetic or cmaes. "
        "See docs/spaces.md.",
        panel="Search",
    )
    stopping: str = setting(
        "none",
        "Early stopping: none, asha, hyperband or pbt (population-based training), such as asha:eta=3,min_resource=1. "
        "See docs/studies.md.",
        metavar=NAMED,
        panel="Search",
    )


@dataclass(frozen=True, kw_only=True)
class SearchSettings(TrialWorkersSettings, SamplerSettings, PriceSettings):
    """The common settings of all searches: constraints, sampler, early stopping, and the workers of a trial."""

    constraints: Sequence[str] = setting(
        (),
        'A condition that settings or metrics must fulfil, such as "workers * micro_batch == 4096" or '
        '"accuracy >= 0.9", beside the constraints of the program\'s file. May be repeated.',
        "--constraint",
        metavar="TEXT",
        panel="Search",
    )


@dataclass(frozen=True, kw_only=True)
class TargetSettings(Settings):
    """The result whose time a study measures."""

    target: str | None = setting(
        None,
        'Measure the seconds of training until a report reaches this, such as "accuracy >= 0.97", as the metric '
        "seconds_to_target.",
        metavar="TEXT",
        panel="Search",
    )


@dataclass(frozen=True, kw_only=True)
class StudySearchSettings(TargetSettings, SearchSettings):
    """The search of a study, real or simulated: its objectives, and the limits of its length."""

    objectives: Mapping[str, str] = setting(
        {},
        "A metric to optimise, such as accuracy:max, instead of the program's objectives. May be repeated.",
        "--objective",
        OBJECTIVES,
        panel="Search",
    )
    trials: int | None = setting(
        None, "Number of trials to run. A study needs --trials, --budget, --worker-hours or --patience.", panel="Search"
    )
    budget_s: float | None = setting(
        None, "Wall time that the search may take, such as 90s, 3m or 1.5h.", "--budget", TIME, panel=COMMON
    )
    worker_hours: float | None = setting(
        None, "Worker-hours (workers x hours) that all trials together may use.", panel="Search"
    )
    until: Sequence[str] = setting(
        (),
        'End once a trial has reached this, such as "accuracy >= 0.98". May be repeated: one trial must then reach all '
        "of them.",
        metavar="TEXT",
        panel="Search",
    )
    patience: int | None = setting(
        None,
        "End after this many trials in a row without a better one. With --sampler genetic it counts generations.",
        panel="Search",
    )
    allocation: str = setting(
        "short_first",
        "How --trial-workers shares workers out: steepest (each worker goes where it adds most) or short_first "
        "(the same, and the longest trials wait). See docs/studies.md.",
        metavar=NAMED,
        panel="Search",
    )
    trial_timeout_s: float | None = setting(
        None, "Longest time of one trial: 30m.", "--trial-timeout", TIME, panel="Search"
    )


@dataclass(frozen=True, kw_only=True)
class StudyOwnSettings(MonitorSettings, VerifySettings):
    """What only a study has: its workers, what it takes over, what it measures, and what it keeps."""

    workers: int = setting(1, "Number of worker processes for all trials together.", panel=COMMON)
    warm_start: Sequence[str | Path] = setting(
        (),
        "Output folder of an earlier study. Its best settings are tried first, and the sampler learns from its trials "
        "as far as they compare. May be repeated.",
        panel="Search",
    )
    keep: str = setting(
        "none",
        "Trials whose weights and predictions are kept: none, all, front, best[:K] by each objective, diverse[:K] "
        "(predictions that differ most), last:K. Join several with +, such as front+last:3.",
        metavar="RULE",
        panel="Search",
    )
    keep_bytes: int | None = setting(
        None, "Most disk space for what --keep keeps, such as 500MB or 2GB.", "--keep-size", SIZE, panel="Search"
    )
    plan: str | Path | None = setting(
        None,
        "The --out folder of elastune plan. With --trial-workers, no trial gets more workers than the plan says are of "
        "use. Until steps are measured, the plan also decides how workers are shared out.",
        metavar="FOLDER",
        panel="Search",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "warm_start", tuple(map(Path, self.warm_start)))
        object.__setattr__(self, "plan", None if self.plan is None else Path(self.plan))


@dataclass(frozen=True, kw_only=True)
class CommonSettings(WaitSettings, ResumeSettings, CheckpointSettings, ProofSettings, TrainingSettings):
    """The settings of each training, and of the command that runs them: the same of a study and a frontier."""


@dataclass(frozen=True, kw_only=True)
class PlaceSettings(PriceFileSettings, ClusterSettings, LoggerSettings, OutSettings):
    """Where results and workers are, and what workers cost. A request has these in another form."""


@documented
@dataclass(frozen=True, kw_only=True)
class StudySettings(PlaceSettings, WeightSettings, SyncSettings, CommonSettings, StudyOwnSettings, StudySearchSettings):
    """The settings of a study: the options of ``elastune tune``, and the keywords of ``elastune.tune``.

    Example:
        >>> StudySettings(objectives={"accuracy": "max", "seconds": "min"}, workers=8, trials=50)
    """

    execution: ExecutionSettings | None = None  # an option for each field on the command line


@dataclass(frozen=True, kw_only=True)
class FrontierOwnSettings(SearchSettings):
    """What a frontier asks: worker counts and meshes, the quality to reach, and the time that it may take."""

    workers: Sequence[int] = setting(
        (), "Worker counts, such as 1,2,4. [default: 1,2,4,8; beside --mesh none]", notation=COUNTS, panel=COMMON
    )
    meshes: Sequence[str | Mesh] = setting(
        (), "A mesh to measure, too, such as data=2,shard=2. May be repeated.", "--mesh", MESHES, panel="Search"
    )
    budget_s: float | None = setting(
        180.0,
        "Wall time for all phases, such as 90s, 3m or 1.5h; auto: as long as they need.",
        "--budget",
        BUDGET,
        panel=COMMON,
    )
    short: bool = setting(
        False, "In a budget that is too small for a search, do the rest, and say what was left out.", panel="Search"
    )
    target: float | None = setting(None, "Value of --quality that must be reached, such as 0.95.", panel="Search")
    quality: str | None = setting(None, "Objective that is the quality. [default: the first]", panel="Search")
    margin: float | None = setting(
        None,
        "By how much quality may be worse than on the smallest worker count and still hold. "
        "[default: a hundredth of the metric's range, or a fiftieth of its value there]",
        panel="Search",
    )
    seeds: int = setting(
        3, "Number of trainings, each with its own seed, for a cell of the table; at least 2.", panel="Search"
    )
    policies: Sequence[str] = setting(
        (),
        "A policy to train and compare with static settings, such as gns:max_batch=2048. May be repeated.",
        "--policy",
        metavar=NAMED,
        panel="Training",
    )
    throughput: bool = setting(
        False,
        "Try other threads, mechanisms, routes, bucket sizes and micro-batches in short runs, and use what gives the "
        "same bits sooner. They take part of the budget.",
        panel="Search",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "meshes", self.grids)

    @property
    def grids(self) -> tuple[Mesh, ...]:
        """The meshes, read. Raises ``UserError``."""
        return tuple(Mesh.parse(each) if isinstance(each, str) else each for each in self.meshes)


@documented
@dataclass(frozen=True, kw_only=True)
class FrontierSettings(PlaceSettings, CommonSettings, FrontierOwnSettings):
    """The settings of a frontier: the options of ``elastune frontier``, and the keywords of ``elastune.find_frontier``.

    Example:
        >>> FrontierSettings(workers=(1, 2, 4), target=0.95, budget_s=90)
    """

    execution: ExecutionSettings | None = None
