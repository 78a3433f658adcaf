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

from elastune.core.communication import Topology
from elastune.core.journal.records import Reported, RunFinished, TrialFinished, TrialStarted
from elastune.core.journal.trials import TrialSummary, TrialTable
from elastune.core.mesh import Mesh
from elastune.core.run import Config, ExecutionSettings, Mode
from elastune.core.sync_plan import SYNC_NAMES, SyncChoice
from elastune.runtime.job.validation import NO_POLICY, policies_of
from elastune.tune.study.trial_results import execution_settings_of

# [ways] How a frontier's trainings are run beside configuration and workers, as far as it shows in a result: a *way*. Pure.
#
# Crews (workers, mesh, mechanism, topology) of as many parts differ in time alone, since in ``exact`` mode nobody sees in
# a result who computed what. What a space may choose beside them (mode, compression, micro-batch, strategy, policy) does
# show, so that a training belongs to its way as it does to its configuration.

VARIANT_SETTINGS = ("mode", "compress", "micro_batch")
"""The means that belong to a way; all others belong to a crew."""


@dataclass(frozen=True)
class Variant:
    """How a training is run. ``agreed``: how its workers agree; ``policies``: what adapts it while it runs."""

    mode: Mode = "exact"
    compress: str | None = None
    micro_batch: int | None = None
    agreed: SyncChoice = field(default_factory=SyncChoice)
    policies: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, execution: ExecutionSettings, agreed: SyncChoice | None = None, policies: tuple[str, ...] = ()
    ) -> Variant:
        """That of ``execution``."""
        agreed = agreed or SyncChoice()
        return cls(execution.mode, execution.compress, execution.micro_batch, agreed, policies)

    @property
    def alone(self) -> bool:
        """Whether one worker can train for any number of them: it does not show who computes a slot.

        A policy may ask how many workers there are, and how long they take.
        """
        return self.mode == "exact" and not self.policies

    def on(self, layout: ExecutionSettings) -> ExecutionSettings:
        """``layout`` going this way, with a slot at least for each learner."""
        own = {name: getattr(self, name) for name in VARIANT_SETTINGS}
        return replace(layout, num_slots=self.agreed.slots(layout.num_slots), **own)

    def trainer(self, layout: ExecutionSettings) -> ExecutionSettings:
        """Who trains for ``layout``: one worker that does it all, and holds all of it, where that does not show."""
        own = self.on(layout)
        if not self.alone:
            return own
        whole = "tensor" if own.parts.tensor else "replicated"
        own = replace(own, workers=1, mesh=None, mechanism=whole, topology=Topology())
        return replace(own, offload=False, copies=None, zero_stage=None, bucket_bytes=None)

    def told(self, execution: ExecutionSettings) -> dict[str, Any]:
        """``execution`` and this way as a journal holds them, without what says nothing."""
        agreed = {} if self.agreed == SyncChoice() else self.agreed.to_json()
        texts = list(self.policies)
        return {
            **execution.to_json(),
            **agreed,
            **({"policy": texts[0] if len(texts) == 1 else texts} if texts else {}),
        }


@dataclass(frozen=True)
class Recipe:
    """All that is chosen of a training but its seed and for whom it is: its configuration, and its way."""

    config: Config
    variant: Variant = field(default_factory=Variant)

    @property
    def name(self) -> str:
        """What makes two of them the same."""
        return json.dumps(
            [self.config, self.variant.told(self.variant.on(ExecutionSettings(num_slots=1)))], sort_keys=True
        )


@dataclass(frozen=True)
class StepKind:
    """How a step is carried out, as far as its time goes.

    ``apart``: what of its means is not as it was calibrated, in words; "": nothing. ``every``: of how many steps one
    brings gradients or parameters together; ``passes``: how many learners a worker carries one after the other.
    """

    mesh: Mesh
    apart: str = ""
    every: int = 1
    passes: int = 1

    @property
    def workers(self) -> int:
        return self.mesh.workers


def read_variant(told: Mapping[str, Any]) -> tuple[ExecutionSettings, Variant]:
    """What ``Way.told`` gave. Raises ``UserError`` for a journal that somebody else wrote."""
    execution = execution_settings_of(told)
    return execution, Variant.of(execution, SyncChoice.of(told), policies_of(told.get("policy", NO_POLICY)))


def shown(told: Mapping[str, Any]) -> dict[str, Any]:
    """Of means as a journal holds them, what shows in a result: all, unless one worker could have done it alone."""
    execution, variant = read_variant(told)
    full = variant.told(execution)
    if not variant.alone:
        return full
    names = ("mode", "num_slots", "virtual_tensor", "precision", "threads", "micro_batch", *SYNC_NAMES)
    return {name: full[name] for name in names if name in full}


# [trainings] The trainings of a frontier by settings, seed, slots and way: each is made once, whichever phase asks first.

NOISE_SCALE = "noise_scale"
"""The monitor of a training whose quality counts, and its signal."""
TIMED = ("calibrate", "throughput")
"""The phases that measure step times, and no quality."""
LAYOUT_TAG = "crew"
"""The tag of a trial of the search whose space chose for whom it is: that crew's means."""
FOR_WORKERS = "for_workers"
"""The tag of a trial that speaks for others than its workers or slots: for how many parts of a batch."""
REFUSED = "refused: "


@dataclass(frozen=True)
class Training:
    """One training from start to end, and what it reported on the way. ``result.state`` tells whether it counts.

    ``slots``: one for each of the workers that it speaks for, however many trained it, or more for learners. ``layout``:
    that which the space chose; None: it chose none. ``recorded_parts``: for how many parts of a batch, where not ``slots``.
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
        """Into how many parts those cut a batch for whom it was trained."""
        return self.slots if self.recorded_parts is None else self.recorded_parts

    @property
    def recipe(self) -> Recipe:
        """What was trained, whoever it speaks for."""
        return Recipe(self.config, self.variant)

    @property
    def run(self) -> RunFinished | None:
        """How it ended, if it ended well."""
        return self.result.run

    @property
    def worker_seconds(self) -> float:
        """What it took here, of all workers together."""
        told = self.result.worker_seconds
        return self.result.seconds if told is None else told


@dataclass(frozen=True)
class Spent:
    """Worker-seconds that a trial took here, and its training; None where it paused and rests."""

    worker_seconds: float
    started: TrialStarted
    training: Training | None


def name_of(config: Config) -> str:
    """What makes two configurations the same."""
    return json.dumps(config, sort_keys=True)


def key(config: Config, seed: int, told: Mapping[str, Any]) -> str:
    """What makes two trainings the same: all that decides their result. ``told``: as ``Way.told``, of who trains."""
    return json.dumps([config, seed, shown(told)], sort_keys=True)


class Trainings:
    """A view of the trials in ``table`` whose quality counts: not of those that measure step times, nor of those that
    began before an accepted change of the program."""

    def __init__(self, table: TrialTable) -> None:
        self._table = table
        self._done: dict[str, Training] = {}
        self._counted = -1

    @property
    def done(self) -> dict[str, Training]:
        """Those that ended, by ``key``, in the order they did."""
        if self._counted != len(self._table.ended):
            self._counted, self._done = len(self._table.ended), {}
            for life in (self._table.trials[n] for n in self._table.ended if n >= self._table.since):
                if life.started.phase not in TIMED and not _refused(life):
                    self._done.setdefault(_key_of(life.started), training_of(life))
        return self._done

    @property
    def searched(self) -> list[Spent]:
        """All that the search began and does not run just now, in the order in which it ended or paused."""
        lives = [life for life in self._lives if life.started.phase == "search"]
        resting = sorted((life for life in lives if life.state != "running"), key=lambda life: life.last_s)
        return [
            Spent(life.worker_seconds, life.started, training_of(life) if life.state == "over" else None)
            for life in resting
        ]

    def open(self, phase: str) -> set[str]:
        """The keys of those of ``phase`` that run, or will go on."""
        lives = [life.started for life in self._lives if life.state != "over"]
        return {_key_of(started) for started in lives if started.phase == phase}

    @property
    def _lives(self) -> list[TrialSummary]:
        return [life for life in self._table.trials.values() if life.number >= self._table.since]


def training_of(life: TrialSummary) -> Training:
    """A trial that is over."""
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
    """Whether it never ran, since its means cannot be had together: another one may then be like it."""
    return life.finished is not None and life.finished.reason.startswith(REFUSED)
