"""What a study or a frontier is asked to do: complete, checked once, and written into the journal as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from elastune.core.cost import Prices
from elastune.core.divergence import FACTOR
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Config, Elastic, Means, Program
from elastune.core.start_from import StartFrom
from elastune.core.sync_choice import SyncChoice


@dataclass(frozen=True)
class StudyRequest:
    """A multi-objective search over the program's ``space``.

    ``objectives`` (name -> "max" | "min") default to the program's own. ``config`` fixes values over the program's
    defaults; what ``space`` returns goes over both. Of what ``space`` returns, the names of
    ``study.trial_results.OF_MEANS`` are system parameters (they set ``means``), and so is ``policy`` ("none", the text
    of a policy, or a list of texts: what adapts the trial while it runs); the rest is configuration.
    ``workers`` is how many exist for all trials together. ``trial_workers`` (low, high): share them out among the
    running trials, each within these bounds, and move them while the trials run, as ``allocation`` says
    ("short_first", "steepest", see ``study.allocation.choice``). ``stopping``: which trials pause early
    ("none", "asha", "hyperband", see ``search.stopping``). ``warm_start``: folders of earlier studies to learn from.

    ``divergence``: a trial ends, infeasible, once its loss is so many times that of its start, see ``core.divergence``;
    None: once it is not finite. ``simulated``: nothing is trained, so its folder never goes on with trials that were.

    At least one of ``trials``, ``budget_s``, ``worker_hours`` (of all trials together) and ``patience`` (generations of
    a genetic search, or trials of another one, without a better trial) bounds the study. ``until``: comparisons, such
    as "accuracy >= 0.98"; it ends once one trial has ended with all of them. See ``study.loop.stop_rules``.

    ``collective_timeout_s``: how long the workers of a trial wait for one that lives and does not come, see
    ``core.run.Elastic``.

    ``grace_s``: should the study's controller die, its trials go on for so long, and the next one takes them over.

    ``prices``: what a worker-hour costs by kind of host and over time; a trial's ``cost`` is then all that was paid for
    it (``job.meter``). Without them it is its training's worker-hours times ``price_per_worker_hour``, which else is
    the price at the study's beginning, for tables.

    ``start_from``: with whose weights every trial begins.

    ``keep``: of which trials weights and predictions stay, see ``study.loop.retention``; ``keep_bytes``: in how much of
    the disk at most.

    ``plan``: the folder of a plan of the program (``elastune plan --out``): what it says of steps bounds
    ``trial_workers`` and is what their allocation begins with, see ``study.allocation.predicted``.

    ``target``: a comparison, too. Each trial is then told the metric ``seconds_to_target``, which may be an objective
    or be constrained; one that never reaches it is infeasible. See ``study.time_to_target``.
    """

    program: Program
    out: Path
    objectives: dict[str, str] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    sampler: str = "auto"
    trials: int | None = None
    budget_s: float | None = None
    worker_hours: float | None = None
    until: tuple[str, ...] = ()
    target: str | None = None
    patience: int | None = None
    workers: int = 1
    trial_workers: tuple[int, int] | None = None
    allocation: str = "short_first"
    stopping: str = "none"
    warm_start: tuple[Path, ...] = ()
    means: Means = field(default_factory=lambda: Means(mode="fast"))
    sync: SyncChoice = field(default_factory=SyncChoice)
    config: Config = field(default_factory=dict)
    epochs: int | None = None
    seed: int = 0
    divergence: float | None = FACTOR
    price_per_worker_hour: float = 1.0
    trial_timeout_s: float | None = None
    collective_timeout_s: float = Elastic.collective_timeout_s
    grace_s: float = 0.0
    prices: Prices | None = None
    start_from: StartFrom | None = None
    keep: str = "none"
    keep_bytes: int | None = None
    plan: Path | None = None
    resume: bool = False
    simulated: bool = False

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
            "means": Means.from_json(told["means"]),
            "sync": SyncChoice.of(told),
            "start_from": None if begun is None else StartFrom.from_json(begun),
            "warm_start": tuple(map(Path, told.get("warm_start", ()))),
            "constraints": tuple(told.get("constraints", ())),
            "until": tuple(told.get("until", ())),
            "trial_workers": None if bounds is None else tuple(bounds),
            "plan": None if told.get("plan") is None else Path(told["plan"]),
        }
        return cls(**plain)


@dataclass(frozen=True)
class FrontierRequest:
    """How far does this program scale before accuracy pays, and which settings buy it back?

    ``workers``: the worker counts asked about, ascending; counts beyond this machine's are modelled, and labelled so.
    ``meshes``: asked about beside them, each under the mechanism of ``means`` or, where that is "replicated", under the
    least that it needs.
    The program's config must hold ``lr`` and ``batch_size``: the naive rule multiplies both by the worker count.
    ``margin``: by how much quality may be worse than the baseline's and still hold (None: a hundredth of the metric's
    range, or a fiftieth of the baseline's quality).
    ``target`` and the front's quality axis speak of the program's first objective (or ``quality``). ``stopping`` and
    ``trial_workers``: as in ``StudyRequest``, for the trainings of the search. ``divergence`` and
    ``collective_timeout_s``: as there, for all. ``prices``: as there; the cost of a row is that of its workers for its
    time, begun when the frontier does, on hosts that do not tell their kind.
    ``grace_s``: as there, for trainings; they end before the next controller measures step times.
    ``policies``: each is trained beside static settings, with the naive rule's for each worker count, and is a
    parameter of the search where the space has no ``policy``. ``throughput``: look for means that give the same bits
    sooner, see ``frontier.throughput``.
    ``means``: its ``workers`` and ``num_slots`` do not matter, since what is told of a worker count is trained with one
    slot for each part that its workers cut a batch into.
    """

    program: Program
    out: Path
    workers: tuple[int, ...]
    budget_s: float
    meshes: tuple[Mesh, ...] = ()
    target: float | None = None
    quality: str | None = None
    margin: float | None = None
    seeds: int = 3
    means: Means = field(default_factory=Means)
    policies: tuple[str, ...] = ()
    throughput: bool = False
    config: Config = field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    sampler: str = "auto"
    stopping: str = "none"
    trial_workers: tuple[int, int] | None = None
    epochs: int | None = None
    seed: int = 0
    divergence: float | None = FACTOR
    price_per_worker_hour: float = 1.0
    collective_timeout_s: float = Elastic.collective_timeout_s
    grace_s: float = 0.0
    prices: Prices | None = None
    resume: bool = False
