"""What a frontier concludes: the means that its throughput phase found, the rows of its table, and the answer."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass

from elastune.journal.study_records import LinkFitted
from elastune.journal.values import Count

_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class FrontierRow:
    """One cell of the trade-off table: settings, workers and how they stand, and what they reach.

    ``quality`` is the mean over ``seeds`` of the quality metric on data the search never saw (``held_out``) or, where
    the program reports none, on its validation data; ``ci`` is its 95 % confidence interval, of seeds and, where the
    number of ``test_samples`` is known, of the test set. ``loss``: by how much it is worse than the baseline's with the
    same ``pairs`` of seeds, ``loss_bound`` its one-sided 95 % bound, compared with ``margin``. ``verdict``: whether it
    is shown to be at the target or, without one, no worse than the baseline's by more than the margin.
    ``quality_label``: measured by trainings on so many workers, or emulated, by trainings on fewer that work as these
    would; ``num_slots`` belongs to the settings, since a slot has its own random stream and batch statistics.
    ``seconds`` is the time of the whole training; the model's may be off by ``seconds_factor`` either way (1.0:
    measured; None: the model could not be checked). ``throughput``: samples a second; ``scaling_efficiency``: how many
    times that of one worker with the program's own settings it is, divided by ``workers`` (None where there is no such
    row), ``scaling_label``: modelled, where a time of either is. ``time_to_target_s``: the mean
    over seeds, None unless all have ``reached`` the target, with its 95 % interval over seeds.
    ``noise_scale``, in samples, is that at the end of training, ``noise_scale_error`` its standard error.
    ``means``: all of its means, how workers agree and what adapts it; ``ways``: what of them is not as it was asked
    for, in words.
    """

    role: Literal["naive", "tuned"]
    workers: Count
    batch_size: Count
    lr: float
    lr_rule: str
    mechanism: str
    mesh: str
    mode: str
    config: dict[str, Any]
    quality: float
    ci: tuple[float, float] | None
    seeds: Count
    held_out: bool
    validation: float
    seconds: float
    seconds_label: Literal["measured", "modelled"]
    cost: float
    verdict: Literal["holds", "not shown", "falls"] = "not shown"
    loss: float | None = None
    loss_bound: float | None = None
    margin: float | None = None
    pairs: Count = 0
    test_samples: Count | None = None
    seconds_factor: float | None = 1.0
    throughput: float | None = None
    scaling_efficiency: float | None = None
    scaling_label: Literal["measured", "modelled"] | None = None
    time_to_target_s: float | None = None
    time_to_target_ci: tuple[float, float] | None = None
    reached: Count = 0
    on_front: bool = False
    diverged: Count = 0
    trials: list[Count] = field(default_factory=list)
    noise_scale: float | None = None
    noise_scale_error: float | None = None
    quality_label: Literal["measured", "emulated"] = "measured"
    num_slots: Count = 1
    means: dict[str, Any] = field(default_factory=dict)
    ways: str = ""

    @property
    def division(self) -> str:
        """How its workers divide the model: "shard=4, zero"; "" where each of them has all of it."""
        return "" if self.mechanism == "replicated" else f"{self.mesh}, {self.mechanism}"

    @property
    def apart(self) -> str:
        """How its workers divide the model, and what else of its means is not as it was asked for; "" nothing."""
        words = [word for word in self.ways.split(", ") if word and word != self.mechanism]
        return ", ".join([*([self.division] if self.division else []), *words])


@dataclass(frozen=True, config=_RULES)
class MeansTimed:
    """Means of a crew, and what a step took by them. ``same``: whether the short run ended with the same bits as that
    by the crew's own means; None: it diverged or failed, and so was not timed."""

    means: dict[str, Any]
    changed: str
    step_s: float | None
    same: bool | None


@dataclass(frozen=True, config=_RULES)
class ThroughputTuned:
    """What the throughput phase found for one crew: no training, but short runs with a global ``batch``.

    ``tried``: the crew's own means first. ``chosen``: which of them the crew has from now on.
    """

    batch: Count
    tried: list[MeansTimed]
    chosen: Count
    kind: Literal["throughput_tuned"] = "throughput_tuned"

    @model_validator(mode="after")
    def _chose_one(self) -> ThroughputTuned:
        if self.chosen >= len(self.tried):
            raise ValueError("chosen: must be the number of one that was tried")
        return self


@dataclass(frozen=True, config=_RULES)
class FrontierReason:
    """Why the answer is as it is. ``weight``: it decides, or it is a hint that the trainings outweigh."""

    weight: Literal["decides", "hint"]
    text: str


@dataclass(frozen=True, config=_RULES)
class SideVolume:
    """The hypervolume of what one manner of finding settings, ``side``, has found with the naive rule's budget.

    ``volume``: the mean over ``seeds``, each of ``points``; ``ci``: its 95 % interval over them, None of less than two.
    The first ``trainings`` of ``of`` are within the budget: they took ``spent_s``. ``equal``: whether there was as much
    to spend. ``scoring_s``: of further trainings, by which the points have more seeds: they found nothing.
    """

    side: str
    volume: float
    ci: tuple[float, float] | None
    seeds: Count
    points: Count
    trainings: Count
    of: Count
    spent_s: float
    equal: bool
    scoring_s: float = 0.0


@dataclass(frozen=True, config=_RULES)
class ReferencePoint:
    """The corner of a box from which hypervolumes are measured."""

    quality: float
    seconds: float
    cost: float


@dataclass(frozen=True, config=_RULES)
class FrontierVolumes:
    """Hypervolumes at equal budget: ``budget_s``, the worker-seconds that the naive rule's trainings took.

    Each is a part of one box, from the best values of all points to ``reference``, a tenth of their range beyond the
    worst; None: there are no points. Time and cost count by their logarithm.
    """

    budget_s: float
    reference: ReferencePoint | None
    sides: list[SideVolume]


@dataclass(frozen=True, config=_RULES)
class FrontierFound:
    """The answer of ``elastune frontier``: the rows, the pick among them and the command that trains it.

    ``command`` repeats ``command_trial``, one training of the pick's row, with the same seed: ``command_metrics`` are
    what it reports, ``command_note`` says so.
    ``answer`` is the one conclusion, ``reasons`` what it rests on. ``model_errors``: predicted over measured of the
    step-time model, by what; ``links``: those of the model "within a host" and "across hosts", where there are several
    hosts. ``prices_change``: ``price_per_worker_hour`` is that of the beginning.
    """

    quality: str
    direction: Literal["max", "min"]
    target: float | None
    price_per_worker_hour: float
    rows: list[FrontierRow]
    volumes: FrontierVolumes
    answer: str
    pick: Count | None = None
    command: str = ""
    command_trial: Count | None = None
    command_metrics: dict[str, float] = field(default_factory=dict)
    command_note: str = ""
    reasons: list[FrontierReason] = field(default_factory=list)
    model_errors: dict[str, float] = field(default_factory=dict)
    links: dict[str, LinkFitted] = field(default_factory=dict)
    prices_change: bool = False
    kind: Literal["frontier_found"] = "frontier_found"

    @model_validator(mode="after")
    def _picks_a_row(self) -> FrontierFound:
        if self.pick is not None and self.pick >= len(self.rows):
            raise ValueError("pick: must be the number of a row")
        return self
