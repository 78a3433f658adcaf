"""The requests of a study and a frontier, complete and as the journal holds them.

This file is the only place for the default and the help text of an option. The command line takes help and defaults
from the fields; ``elastune.tune`` and ``elastune.find_frontier`` take the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from elastune.core.cost import Prices, check_price
from elastune.core.divergence import FACTOR, check_factor
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import CommandLine, Config, Elastic, ExecutionSettings, Program, StartFrom
from elastune.core.sync_plan import SyncChoice

T = TypeVar("T")
EXACT, FAST = ExecutionSettings(), ExecutionSettings(mode="fast")


def option_field(default: T, help_text: str) -> T:
    """Return a dataclass field with ``default`` and the help text of its command-line option."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True)
class SearchRequest:
    """The common part of a study and a frontier: trainings whose settings the program's ``space`` chooses.

    Among the values of ``space``, the names of ``trial_results.EXECUTION_PARAMETERS`` set ``execution``. The name
    ``policy`` sets the policies of a trial: "none", the text of a policy, or a list of texts. All other names are
    configuration.

    Raises:
        UserError: For an impossible price or divergence factor.
    """

    program: Program
    out: Path
    _: KW_ONLY
    config: Config = field(default_factory=dict)  # replaces the program's own; values of ``space`` replace both
    execution: ExecutionSettings = EXACT
    constraints: tuple[str, ...] = option_field(
        (),
        'A condition that settings or metrics must fulfil, such as "workers * micro_batch == 4096" or '
        '"accuracy >= 0.9", beside the constraints of the program\'s file.',
    )
    sampler: str = option_field(
        "auto",
        "What proposes the settings of the next trial: auto, random, grid, tpe, gp, nsga2, nsga3, genetic or cmaes. "
        "See docs/spaces.md.",
    )
    stopping: str = option_field(
        "none",
        "Early stopping: none, asha, hyperband or pbt (population-based training), such as asha:eta=3,min_resource=1. "
        "See docs/studies.md.",
    )
    trial_workers: tuple[int, int] | None = option_field(
        None,
        "Share the workers out among the trials that run. Each has LOW to HIGH workers, and their number changes while "
        "it trains.",
    )
    epochs: int | None = option_field(
        None, "Number of epochs (passes over the data), instead of what the program passes to session.epochs."
    )
    seed: int = option_field(0, "Seed for everything that is random.")
    divergence: float | None = option_field(
        FACTOR,
        "End a training as failed when its loss stays above FACTOR times the loss at its start. A loss that is not "
        "finite always fails; with off, nothing else does.",
    )
    price_per_worker_hour: float = option_field(
        1.0, "Price of a worker-hour in dollars. At 1, a cost is the number of worker-hours."
    )
    prices: Prices | None = None  # a cost is then all paid money; tables show the price of the beginning
    collective_timeout_s: float = option_field(
        Elastic.collective_timeout_s,
        "How long workers wait for a worker that is alive but does not take part in an exchange.",
    )
    grace_s: float = option_field(Elastic.grace_s, "How long workers train on if this command dies")
    resume: bool = option_field(False, "Continue what is in --out. With nothing there, start from the beginning.")
    command: CommandLine | None = field(default=None, compare=False)  # the command line of this request
    accept_changes: bool = option_field(
        False, "With --resume: go on though the program, its space or the data have changed, and say so in the report."
    )

    def __post_init__(self) -> None:
        check_price(self.price_per_worker_hour)
        check_factor(self.divergence)


@dataclass(frozen=True)
class StudyRequest(SearchRequest):
    """A multi-objective search.

    At least one of ``trials``, ``budget_s``, ``worker_hours`` and ``patience`` must bound it, or the sampler "grid",
    which ends with its last configuration. ``objectives`` (name -> "max" | "min") default to the program's own.
    """

    objectives: dict[str, str] = field(default_factory=dict)
    _: KW_ONLY
    execution: ExecutionSettings = FAST
    trials: int | None = option_field(None, "Number of trials to run.")
    budget_s: float | None = option_field(None, "Wall time that the search may take")
    worker_hours: float | None = option_field(None, "Worker-hours (workers x hours) that all trials together may use.")
    until: tuple[str, ...] = option_field((), 'End once a trial has reached this, such as "accuracy >= 0.98".')
    patience: int | None = option_field(
        None, "End after this many trials in a row without a better one. With --sampler genetic it counts generations."
    )
    target: str | None = option_field(
        None,
        'Measure the seconds of training until a report reaches this, such as "accuracy >= 0.97", as the metric '
        "seconds_to_target.",
    )
    workers: int = option_field(1, "Number of worker processes for all trials together.")
    allocation: str = option_field(
        "short_first",
        "How --trial-workers shares workers out: steepest (each worker goes where it adds most) or short_first "
        "(the same, and the longest trials wait). See docs/studies.md.",
    )
    warm_start: tuple[Path, ...] = option_field(
        (),
        "Output folder of an earlier study. Its best settings are tried first, and the sampler learns from its trials "
        "as far as they compare.",
    )
    sync: SyncChoice = field(default_factory=SyncChoice)  # unless ``space`` sets it
    trial_timeout_s: float | None = option_field(None, "Longest time of one trial")
    start_from: StartFrom | None = None  # the weights with which every trial begins
    monitors: tuple[str, ...] = ()  # monitors of every trial, beside those that its policy needs
    keep: str = option_field(
        "none",
        "Trials whose weights and predictions are kept: none, all, front, best[:K] by each objective, diverse[:K] "
        "(predictions that differ most), last:K. Join several with +, such as front+last:3.",
    )
    keep_bytes: int | None = option_field(None, "Most disk space for what --keep keeps")
    plan: Path | None = option_field(
        None,
        "The --out folder of elastune plan. With --trial-workers, no trial gets more workers than the plan says are of "
        "use. Until steps are measured, the plan also decides how workers are shared out.",
    )
    simulated: bool = False  # no trial trains, so its folder cannot go on with trained trials

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any], out: Path) -> StudyRequest:
        """Return the request of the study in ``out`` by the settings in its journal, to resume it.

        Raises ``UserError`` for a journal without a trained search. It also raises for a study with prices, since a
        journal has only their digest.
        """
        if settings.get("kind") != "tune" or settings.get("simulated") or settings.get("prices") is not None:
            rule = "more is trained in a study of elastune tune, without --prices and not simulated"
            raise UserError(rule, out, "begin another one")
        plain = {each.name: settings[each.name] for each in fields(cls) if each.name in settings}
        data, start_from, bounds = settings.get("data"), settings.get("start_from"), settings.get("trial_workers")
        plain |= {
            "program": Program(
                Path(settings["program"]),
                settings.get("train", "train"),
                None if data is None else Path(data),
                tuple(settings.get("arguments", ())),
            ),
            "out": out,
            "resume": True,
            "execution": ExecutionSettings.from_json(settings["execution"]),
            "sync": SyncChoice.of(settings),
            "start_from": None if start_from is None else StartFrom.from_json(start_from),
            "warm_start": tuple(map(Path, settings.get("warm_start", ()))),
            "constraints": tuple(settings.get("constraints", ())),
            "until": tuple(settings.get("until", ())),
            "monitors": tuple(settings.get("monitors", ())),
            "trial_workers": None if bounds is None else tuple(bounds),
            "plan": None if settings.get("plan") is None else Path(settings["plan"]),
            "command": None,
        }
        return cls(**plain)


@dataclass(frozen=True)
class FrontierRequest(SearchRequest):
    """A frontier: how far the program scales before it loses accuracy, and which settings regain it.

    The program's config must hold ``lr`` and ``batch_size``: the naive rule multiplies both by the worker count.
    ``stopping`` and ``trial_workers`` are for the trainings of the search alone. ``workers`` and ``num_slots`` of
    ``execution`` do not matter: each worker count trains with one slot for each part of its batch. The cost of a row
    is that of its workers for its time, on hosts of unknown kind from the beginning of the frontier on. With
    ``grace_s``, surviving trainings end before the next controller measures step times.

    Attributes:
        workers: The worker counts of the frontier, ascending. Counts beyond this machine's are modelled and marked.
        budget_s: The budget of all phases; None: chosen by the first steps, so that all phases fit. The search gets at
            least two fifths of it.
        short: Leave the search out if the budget is too small for it; else such a request is refused.
        meshes: Further rows, each under the mechanism of ``execution``. If that is "replicated", each mesh gets the
            smallest mechanism that supports it.
        target: A value of the quality objective.
        quality: The quality objective; None: the program's first objective.
        margin: By how much quality may be worse than the baseline's. None: a hundredth of the metric's range, or a
            fiftieth of the baseline's quality.
        policies: Each trains beside static settings, with the naive rule's for each worker count. It is a parameter
            of the search if the space has no ``policy``.
        throughput: Search execution settings that give the same bits faster, see ``tuning.frontier.short_runs``.
    """

    workers: tuple[int, ...]
    budget_s: float | None
    _: KW_ONLY
    short: bool = False
    meshes: tuple[Mesh, ...] = ()
    target: float | None = None
    quality: str | None = None
    margin: float | None = None
    seeds: int = 3
    policies: tuple[str, ...] = ()
    throughput: bool = False
