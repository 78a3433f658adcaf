"""How a frontier's trainings are run beside configuration and workers, as far as it shows in a result: a *way*. Pure.

Crews (workers, mesh, mechanism, topology) of as many parts differ in time alone, since in ``exact`` mode nobody sees in
a result who computed what. What a space may choose beside them (mode, compression, micro-batch, strategy, policy) does
show, so that a training belongs to its way as it does to its configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastune.core.mesh import Mesh
from elastune.core.run import Config, Means, Mode
from elastune.core.sync_choice import SYNC_NAMES, SyncChoice
from elastune.core.topology import Topology
from elastune.job.validate_adapt import NO_POLICY, policies_of
from elastune.study.trial_results import means_in

OF_WAYS = ("mode", "compress", "micro_batch")
"""The means that belong to a way; all others belong to a crew."""


@dataclass(frozen=True)
class Way:
    """How a training is run. ``agreed``: how its workers agree; ``policies``: what adapts it while it runs."""

    mode: Mode = "exact"
    compress: str | None = None
    micro_batch: int | None = None
    agreed: SyncChoice = field(default_factory=SyncChoice)
    policies: tuple[str, ...] = ()

    @classmethod
    def of(cls, means: Means, agreed: SyncChoice | None = None, policies: tuple[str, ...] = ()) -> Way:
        """That of ``means``."""
        agreed = agreed or SyncChoice()
        return cls(means.mode, means.compress, means.micro_batch, agreed, policies)

    @property
    def alone(self) -> bool:
        """Whether one worker can train for any number of them: it does not show who computes a slot.

        A policy may ask how many workers there are, and how long they take.
        """
        return self.mode == "exact" and not self.policies

    def on(self, crew: Means) -> Means:
        """``crew`` going this way, with a slot at least for each learner."""
        own = {name: getattr(self, name) for name in OF_WAYS}
        return replace(crew, num_slots=self.agreed.slots(crew.num_slots), **own)

    def trainer(self, crew: Means) -> Means:
        """Who trains for ``crew``: one worker that does it all, and holds all of it, where that does not show."""
        own = self.on(crew)
        if not self.alone:
            return own
        whole = "tensor" if own.parts.tensor else "replicated"
        own = replace(own, workers=1, mesh=None, mechanism=whole, topology=Topology())
        return replace(own, offload=False, copies=None, zero_stage=None, bucket_bytes=None)

    def told(self, means: Means) -> dict[str, Any]:
        """``means`` and this way as a journal holds them, without what says nothing."""
        agreed = {} if self.agreed == SyncChoice() else self.agreed.to_json()
        texts = list(self.policies)
        return {
            **means.to_json(),
            **agreed,
            **({"policy": texts[0] if len(texts) == 1 else texts} if texts else {}),
        }


@dataclass(frozen=True)
class Recipe:
    """All that is chosen of a training but its seed and for whom it is: its configuration, and its way."""

    config: Config
    way: Way = field(default_factory=Way)

    @property
    def name(self) -> str:
        """What makes two of them the same."""
        return json.dumps([self.config, self.way.told(self.way.on(Means(num_slots=1)))], sort_keys=True)


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


def read_way(told: Mapping[str, Any]) -> tuple[Means, Way]:
    """What ``Way.told`` gave. Raises ``UserError`` for a journal that somebody else wrote."""
    means = means_in(told)
    return means, Way.of(means, SyncChoice.of(told), policies_of(told.get("policy", NO_POLICY)))


def shown(told: Mapping[str, Any]) -> dict[str, Any]:
    """Of means as a journal holds them, what shows in a result: all, unless one worker could have done it alone."""
    means, way = read_way(told)
    full = way.told(means)
    if not way.alone:
        return full
    names = ("mode", "num_slots", "virtual_tensor", "precision", "threads", "micro_batch", *SYNC_NAMES)
    return {name: full[name] for name in names if name in full}
