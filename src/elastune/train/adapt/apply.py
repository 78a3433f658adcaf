"""What a decision does to a worker's run: batch, learning rates, momentum, a state to go back to."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import MeshChoice
from elastune.core.signals import Decision
from elastune.core.sync_plan import SyncPlan
from elastune.core.topology import Topology
from elastune.elastic.worker.group import WorkerGroup
from elastune.train.adapt.agreement import PROGRAM
from elastune.train.adapt.lr import Ramp, scale_rates, set_rates
from elastune.train.adapt.monitoring import Monitoring
from elastune.train.adapt.routing import Routing
from elastune.train.checkpoints.tree import Tensors, from_tree, to_tree
from elastune.train.progress import Progress
from elastune.train.training_state import TrainingState


class DecisionApplier:
    """Applies decisions, the same ones at the same step boundary on every worker.

    Attributes:
        remembered: A state to go back to; joiners and checkpoints take it over.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        progress: Progress,
        monitoring: Monitoring,
        routing: Routing,
        meshes: MeshChoice | None = None,
    ) -> None:
        self._workers = workers
        self._routing = routing
        self._meshes = meshes or MeshChoice()
        self._monitoring = monitoring
        self._progress = progress
        self._ramps: list[Ramp] = []
        self.remembered: dict[str, Any] | None = None

    @property
    def topology(self) -> str:
        """What the run asks for now, as decisions have it."""
        return str(self._routing.asked)

    def apply(self, decision: Decision, trained: TrainingState, policy: str = "") -> None:
        """Do all of it, as ``policy`` has decided. Raises ``UserError`` with nothing done where a part cannot be."""
        progress, workers = self._progress, self._workers
        if decision.restore and self.remembered is None:
            raise UserError("a run goes back to what it remembers", "nothing yet", "let the policy remember first")
        if decision.micro_batch is not None and isinstance(trained.optimizer, torch.optim.LBFGS):
            raise UserError("LBFGS needs the whole batch in one pass", decision.micro_batch, "leave micro_batch alone")
        topology = None if decision.topology is None else Topology.parse(decision.topology)
        if topology is not None:
            self._routing.check(topology)
        if decision.sync is not None:
            why = "session.set_sync" if policy == PROGRAM else f"policy {policy}"
            trained.in_use.want(SyncPlan.parse(decision.sync), why)
        if decision.workers is not None:
            workers.resize(decision.workers, f"policy {policy}")
        if decision.mesh is not None:
            self._meshes.refuse(mesh := Mesh.parse(decision.mesh))
            workers.reshape(mesh, f"policy {policy}")
        if decision.replace_rank is not None:
            workers.replace(decision.replace_rank)
        if decision.restore:
            self._restore(trained)
        if decision.batch_size is not None:
            progress.batch_size = decision.batch_size
        if decision.micro_batch is not None:
            progress.micro_batch = decision.micro_batch
        if decision.lr is not None:
            self._ramps = []
            set_rates(trained.optimizer, trained.schedulers, decision.lr)
        if decision.lr_factor is not None:
            ramp = Ramp(decision.lr_factor, max(1, decision.ramp_steps), 0, decision.correct_momentum)
            if decision.ramp_steps:
                self._ramps.append(ramp)
            else:
                self._scale(ramp, trained)
        if decision.remember:
            self._remember(trained)
        if topology is not None:
            self._routing.change(topology, trained, policy)

    def ramp(self, trained: TrainingState) -> None:
        """After a step: the next part of each ramp."""
        self._ramps = [left for ramp in self._ramps if (left := self._scale(ramp, trained)) is not None]

    def _scale(self, ramp: Ramp, trained: TrainingState) -> Ramp | None:
        factor, left = ramp.next()
        factors = [factor] * len(trained.optimizer.param_groups)
        scale_rates(trained.optimizer, trained.schedulers, factors, correct_momentum=ramp.correct_momentum)
        return left

    def _remember(self, trained: TrainingState) -> None:
        tensors: Tensors = {}
        tree = to_tree(trained.whole(), tensors)
        copies = from_tree(tree, {name: t.detach().clone() for name, t in tensors.items()})
        self.remembered = {"trained": copies, "monitors": json.dumps(self._monitoring.to_json())}

    def _restore(self, trained: TrainingState) -> None:
        """Weights, optimizer and monitors as remembered; learning rates stay, and so does the place in the data."""
        assert self.remembered is not None
        tensors: Tensors = {}
        tree = to_tree(self.remembered["trained"], tensors)
        good = from_tree(tree, {name: t.clone() for name, t in tensors.items()})
        now = trained.state()
        optimizer = {**good["optimizer"], "param_groups": now["optimizer"]["param_groups"]}
        trained.load_whole({**now, "model": good["model"], "optimizer": optimizer}, "what the run remembered")
        self._monitoring.load(json.loads(self.remembered["monitors"]))

    def to_json(self) -> list[dict[str, Any]]:
        """The ramps under way, for a joiner or a checkpoint; beside ``remembered``."""
        return [asdict(ramp) for ramp in self._ramps]

    def load(self, told: list[dict[str, Any]]) -> None:
        """Go on from ``to_json``."""
        self._ramps = [Ramp(**ramp) for ramp in told]
