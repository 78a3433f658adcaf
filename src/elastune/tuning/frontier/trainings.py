"""The trainings of a frontier by settings, seed, slots and variant: each is made only once. Pure.

A ``Variant`` is what shows in a result beside configuration and slots: mode, compression, micro-batch, sync strategy
and policies. Everything else about the workers (count, mesh, mechanism, topology) changes only the time, because in
``exact`` mode the result does not depend on who computed what. So a training is identified by its configuration and
its variant, and serves every worker layout that cuts a batch into as many parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastune.adapt.policies.library.registry import NO_POLICY, policies_of
from elastune.core.communication import Topology
from elastune.core.journal.folds import TrialSummary, TrialTable
from elastune.core.journal.records import Reported, RunFinished, TrialFinished, TrialStarted
from elastune.core.mesh import Mesh
from elastune.core.run import Config, ExecutionSettings
from elastune.core.slots import Mode
from elastune.core.sync_plan import SYNC_NAMES, SyncChoice
from elastune.tuning.study.trial_results import execution_settings_of

VARIANT_SETTINGS = ("mode", "compress", "micro_batch")
"""The execution settings that belong to a variant; all others belong to a worker layout."""
NOISE_SCALE = "noise_scale"
"""The monitor of a training whose quality counts, and its signal."""
TIMED = ("calibrate", "throughput")
"""The phases that measure step times, and no quality."""
LAYOUT_TAG = "layout"
"""The tag of a search trial whose space chose a worker layout: the execution settings of that layout."""
FOR_WORKERS = "for_workers"
"""The tag of a trial that is for another number of parts of a batch than its slots or workers."""
REFUSED = "refused: "


@dataclass(frozen=True)
class Variant:
    """The part of a training's execution that shows in its result, beside configuration and slots.

    ``agreed``: the sync strategy of its workers and its schedule; ``policies``: the policies that adapt it.
    """

    mode: Mode = "exact"
    compress: str | None = None
    micro_batch: int | None = None
    agreed: SyncChoice = field(default_factory=SyncChoice)
    policies: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, execution: ExecutionSettings, agreed: SyncChoice | None = None, policies: tuple[str, ...] = ()
    ) -> Variant:
        """The variant of ``execution``, with sync strategy and policies."""
        agreed = agreed or SyncChoice()
        return cls(execution.mode, execution.compress, execution.micro_batch, agreed, policies)

    @property
    def alone(self) -> bool:
        """Whether one worker can train for any number of workers, because the result is the same.

        Policies exclude that: they may use the worker count and the times of steps.
        """
        return self.mode == "exact" and not self.policies

    def on(self, layout: ExecutionSettings) -> ExecutionSettings:
        """``layout`` with the settings of this variant, and with at least one slot for each learner."""
        settings = {name: getattr(self, name) for name in VARIANT_SETTINGS}
        return replace(layout, num_slots=self.agreed.slots(layout.num_slots), **settings)

    def trainer(self, layout: ExecutionSettings) -> ExecutionSettings:
        """The execution settings that train for ``layout``: one worker with the whole model if ``alone``."""
        execution = self.on(layout)
        if not self.alone:
            return execution
        whole = "tensor" if execution.parts.tensor else "replicated"
        execution = replace(execution, workers=1, mesh=None, mechanism=whole, topology=Topology())
        return replace(execution, offload=False, copies=None, zero_stage=None, bucket_bytes=None)

    def to_record(self, execution: ExecutionSettings) -> dict[str, Any]:
        """``execution`` and this variant in the form that the journal keeps, without defaults."""
        agreed = {} if self.agreed == SyncChoice() else self.agreed.to_json()
        texts = list(self.policies)
        return {
            **execution.to_json(),
            **agreed,
            **({"policy": texts[0] if len(texts) == 1 else texts} if texts else {}),
        }


@dataclass(frozen=True)
class Recipe:
    """What is trained, whatever the seed and the worker layout: a configuration and a variant."""

    config: Config
    variant: Variant = field(default_factory=Variant)

    @property
    def name(self) -> str:
        """The text that is equal for equal recipes."""
        return json.dumps(
            [self.config, self.variant.to_record(self.variant.on(ExecutionSettings(num_slots=1)))], sort_keys=True
        )


@dataclass(frozen=True)
class StepKind:
    """How a step runs, as far as its time depends on it.

    Attributes:
        mesh: The mesh of its workers.
        apart: How its execution settings differ from the calibrated ones, in words; "" for no difference.
        every: One of so many steps exchanges gradients or parameters.
        passes: How many learners a worker computes one after the other.
    """

    mesh: Mesh
    apart: str = ""
    every: int = 1
    passes: int = 1

    @property
    def workers(self) -> int:
        return self.mesh.workers


def read_variant(recorded: Mapping[str, Any]) -> tuple[ExecutionSettings, Variant]:
    """Read what ``Variant.to_record`` wrote. Raises ``UserError`` for a record of another form."""
    execution = execution_settings_of(recorded)
    return execution, Variant.of(execution, SyncChoice.of(recorded), policies_of(recorded.get("policy", NO_POLICY)))


def shown(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The part of recorded execution settings that shows in a result: all of them, unless the variant is ``alone``."""
    execution, variant = read_variant(recorded)
    full = variant.to_record(execution)
    if not variant.alone:
        return full
    names = ("mode", "num_slots", "virtual_tensor", "precision", "threads", "micro_batch", *SYNC_NAMES)
    return {name: full[name] for name in names if name in full}


@dataclass(frozen=True)
class Training:
    """One training that has ended, with its reports. ``result.state`` shows whether it counts.

    Attributes:
        slots: One for each worker that the training is for, or more for learners.
        layout: The worker layout that the space chose; None if it chose none.
        recorded_parts: For how many parts of a batch the training is, if that differs from ``slots``.
    """

    trial: int
    config: Config
    seed: int
    slots: int
    phase: str
    reports: tuple[Reported, ...]
    result: TrialFinished
    variant: Variant = field(default_factory=Variant)
    layout: ExecutionSettings | None = None
    recorded_parts: int | None = None

    @property
    def parts(self) -> int:
        """Into how many parts the layouts that it is for cut a batch."""
        return self.slots if self.recorded_parts is None else self.recorded_parts

    @property
    def recipe(self) -> Recipe:
        """What was trained, whatever the layout."""
        return Recipe(self.config, self.variant)

    @property
    def run(self) -> RunFinished | None:
        """How it ended, if it ended well."""
        return self.result.run

    @property
    def worker_seconds(self) -> float:
        """The worker-seconds that it took here."""
        measured_s = self.result.worker_seconds
        return self.result.seconds if measured_s is None else measured_s


@dataclass(frozen=True)
class Spent:
    """Worker-seconds that a trial took here, and its training; None where it paused and rests."""

    worker_seconds: float
    started: TrialStarted
    training: Training | None


def name_of(config: Config) -> str:
    """The text that is equal for equal configurations."""
    return json.dumps(config, sort_keys=True)


def key(config: Config, seed: int, recorded: Mapping[str, Any]) -> str:
    """The text that is equal for trainings with equal results.

    ``recorded``: the settings of the workers that train, as ``Variant.to_record`` gives them.
    """
    return json.dumps([config, seed, shown(recorded)], sort_keys=True)


class Trainings:
    """A view of the trials in ``table`` whose quality counts.

    It leaves out trials that only measure step times, and trials that began before an accepted change of the program.
    """

    def __init__(self, table: TrialTable) -> None:
        self._table = table
        self._done: dict[str, Training] = {}
        self._counted = -1

    @property
    def done(self) -> dict[str, Training]:
        """The trainings that ended, by ``key``, in the order they did."""
        if self._counted != len(self._table.ended):
            self._counted, self._done = len(self._table.ended), {}
            for life in (self._table.trials[n] for n in self._table.ended if n >= self._table.since):
                if life.started.phase not in TIMED and not _refused(life):
                    self._done.setdefault(_key_of(life.started), training_of(life))
        return self._done

    @property
    def searched(self) -> list[Spent]:
        """All trials of the search that are not running, in the order in which they ended or paused."""
        lives = [life for life in self._lives if life.started.phase == "search"]
        resting = sorted((life for life in lives if life.state != "running"), key=lambda life: life.last_s)
        return [
            Spent(life.worker_seconds, life.started, training_of(life) if life.state == "over" else None)
            for life in resting
        ]

    def open(self, phase: str) -> set[str]:
        """The keys of trials of ``phase`` that run or will go on."""
        lives = [life.started for life in self._lives if life.state != "over"]
        return {_key_of(started) for started in lives if started.phase == phase}

    @property
    def _lives(self) -> list[TrialSummary]:
        return [life for life in self._table.trials.values() if life.number >= self._table.since]


def training_of(life: TrialSummary) -> Training:
    """The training of a trial that is over."""
    started, finished = life.started, life.finished
    assert finished is not None
    reports = tuple(report for report, _ in life.reports)
    execution, variant = read_variant(started.execution)
    chosen, parts = started.tags.get(LAYOUT_TAG), started.tags.get(FOR_WORKERS)
    return Training(
        life.number,
        started.config,
        started.seed,
        execution.num_slots,
        started.phase,
        reports,
        finished,
        variant,
        None if chosen is None else ExecutionSettings.from_json(chosen),
        parts,
    )


def _key_of(started: TrialStarted) -> str:
    return key(started.config, started.seed, started.execution)


def _refused(life: TrialSummary) -> bool:
    """Whether the trial never ran, because its execution settings could not be combined.

    Such a trial does not count as a training with its settings.
    """
    return life.finished is not None and life.finished.reason.startswith(REFUSED)
