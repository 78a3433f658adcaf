"""Records of a frontier: the execution settings that were timed, the rows of the table, and the answer."""

from __future__ import annotations

import json
from dataclasses import field
from importlib import import_module
from typing import Any, Literal

from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass

from elastune.core.journal.run_records import Count
from elastune.core.journal.study_records import LinkFitted

_RULES = ConfigDict(extra="forbid")
ROW_SETTINGS = ("compress", "micro_batch", "precision", "sync", "sync_schedule", "policy")
"""The execution settings that belong to a row. The others only choose the workers and the routes."""


@dataclass(frozen=True, config=_RULES)
class ScalingPoint:
    """The time and cost of a training with one row's settings on a number of workers.

    ``seconds_label`` and ``seconds_factor`` are as in ``FrontierRow``.
    """

    workers: Count
    seconds: float
    seconds_label: Literal["measured", "modelled"]
    seconds_factor: float | None
    cost: float


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
        seconds_factor: A modelled time may be too long or too short by this factor; 1.0: measured; None: the model
            could not be checked.
        throughput: Samples a second.
        scaling: The same settings on each number of workers that was asked about, fewest first, and on its own.
        scaling_efficiency: How many times as fast its workers are as the first of ``scaling``, over how many times as
            many they are: always of the same settings. None where there are no fewer workers to compare with.
        scaling_label: "modelled" where the time of either is.
        seed_values: The quality of each seed that did not diverge; ``seed_seconds``: its training time.
        time_to_target_s: Seconds to the target, the mean over seeds; None unless all have ``reached`` it.
        time_to_target_ci: Its 95 % interval over seeds.
        noise_scale: The noise scale at the end of training, in samples; ``noise_scale_error`` is its standard error.
        execution: All system parameters, the sync strategy and the policies.
        differences: The parts of ``execution`` that differ from the request, in words.
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
    execution: dict[str, Any] = field(default_factory=dict)
    differences: str = ""
    scaling: list[ScalingPoint] = field(default_factory=list)
    seed_values: list[float] = field(default_factory=list)
    seed_seconds: list[float] = field(default_factory=list)

    @property
    def settings(self) -> str:
        """The settings of the row as a text: equal for rows that differ in workers only."""
        execution = {name: value for name, value in self.execution.items() if name in ROW_SETTINGS}
        return json.dumps([self.config, self.mode, execution], sort_keys=True)

    @property
    def division(self) -> str:
        """How the workers divide the model: "shard=4, zero"; "" where each worker has all of it."""
        return "" if self.mechanism == "replicated" else f"{self.mesh}, {self.mechanism}"

    @property
    def apart(self) -> str:
        """How the workers divide the model, and which other execution settings differ from the request; ""
        for nothing.
        """
        words = [word for word in self.differences.split(", ") if word and word != self.mechanism]
        return ", ".join([*([self.division] if self.division else []), *words])


@dataclass(frozen=True, config=_RULES)
class ExecutionTimed:
    """Execution settings, and the time of a step by them.

    Attributes:
        same: Whether the short run ended with the same bits as the run by the requested settings; None: it diverged or
            failed, and so was not timed.
    """

    execution: dict[str, Any]
    changed: str
    step_s: float | None
    same: bool | None


@dataclass(frozen=True, config=_RULES)
class ThroughputTuned:
    """The result of the throughput phase for one number of workers and mesh, by short runs with a global ``batch``.

    Attributes:
        tried: The timed execution settings; the requested ones come first.
        chosen: The place in ``tried`` of the settings from now on.
    """

    batch: Count
    tried: list[ExecutionTimed]
    chosen: Count
    kind: Literal["throughput_tuned"] = "throughput_tuned"

    @model_validator(mode="after")
    def _chose_one(self) -> ThroughputTuned:
        if self.chosen >= len(self.tried):
            raise ValueError("chosen: must be the number of one that was tried")
        return self


@dataclass(frozen=True, config=_RULES)
class FrontierReason:
    """A reason for the answer.

    Attributes:
        weight: "decides", or "hint": the trainings outweigh it.
        text: The reason.
    """

    weight: Literal["decides", "hint"]
    text: str


@dataclass(frozen=True, config=_RULES)
class SideVolume:
    """The hypervolume that one search, ``side``, has reached with the naive rule's budget.

    Attributes:
        volume: The mean over ``seeds``, each of ``points``.
        ci: Its 95 % interval over seeds; None for less than two.
        trainings: The number of trainings, of all ``of``, within the budget: the first ones.
        spent_s: The worker-seconds of these trainings.
        equal: Whether the full budget was available.
        scoring_s: Worker-seconds of further trainings, which give the points more seeds and add no points.
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
class Gain:
    """The gain from one change while everything else stays the same: one training compared with another.

    Attributes:
        workers: The workers of the training that is judged.
        beside_workers: The workers of the training that it is compared with.
        times_as_fast: The other's time over its own.
        low: The lower end of ``times_as_fast``, by the spread over seeds and, where a time is modelled, by the model's
            own error. None without either: seeds take equal steps, or the model could not be checked.
        high: The upper end.
        label: "modelled" where either time is.
        times_the_cost: Its own cost over the other's.
        beside: The row of the other training; None where the table has none.
    """

    workers: Count
    beside_workers: Count
    times_as_fast: float
    low: float | None
    high: float | None
    label: Literal["measured", "modelled"]
    times_the_cost: float
    beside: Count | None = None

    @property
    def pays(self) -> bool:
        """Whether the change brings more speed than cost, by more than the model's own error."""
        shown = self.low > 1 if self.low is not None else self.label == "measured"
        return shown and self.times_as_fast > self.times_the_cost


@dataclass(frozen=True, config=_RULES)
class OwnMachine:
    """The best result of the measuring machine alone.

    Attributes:
        cores: The cores that it may use; ``gpus``: its GPUs, where the program trains on them.
        row: The best row within them; None: no row with so few workers qualifies.
        command: Trains that row.
    """

    cores: Count
    gpus: Count = 0
    row: Count | None = None
    command: str = ""


Conclusion = Literal[
    "use", "fewest are enough", "fewest may be enough", "own settings do", "not shown", "none", "diverged"
]
"""How an answer ends. "own settings do": as well as the best that is shown, by ``more_seeds`` that are yet to train."""


@dataclass(frozen=True, config=_RULES)
class FrontierAnswer:
    """The one record of a frontier's answer: headline, lines, table, pictures and command are all drawn from it.

    Attributes:
        sentence: The headline, at most 20 words.
        pick: The number of the row to take; None: none.
        settings_name: The kind of the pick's settings: "tuned settings", "the program's own settings", "the naive
            rule".
        settings: The gain of the pick's settings over the program's own, both on the fewest workers; None: they are the
            program's own, or it was not measured.
        workers: The gain of the pick's workers over the fewest, both with the pick's settings; None: it has the fewest.
        total: Both gains together: the pick compared with the program's own settings on the fewest workers.
        naive: The pick compared with the naive rule on as many workers.
        more_workers: The gain of more workers than the pick's, with its settings; the fastest number of them.
        cheapest: The pick compared with the cheapest row that also qualifies; None: it is the pick.
        fastest: The fastest row that also qualifies, compared with the pick; None: it is the pick. ``fastest_row``: its
            number.
        fastest_command: Trains that row.
        shown: The row that is shown to qualify, where the pick is the program's own settings.
        more_seeds: The number of further seeds that would show that the pick qualifies, with the same mean and spread.
        this_machine: The best result of this machine; None where the trainings ran on other hosts.
        naive_rule: How far the naive rule goes, in words.
        not_done: The requests that were not carried out, and why.
        command: A command that repeats ``command_trial``, one training of the pick's row, with the same seed.
        command_metrics: The metrics of that training.
        command_note: These metrics in words.
    """

    sentence: str
    conclusion: Conclusion = "use"
    pick: Count | None = None
    settings_name: str = ""
    settings: Gain | None = None
    workers: Gain | None = None
    total: Gain | None = None
    naive: Gain | None = None
    more_workers: Gain | None = None
    cheapest: Gain | None = None
    fastest: Gain | None = None
    fastest_row: Count | None = None
    fastest_command: str = ""
    shown: Count | None = None
    more_seeds: Count | None = None
    this_machine: OwnMachine | None = None
    naive_rule: str = ""
    not_done: list[str] = field(default_factory=list)
    command: str = ""
    command_trial: Count | None = None
    command_metrics: dict[str, float] = field(default_factory=dict)
    command_note: str = ""

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of all rows that it names."""
        gains = (self.settings, self.workers, self.total, self.naive, self.more_workers, self.cheapest, self.fastest)
        beside = [gain.beside for gain in gains if gain is not None]
        here = None if self.this_machine is None else self.this_machine.row
        return tuple(row for row in (self.pick, self.shown, self.fastest_row, here, *beside) if row is not None)


@dataclass(frozen=True, config=_RULES)
class FrontierFound:
    """The result of ``elastune frontier``: the rows, and the answer drawn from them.

    Attributes:
        rows: The rows of the table.
        answer: The answer.
        reasons: The reasons for the answer.
        model_errors: Predicted over measured values of the step-time model, by quantity.
        links: The links of the model, "within a host" and "across hosts", where there are several hosts.
        price_per_worker_hour: The price of a worker-hour; where ``prices_change``, the price at the beginning.
    """

    quality: str
    direction: Literal["max", "min"]
    target: float | None
    price_per_worker_hour: float
    rows: list[FrontierRow]
    volumes: FrontierVolumes
    answer: FrontierAnswer
    reasons: list[FrontierReason] = field(default_factory=list)
    model_errors: dict[str, float] = field(default_factory=dict)
    links: dict[str, LinkFitted] = field(default_factory=dict)
    prices_change: bool = False
    kind: Literal["frontier_found"] = "frontier_found"

    @property
    def pick(self) -> int | None:
        """The number of the row to take."""
        return self.answer.pick

    @property
    def command(self) -> str:
        """The command that trains the pick."""
        return self.answer.command

    def _repr_html_(self) -> str | None:
        try:  # the room of reports comes later; without its packages a notebook shows the text
            return str(import_module("elastune.report.notebook").of_frontier(self))
        except ImportError:
            return None

    @model_validator(mode="before")
    @classmethod
    def _of_an_older_journal(cls, record: Any) -> Any:
        """There the answer was a sentence, and the pick and its command stood beside it."""
        if not (isinstance(record, dict) and isinstance(record.get("answer"), str)):
            return record
        moved = ("pick", "command", "command_trial", "command_metrics", "command_note")
        rest = {name: value for name, value in record.items() if name not in moved}
        answer = {"sentence": record["answer"], **{name: record[name] for name in moved if name in record}}
        return {**rest, "answer": answer}

    @model_validator(mode="after")
    def _names_its_rows(self) -> FrontierFound:
        if any(row >= len(self.rows) for row in self.answer.rows):
            raise ValueError("answer: must name rows by their numbers")
        return self
