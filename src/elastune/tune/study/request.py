"""What a study or a frontier is asked to do: complete, checked once, and written into the journal as it is.

A knob has its default, and what is told of it, in one place: here. Options of the command line take their help and
their defaults from the fields, and ``elastune.tune`` and ``elastune.find_frontier`` their defaults.
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


def option_field(default: T, told: str) -> T:
    """A field that is ``default`` where nothing else is asked for; ``told``: what it is, as the command line says."""
    return field(default=default, metadata={"told": told})


@dataclass(frozen=True)
class SearchRequest:
    """What is asked of trainings whose settings the program's ``space`` chooses.

    Raises ``UserError`` for a price or a factor that cannot be.

    Of what ``space`` returns, the names of ``study.trial_results.EXECUTION_PARAMETERS`` are system parameters (they set ``execution``),
    and so is ``policy`` ("none", the text of a policy, or a list of texts: what adapts the trial while it runs). The
    rest is configuration.
    """

    program: Program
    out: Path
    _: KW_ONLY
    config: Config = field(default_factory=dict)  # over the program's own; what ``space`` returns goes over both
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
    prices: Prices | None = None  # a cost is then all that was paid, and the price, for tables, that of the beginning
    collective_timeout_s: float = option_field(
        Elastic.collective_timeout_s,
        "How long workers wait for a worker that is alive but does not take part in an exchange.",
    )
    grace_s: float = option_field(Elastic.grace_s, "How long workers train on if this command dies")
    resume: bool = option_field(False, "Continue what is in --out. With nothing there, start from the beginning.")
    command: CommandLine | None = field(default=None, compare=False)  # that asks for it
    accept_changes: bool = option_field(
        False, "With --resume: go on though the program, its space or the data have changed, and say so in the report."
    )

    def __post_init__(self) -> None:
        check_price(self.price_per_worker_hour)
        check_factor(self.divergence)


@dataclass(frozen=True)
class StudyRequest(SearchRequest):
    """A multi-objective search.

    At least one of ``trials``, ``budget_s``, ``worker_hours`` and ``patience`` bounds it, or the sampler "grid", which
    ends with its last configuration.

    ``objectives`` (name -> "max" | "min") default to the program's own.
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
    sync: SyncChoice = field(default_factory=SyncChoice)  # where ``space`` does not say it
    trial_timeout_s: float | None = option_field(None, "Longest time of one trial")
    start_from: StartFrom | None = None  # with whose weights every trial begins
    monitors: tuple[str, ...] = ()  # what every trial measures, beside what its policy needs
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
    simulated: bool = False  # nothing is trained, so its folder never goes on with trials that were

    @classmethod
    def of_settings(cls, told: Mapping[str, Any], out: Path) -> StudyRequest:
        """What a study was begun with, by its journal, to go on with in ``out``.

        Raises ``UserError`` for what is no trained search, and for one with prices, of which a journal has the digest.
        """
        if told.get("kind") != "tune" or told.get("simulated") or told.get("prices") is not None:
            rule = "more is trained in a study of elastune tune, without --prices and not simulated"
            raise UserError(rule, out, "begin another one")
        plain = {each.name: told[each.name] for each in fields(cls) if each.name in told}
        data, begun, bounds = told.get("data"), told.get("start_from"), told.get("trial_workers")
        plain |= {
            "program": Program(Path(told["program"]), told.get("train", "train"), None if data is None else Path(data)),
            "out": out,
            "resume": True,
            "execution": ExecutionSettings.from_json(told["execution"]),
            "sync": SyncChoice.of(told),
            "start_from": None if begun is None else StartFrom.from_json(begun),
            "warm_start": tuple(map(Path, told.get("warm_start", ()))),
            "constraints": tuple(told.get("constraints", ())),
            "until": tuple(told.get("until", ())),
            "monitors": tuple(told.get("monitors", ())),
            "trial_workers": None if bounds is None else tuple(bounds),
            "plan": None if told.get("plan") is None else Path(told["plan"]),
            "command": None,
        }
        return cls(**plain)


@dataclass(frozen=True)
class FrontierRequest(SearchRequest):
    """How far does this program scale before accuracy pays, and which settings buy it back?

    ``workers``: the worker counts asked about, ascending; counts beyond this machine's are modelled, and labelled so.
    ``meshes``: asked about beside them, each under the mechanism of ``execution`` or, where that is "replicated", under the
    least that it needs.
    The program's config must hold ``lr`` and ``batch_size``: the naive rule multiplies both by the worker count.
    ``margin``: by how much quality may be worse than the baseline's and still hold (None: a hundredth of the metric's
    range, or a fiftieth of the baseline's quality).
    ``target`` and the front's quality axis speak of the program's first objective (or ``quality``).
    ``budget_s`` is for all phases; None: chosen from the first steps, so that all of them fit. The search gets at least
    two fifths of it. Where that cannot be the request is refused, unless it is ``short``: then the search is left out.
    ``policies``: each is trained beside static settings, with the naive rule's for each worker count, and is a
    parameter of the search where the space has no ``policy``. ``throughput``: look for means that give the same bits
    sooner, see ``frontier.throughput``.
    ``stopping`` and ``trial_workers`` are for the trainings of the search alone. The cost of a row is that of its
    workers for its time, on hosts that do not tell their kind, begun when the frontier does. ``grace_s``: trainings
    end before the next controller measures step times.
    ``execution``: its ``workers`` and ``num_slots`` do not matter, since what is told of a worker count is trained with one
    slot for each part that its workers cut a batch into.
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
