"""What can happen to a run's state: snapshots in memory, transfer to another worker, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.records import LayersDivided, Record, Restarted, StagesDivided, StateLost
from elastune.core.layout import ParamBlock, Segment, Split, Unrecoverable
from elastune.core.run import Config, RunSpec, derive
from elastune.elastic.wire.view import View
from elastune.elastic.worker.group import WorkerGroup
from elastune.elastic.worker.reconcile import OpenRound
from elastune.elastic.worker.state_transfer import Packed
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import Replica, flatten, unflatten
from elastune.parallel.mechanisms.owned.placement import VALUES, PlacedState, Shard, meet
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.owned.state import Kept, hand_over, kept, restore
from elastune.parallel.mechanisms.tensor_storage import let_go
from elastune.parallel.sync.base import Sync
from elastune.train.adaptation.adapter import Adapter
from elastune.train.checkpoints.run_folder import RunFolder
from elastune.train.checkpoints.tree import Part, Tensors, from_trees, load_states, states_of, to_trees
from elastune.train.collectives import NamedCollectives
from elastune.train.data.fingerprint import TrainingDataHistory
from elastune.train.progress import Progress
from elastune.train.rng import seed_everything
from elastune.train.tracked import unscaled
from elastune.train.training_state import TrainingState, described

# [snapshots] A snapshot's shards as text and tensors, so that they travel and are kept as the rest of a state does.


def packed_shards(kept: Kept) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """``kept`` as a JSON value, and its tensors in the order that it names."""
    rows = [
        [shard.segment.param_block, shard.segment.start, shard.segment.stop, shard.held, list(shard.tensors)]
        for shard in kept.shards
    ]
    param_blocks = [asdict(param_block) for param_block in kept.split.param_blocks]
    told = {
        "leaves": param_blocks,
        "blocks": kept.split.blocks,
        "costs": list(kept.split.costs),
        "copies": kept.copies,
        "frees": kept.frees,
        "version": kept.version,
        "shards": rows,
        "facts": {str(param_block): facts for param_block, facts in kept.facts.items()},
    }
    return told, [tensor for shard in kept.shards for tensor in shard.tensors.values()]


def unpacked_shards(told: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Kept:
    """What ``packed_shards`` was given."""
    left = iter(tensors)
    shards = [
        Shard(Segment(param_block, start, stop), {name: next(left) for name in names}, held)
        for param_block, start, stop, held, names in told["shards"]
    ]
    param_blocks = [
        ParamBlock(**{**param_block, "box": tuple((a, b) for a, b in param_block["box"])})
        for param_block in told["leaves"]
    ]
    split = Split(tuple(param_blocks), told["blocks"], tuple(told["costs"]))
    facts = {int(param_block): facts for param_block, facts in told["facts"].items()}
    return Kept(split, told["copies"], told["frees"], told["version"], tuple(shards), facts)


# [run state] All that becomes of a run's state: snapshots in memory, the transfer to another worker, its folder.

MOST_NAMED = 8  # tensors of which pieces were lost


class OpenStep(Protocol):
    """What a run's state asks of the step that is under way (``train.step.StepTransaction``)."""

    unrepeatable: bool

    @property
    def completed_steps(self) -> int: ...
    @property
    def reducing(self) -> bool: ...
    @property
    def round_steps(self) -> int: ...
    @property
    def open_round(self) -> OpenRound: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_lost(self) -> bool: ...
    def regrouped(self) -> None: ...
    def recover(self, error: GroupBroken) -> bool: ...
    def adopt_result(self, result: Sequence[torch.Tensor]) -> None: ...


class RunState:
    """One worker's state, for its group (``elastic.worker.state_owner.StateOwner``) and for its run's folder.

    What is saved, packed, handed over and loaded is ``parts``, and nothing else; ``parts`` given are added to it.
    """

    def __init__(
        self,
        spec: RunSpec,
        config: Config,
        workers: WorkerGroup,
        progress: Progress,
        transaction: OpenStep,
        adapter: Adapter,
        send: Callable[[Record], None],
        parts: Sequence[Part] = (),
    ) -> None:
        self._spec = spec
        self.workers = workers
        self._progress = progress
        self._transaction = transaction
        self._adapter = adapter
        self._send = send
        self._snapshot: Packed | None = None
        self._told: tuple[LayersDivided | StagesDivided, ...] = ()
        self._evaluations = 0  # that began since the newest step; the program may leave one early
        self.trained: TrainingState | None = None
        self.collectives: NamedCollectives | None = None
        self.scale: Callable[[], float] | None = None  # of the loss that the program gives
        self._before_model: tuple[Part, ...] = (progress, _Adaptation(adapter), *parts)
        self._folder = RunFolder(spec, config, workers, progress, adapter, send, self._before_model)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that the run goes on from, in the order in which it is loaded; without a model before there is one."""
        return (*(() if self.trained is None else self.trained.parts), *self._before_model)

    @property
    def data(self) -> TrainingDataHistory:
        """What is known of the run's training sets."""
        return self._folder.data

    @property
    def prepared(self) -> TrainingState:
        """What training needs. Raises ``UserError`` before there is a model."""
        if self.trained is None:
            raise UserError("session.prepare must come before training", "no model yet", "call session.prepare first")
        return self.trained

    # -- as the group's owner ------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._transaction.completed_steps

    @property
    def unrepeatable(self) -> bool:
        return self._transaction.unrepeatable

    @property
    def reducing(self) -> bool:
        return self._transaction.reducing

    @property
    def round_steps(self) -> int:
        return self._transaction.round_steps

    @property
    def open_round(self) -> OpenRound:
        return self._transaction.open_round

    @property
    def snapshot_step(self) -> int:
        if self._snapshot is None:
            return -1
        return int(json.loads(self._snapshot[0])["step"])

    @property
    def layers(self) -> int:
        """Into how many stages a pipeline could be cut; 0: nobody knows."""
        replica = self._owned
        return 0 if replica is None else len(replica.split.costs)

    @property
    def _owned(self) -> OwnedReplica | None:
        """The replica, where its state lies in shards."""
        replica = None if self.trained is None else self.trained.replica
        return replica if isinstance(replica, OwnedReplica) else None

    def regroup(self, comms: Comms, over: Group | None) -> None:
        self._adapter.regrouped()
        if self.trained is None:
            return
        self._transaction.regrouped()
        self._adapter.routing.lay(comms)
        self.trained.sync.regroup(comms, over)
        self._tell_division()
        if self.collectives is not None:
            self.collectives.regroup(lost=self._transaction.is_lost)

    def climb(self, comms: Comms) -> None:
        if self.trained is not None:
            self.trained.sync.regroup(comms)

    def _tell_division(self) -> None:
        """How the model is divided, if it is, and was not so before."""
        found = () if self._owned is None else self._owned.division.told(self.workers.comms.mesh)
        for record in found if self.workers.rank == 0 else ():
            if record not in self._told:
                self._send(record)
        self._told = found

    def hand_over(self, group: Group, view: View) -> None:
        if self._owned is not None:
            hand_over(self._owned, group, view.grid, view.hosts)
        elif self.trained is not None:
            self.trained.sync.hand_over(group, len(view.members))

    def watch(self, replica: Replica) -> None:
        """Be told where a group breaks in what ``replica`` does by itself."""
        if isinstance(replica, OwnedReplica):
            replica.on_break, failure_hooks = self.mend, replica.division.failure_hooks
            failure_hooks.meet, failure_hooks.step_lost = self._lose, lambda: self._transaction.is_lost

    def _lose(self, error: GroupBroken) -> None:
        """The group broke in a forward pass: the open step is lost. What was evaluated is to be evaluated again."""
        if self._transaction.is_open:
            self._transaction.recover(error)
        else:
            self._transaction.unrepeatable = True
            self.workers.restart(error)

    def mend(self, error: GroupBroken | Unrecoverable) -> None:
        """After a step was applied here a group broke, or state was found to be lost."""
        if isinstance(error, Unrecoverable):
            self.workers.lose(error)
        self.workers.recover(error)

    def tell_lost(self, error: Unrecoverable) -> None:
        if self.workers.rank == 0:
            names = sorted({piece.name for piece in error.pieces})
            self._send(StateLost(self.step, names[:MOST_NAMED]))

    def last_result(self) -> list[torch.Tensor]:
        assert self.trained is not None
        return self.trained.active_sync.serving(self.step).last_result()

    def result_room(self) -> list[torch.Tensor]:
        assert self.trained is not None
        return self.trained.sync.result_room()

    def adopt_result(self, result: list[torch.Tensor]) -> None:
        self._transaction.adopt_result(result)

    def pack(self) -> Packed:
        tensors: Tensors = {}
        trees = to_trees(states_of(self.parts), tensors)
        header = {"step": self._progress.position.step, "parts": trees, "names": list(tensors)}
        return json.dumps(header).encode(), [t.detach() for t in tensors.values()]

    def unpack(self, packed: Packed) -> None:
        """Of another worker; the tensors are this one's from now on. What lies in shards comes with ``regroup``."""
        if self._owned is not None:
            self._owned.stranger = True
        self._load_packed(packed, "the state of another worker")
        self._transaction.unrepeatable = False  # what it has evaluated so far, it has evaluated alone

    def rewind(self, packed: Packed) -> None:
        """Be where a snapshot of this worker was taken, as far as there are parts yet; it may be needed again."""
        self._load_packed((packed[0], [t.clone() for t in packed[1]]), "a snapshot")
        self._snapshot = packed
        if self._owned is not None:
            own = self._kept().copied()
            restore(self._owned, self.workers.comms, PlacedState(own.version, list(own.shards), own.facts))

    def _load_packed(self, packed: Packed, source: str) -> None:
        header = json.loads(packed[0])
        named = dict(zip(header["names"], packed[1], strict=False))  # shards, if any, come behind
        load_states(self.parts, from_trees(header["parts"], named), source)

    def _kept(self) -> Kept:
        """Of the snapshot: what lies in shards."""
        assert self._snapshot is not None
        header = json.loads(self._snapshot[0])
        return unpacked_shards(header["shards"], self._snapshot[1][len(header["names"]) :])

    def place_snapshot(self, comms: Comms) -> None:
        if self._snapshot is None or "shards" not in json.loads(self._snapshot[0]):
            return
        kept, mesh = self._kept(), comms.mesh
        found = kept.brought(comms.everyone, mesh, comms.hosts, torch.device("cpu"))
        meet(comms.everyone, kept.split, found, exact=self._spec.execution.mode == "exact")
        there = [shard for shard in kept.shards if VALUES in shard.tensors]
        values = [Shard(shard.segment, {VALUES: shard.tensors[VALUES]}, held=False) for shard in there]
        self._keep(self._snapshot, replace(kept, shards=(*found.shards, *values), facts=found.facts))

    def _keep(self, packed: Packed, kept: Kept) -> None:
        """Hold this snapshot, with these shards."""
        header = json.loads(packed[0])
        told, tensors = packed_shards(kept)
        text = json.dumps({**header, "shards": told}).encode()
        self._snapshot = text, [*packed[1][: len(header["names"])], *tensors]

    def snapshot(self) -> Packed:
        assert self._snapshot is not None
        return self._snapshot

    def keep_snapshot(self, packed: Packed) -> None:
        self._snapshot = packed

    # -- in memory ----------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> Packed | None:
        """The snapshot, if there is one."""
        return self._snapshot

    def remember(self) -> None:
        """Take a snapshot, if there is anybody whose loss could send this worker back to it."""
        if self.trained is None or self.trained.replica.gathers:
            return
        if self.workers.elastic and self._spec.most_workers > 1:
            self._snapshot, (header, tensors) = None, self.pack()  # never two in memory
            self._snapshot = header, [t.to("cpu", copy=True) for t in tensors]
            if self._owned is not None:
                self._keep(self._snapshot, kept(self._owned).copied())

    # -- on disk ------------------------------------------------------------------------------------------------------

    def average_buffers(self) -> None:
        """Make buffers that workers move each by itself equal everywhere: floats become means, others rank 0's."""
        if self.trained is None or not self.trained.sync.drifts or self.workers.size == 1:
            return
        buffers = list(self.trained.replica.module.buffers())
        if not buffers:
            return
        unflatten(average(buffers, self.workers.gather_tensors(flatten(buffers), "the mean of buffers")), buffers)

    def evaluate(self) -> None:
        """An evaluation begins: the model is the same everywhere, and each worker can use it by itself."""
        self._evaluations += 1
        self.average_buffers()
        if self.trained is not None:
            self.trained.replica.gather()

    def save(self) -> None:
        """Write a checkpoint. Every member must call this, between steps."""
        if self.trained is not None and self.workers.synchronised:
            self.average_buffers()
            self._folder.save(self.trained)

    def reduced(self, sync: Sync) -> None:
        """The workers' sums of a step are here."""
        if self._progress.memory.due:
            self._progress.memory.reduced(sync.replica.memory())
        if self.scale is not None and sync.wants_statistics:
            sync.statistics = unscaled(sync.statistics, self.scale())
        if sync.wants_statistics:
            self._progress.loss = sync.statistics.parts["loss"]
        self.seed_between("step")

    def seed_between(self, what: str) -> None:
        """From here to the next pass of a slot the program draws from streams that are alike on all workers.

        They follow from the place in training: a worker that resumes, or begins again there, draws the same. ``what``
        is over: a step, a training pass, an evaluation (of which several may follow each other).
        """
        if what != "evaluation":
            self._evaluations = 0
        self._seed(f"after {what}", self._evaluations)

    def seed_epoch(self) -> None:
        """As ``seed_between``, where an epoch begins: whoever comes to it later draws what was drawn then."""
        self._evaluations = 0
        seed_everything(derive(self._spec.seed, "epoch", self._progress.position.epoch))

    def seed_batch(self, first: int) -> None:
        """The program gets a batch to evaluate, whose first sample is ``first``: it draws alike whoever has it."""
        self._seed("evaluation", self._evaluations - 1, first)

    def _seed(self, *what: str | int) -> None:
        at = self._progress.position
        seed_everything(derive(self._spec.seed, *what, self.step, at.epoch, at.turn))

    def keep_best(self, metric: str) -> bool:
        """Keep the checkpoint that was just saved as the best by ``metric``; False where there was no room for it."""
        return self._folder.keep_best(metric)

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Rank 0's initial state of ``model`` to all members, which are to have prepared the same."""
        self.workers.gather([], f"session.prepare({described(model, optimizer)})")
        if not self.workers.synchronised:
            return
        try:
            for tensor in (*model.parameters(), *model.buffers()):
                self.workers.group.broadcast(tensor.data)
                let_go(tensor)
        except GroupBroken as error:
            self.workers.restart(error)

    def begin(self) -> bool:
        """Go on from the newest checkpoint; without one from the parent's, or from the start. True for the first."""
        assert self.trained is not None
        self.workers.layers_found(self.layers)
        self._tell_division()
        goes_on = self._spec.resume or self.workers.restart_from_checkpoint
        found = self._folder.load_newest(self.trained) if goes_on else ""
        inherits = not found and self._folder.inherit(self.trained)
        self._adapter.routing.reload(self.trained)
        if self._owned is not None:
            self._owned.version = 1 + self._progress.position.step
        if inherits:
            self.save()  # whatever becomes of the folder that it came from, this run can begin again
        elif found:  # nobody takes a step while another can still be lost with nothing loaded
            self.workers.gather([], f"what is in {found}")
        if self.workers.restart_from_checkpoint and self.workers.rank == 0:
            self._send(Restarted(self._progress.position.step))
        return bool(found)


@dataclass(frozen=True)
class _Adaptation:
    """Monitors, policies and what they have under way."""

    adapter: Adapter
    name: str = "adaptation"

    def state_dict(self) -> dict[str, Any]:
        return {**self.adapter.to_json(), "remembered": self.adapter.remembered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.adapter.remembered = state["remembered"]
        self.adapter.load({name: value for name, value in state.items() if name != "remembered"})


def average(buffers: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """What workers' flat ``rows`` of ``buffers`` become: means of floats, and rank 0's of anything else.

    A mean of equal numbers is that number, though their sum may have been rounded.
    """
    table = torch.stack(list(rows))
    whole = torch.cat([torch.full((b.numel(),), not b.is_floating_point()) for b in buffers])
    return torch.where(whole | (table == table[0]).all(0), table[0], table.mean(0))
