"""The records of a frontier: the means that its throughput phase found, the rows of its table, and the answer."""

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
    """One row of the trade-off table: settings, number and mesh of workers, and what they reach.

    Attributes:
        quality: The mean of the quality metric over ``seeds``: on data that the search never saw (``held_out``) or,
            where the program reports none, on its validation data.
        ci: The 95 % confidence interval of ``quality``: over seeds and, where ``test_samples`` is known, of the test
            set.
        loss: By how much quality is worse than the baseline's, with the same ``pairs`` of seeds.
        loss_bound: The one-sided 95 % bound of ``loss``; it is compared with ``margin``.
        verdict: Whether quality is shown to be at the target or, without a target, no worse than the baseline's by more
            than the margin.
        quality_label: "measured": trainings ran on so many workers. "emulated": they ran on fewer, which work as these
            would.
        num_slots: It belongs to the settings, because a slot has its own random stream and batch statistics.
        seconds: The time of the whole training.
        seconds_factor: A modelled time may be off by this factor either way; 1.0: measured; None: the model could not
            be checked.
        throughput: Samples a second.
        scaling_efficiency: ``throughput`` over that of one worker with the program's own settings, divided by
            ``workers``; None where there is no such row.
        scaling_label: "modelled" where the time of either is.
        time_to_target_s: Seconds to the target, the mean over seeds; None unless all have ``reached`` it.
        time_to_target_ci: Its 95 % interval over seeds.
        noise_scale: The noise scale at the end of training, in samples; ``noise_scale_error`` is its standard error.
        means: All system parameters, the sync strategy and the policies.
        ways: Which of ``means`` are not as they were asked for, in words.
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
        """How its workers divide the model: "shard=4, zero"; "" where each worker has all of it."""
        return "" if self.mechanism == "replicated" else f"{self.mesh}, {self.mechanism}"

    @property
    def apart(self) -> str:
        """How its workers divide the model, and which other means are not as they were asked for; "" for nothing."""
        words = [word for word in self.ways.split(", ") if word and word != self.mechanism]
        return ", ".join([*([self.division] if self.division else []), *words])


@dataclass(frozen=True, config=_RULES)
class MeansTimed:
    """Means of a crew, and the time of a step by them.

    Attributes:
        same: Whether the short run ended with the same bits as the run by the crew's own means; None: it diverged or
            failed, and so was not timed.
    """

    means: dict[str, Any]
    changed: str
    step_s: float | None
    same: bool | None


@dataclass(frozen=True, config=_RULES)
class ThroughputTuned:
    """What the throughput phase found for one crew, by short runs with a global ``batch`` and no training.

    Attributes:
        tried: The means that were timed; the crew's own come first.
        chosen: Which of them the crew has from now on.
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
    """Why the answer is as it is.

    Attributes:
        weight: "decides", or "hint": the trainings outweigh it.
        text: The reason.
    """

    weight: Literal["decides", "hint"]
    text: str


@dataclass(frozen=True, config=_RULES)
class SideVolume:
    """The hypervolume that one way of finding settings, ``side``, has reached with the naive rule's budget.

    Attributes:
        volume: The mean over ``seeds``, each of ``points``.
        ci: Its 95 % interval over seeds; None of less than two.
        trainings: How many of the ``of`` trainings are within the budget: the first ones.
        spent_s: The worker-seconds that these took.
        equal: Whether there was as much to spend.
        scoring_s: Worker-seconds of further trainings, which give the points more seeds; they found nothing.
        against: What the intervals say of it and the naive rule; "" for the naive rule itself.
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
    against: str = ""


@dataclass(frozen=True, config=_RULES)
class ReferencePoint:
    """The corner of a box from which hypervolumes are measured."""

    quality: float
    seconds: float
    cost: float


@dataclass(frozen=True, config=_RULES)
class FrontierVolumes:
    """Hypervolumes at equal budget.

    Each is a part of one box, from the best values of all points to ``reference``. Time and cost count by their
    logarithm.

    Attributes:
        budget_s: The worker-seconds that the naive rule's trainings took.
        reference: A tenth of the points' range beyond the worst values; None: there are no points.
    """

    budget_s: float
    reference: ReferencePoint | None
    sides: list[SideVolume]


@dataclass(frozen=True, config=_RULES)
class FrontierFound:
    """The answer of ``elastune frontier``: the rows, the pick among them, and the command that trains it.

    Attributes:
        rows: The rows of the table.
        pick: The number of the row to take; None: none.
        answer: The one conclusion.
        reasons: What the answer rests on.
        command: A command that repeats ``command_trial``, one training of the pick's row, with the same seed.
        command_metrics: What that training reports.
        command_note: That in words.
        model_errors: Predicted over measured values of the step-time model, by what.
        links: The links of the model, "within a host" and "across hosts", where there are several hosts.
        price_per_worker_hour: The price of a worker-hour; where ``prices_change``, that of the beginning.
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
