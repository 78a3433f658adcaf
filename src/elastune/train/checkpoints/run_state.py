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
from elastune.elastic.worker.recovery import OpenRound, Packed
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
from elastune.train.proof.first_step import FirstStep
from elastune.train.proof.recorder import Recorder
from elastune.train.rng import seed_everything
from elastune.train.training_state import TrainingState, described

MOST_NAMED = 8  # lost tensors that a record names


class OpenStep(Protocol):
    """The current step, as a run's state uses it (``train.step.StepTransaction``)."""

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
    """All state of one worker's run: it is snapshotted, handed to other workers, saved, loaded and rewound here.

    It is the ``StateOwner`` of the worker's group. The state consists of ``parts`` and nothing else.

    Args:
        spec: The run.
        config: The settings of the program.
        workers: The group of this worker.
        progress: How far the run is.
        transaction: The current step.
        adapter: Monitors and policies.
        send: Takes records for the journal.
        parts: Further parts of the state.

    Attributes:
        recorder: Records the steps, for a check; None: they are not recorded.
        first_step: Proves the first step of a run; None: it is not asked for, or done.
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
        self._reported_division: tuple[LayersDivided | StagesDivided, ...] = ()
        self._evaluations = 0  # evaluations that began since the newest step; the program may leave one early
        self.recorder: Recorder | None = None
        self.first_step: FirstStep | None = None
        self.trained: TrainingState | None = None
        self.collectives: NamedCollectives | None = None
        self.scale: Callable[[], float] | None = None  # of the program's loss
        self.spoil: Callable[[list[torch.Tensor]], list[torch.Tensor]] = _intact  # what goes to another worker
        self._before_model: tuple[Part, ...] = (progress, _Adaptation(adapter), *parts)
        self._folder = RunFolder(spec, config, workers, progress, adapter, send, self._before_model)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts of the state, in the order in which they are loaded; without a model before there is one."""
        return (*(() if self.trained is None else self.trained.parts), *self._before_model)

    @property
    def data(self) -> TrainingDataHistory:
        """The history of the run's training sets."""
        return self._folder.data

    @property
    def prepared(self) -> TrainingState:
        """What the run trains. Raises ``UserError`` before there is a model."""
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
        """Into how many stages a pipeline could cut the model; 0: unknown."""
        replica = self._owned
        return 0 if replica is None else len(replica.split.costs)

    @property
    def _owned(self) -> OwnedReplica | None:
        """The replica, if its state is divided into shards."""
        replica = None if self.trained is None else self.trained.replica
        return replica if isinstance(replica, OwnedReplica) else None

    def regroup(self, comms: Comms, over: Group | None) -> None:
        self._adapter.regrouped()
        if self.trained is None:
            return
        self._transaction.regrouped()
        self._adapter.routing.lay(comms)
        self.trained.sync.regroup(comms, over)
        self._report_division()
        if self.collectives is not None:
            self.collectives.regroup(lost=self._transaction.is_lost)

    def climb(self, comms: Comms) -> None:
        if self.trained is not None:
            self.trained.sync.regroup(comms)

    def _report_division(self) -> None:
        """Record how the model is divided, if that is new."""
        division = () if self._owned is None else self._owned.division.division_records(self.workers.comms.mesh)
        for record in division if self.workers.rank == 0 else ():
            if record not in self._reported_division:
                self._send(record)
        self._reported_division = division

    def hand_over(self, group: Group, view: View) -> None:
        if self._owned is not None:
            hand_over(self._owned, group, view.grid, view.hosts)
        elif self.trained is not None:
            self.trained.sync.hand_over(group, len(view.members))

    def watch(self, replica: Replica) -> None:
        """Handle breaks of the group in operations that ``replica`` does by itself."""
        if isinstance(replica, OwnedReplica):
            replica.on_break, failure_hooks = self.mend, replica.division.failure_hooks
            failure_hooks.meet, failure_hooks.step_lost = self._lose, lambda: self._transaction.is_lost

    def _lose(self, error: GroupBroken) -> None:
        """Go on after the group broke in a forward pass: the open step is lost, or the evaluation is repeated."""
        if self._transaction.is_open:
            self._transaction.recover(error)
        else:
            self._transaction.unrepeatable = True
            self.workers.restart(error)

    def mend(self, error: GroupBroken | Unrecoverable) -> None:
        """Go on after a group broke, or state was found to be lost, when a step was applied here already."""
        if isinstance(error, Unrecoverable):
            self.workers.lose(error)
        self.workers.recover(error)

    def record_lost_state(self, error: Unrecoverable) -> None:
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
        header, tensors = self._packed()
        return header, self.spoil(tensors)

    def _packed(self) -> Packed:
        tensors: Tensors = {}
        trees = to_trees(states_of(self.parts), tensors)
        header = {"step": self._progress.position.step, "parts": trees, "names": list(tensors)}
        return json.dumps(header).encode(), [t.detach() for t in tensors.values()]

    def unpack(self, packed: Packed) -> None:
        """Take over the state of another worker, with its tensors. The shards come with ``regroup``."""
        if self._owned is not None:
            self._owned.stranger = True
        self._load_packed(packed, "the state of another worker")
        self._transaction.unrepeatable = False  # its evaluations so far were its own

    def rewind(self, packed: Packed) -> None:
        """Go back to a snapshot of this worker, for the parts that exist already. The snapshot stays."""
        self._load_packed((packed[0], [t.clone() for t in packed[1]]), "a snapshot")
        self._snapshot = packed
        if self._owned is not None:
            shards = self._kept().copied()
            restore(self._owned, self.workers.comms, PlacedState(shards.version, list(shards.shards), shards.facts))

    def _load_packed(self, packed: Packed, source: str) -> None:
        header = json.loads(packed[0])
        named = dict(zip(header["names"], packed[1], strict=False))  # shards, if any, follow them
        load_states(self.parts, from_trees(header["parts"], named), source)

    def _kept(self) -> Kept:
        """The shards in the snapshot."""
        assert self._snapshot is not None
        header = json.loads(self._snapshot[0])
        return unpacked_shards(header["shards"], self._snapshot[1][len(header["names"]) :])

    def place_snapshot(self, comms: Comms) -> None:
        if self._snapshot is None or "shards" not in json.loads(self._snapshot[0]):
            return
        kept, mesh = self._kept(), comms.mesh
        brought = kept.brought(comms.everyone, mesh, comms.hosts, torch.device("cpu"))
        meet(comms.everyone, kept.split, brought, exact=self._spec.execution.mode == "exact")
        with_values = [shard for shard in kept.shards if VALUES in shard.tensors]
        values = [Shard(shard.segment, {VALUES: shard.tensors[VALUES]}, held=False) for shard in with_values]
        self._keep(self._snapshot, replace(kept, shards=(*brought.shards, *values), facts=brought.facts))

    def _keep(self, packed: Packed, kept: Kept) -> None:
        """Hold this snapshot, with these shards."""
        header = json.loads(packed[0])
        shards, tensors = packed_shards(kept)
        text = json.dumps({**header, "shards": shards}).encode()
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
        """Take a snapshot, if the loss of another worker could send this worker back to it."""
        if self.trained is None or self.trained.replica.gathers:
            return
        if self.workers.elastic and self._spec.most_workers > 1:
            self._snapshot, (header, tensors) = None, self._packed()  # never two in memory
            self._snapshot = header, [t.to("cpu", copy=True) for t in tensors]
            if self._owned is not None:
                self._keep(self._snapshot, kept(self._owned).copied())

    # -- on disk ------------------------------------------------------------------------------------------------------

    def average_buffers(self) -> None:
        """Make buffers equal on all workers: floats become means, others get rank 0's values."""
        if self.trained is None or not self.trained.sync.drifts or self.workers.size == 1:
            return
        buffers = list(self.trained.replica.module.buffers())
        if not buffers:
            return
        unflatten(average(buffers, self.workers.gather_tensors(flatten(buffers), "the mean of buffers")), buffers)

    def evaluate(self) -> None:
        """Prepare an evaluation: the model becomes equal on all workers, and each can use it by itself."""
        self._evaluations += 1
        self.average_buffers()
        if self.trained is not None:
            self.trained.replica.gather()

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint; see ``RunFolder.save``. Every member must call this, between steps."""
        if self.trained is not None and self.workers.synchronised:
            self.average_buffers()
            self._folder.save(self.trained, wait=wait)

    def look(self) -> None:
        """Report a checkpoint that a thread has completed, or has failed to write; see ``RunFolder.look``."""
        self._folder.look()

    def settle(self) -> None:
        """Wait for the checkpoint that threads write. Every member must call this, between steps."""
        if self.trained is not None and self.workers.synchronised:
            self._folder.settle(self.trained)

    def abandon(self) -> None:
        """Let the thread that writes a checkpoint end: this worker leaves the run, or goes back."""
        self._folder.abandon()

    def distrust(self) -> None:
        """Let the thread end that writes a checkpoint, and drop the snapshot: a worker may have computed wrong.

        A worker that learns of it late must not bring the others back to a snapshot.
        """
        self.abandon()
        self._snapshot = None

    def forget(self, step: int) -> None:
        """Remove the checkpoints after ``step``: a worker that computes wrong had a part in them."""
        self._folder.forget(step)

    def spare(self, step: int) -> None:
        """Let the newest checkpoint up to ``step`` stay: every worker was verified up to there."""
        self._folder.spare(step)

    def reduced(self, sync: Sync) -> None:
        """Take in the workers' sums of a step."""
        if self._progress.memory.due:
            self._progress.memory.reduced(sync.replica.memory())
        if self.scale is not None and sync.wants_statistics:
            sync.statistics = sync.statistics.divided(self.scale())
        if sync.wants_statistics:
            self._progress.loss = sync.statistics.parts["loss"]
        self.seed_between("step")

    def seed_between(self, what: str) -> None:
        """Seed the streams that the program draws from until the next pass of a slot, alike on all workers.

        The seed follows from the place in training, so a worker that resumes there draws the same. ``what`` is over: a
        step, a training pass, an evaluation (several may follow each other).
        """
        if what != "evaluation":
            self._evaluations = 0
        self._seed(f"after {what}", self._evaluations)

    def seed_epoch(self) -> None:
        """As ``seed_between``, at the begin of an epoch: a worker that comes to it later draws the same."""
        self._evaluations = 0
        seed_everything(derive(self._spec.seed, "epoch", self._progress.position.epoch))

    def seed_batch(self, first: int) -> None:
        """Seed the streams for a batch to evaluate, whose first sample is ``first``, alike on whichever worker."""
        self._seed("evaluation", self._evaluations - 1, first)

    def _seed(self, *what: str | int) -> None:
        at = self._progress.position
        seed_everything(derive(self._spec.seed, *what, self.step, at.epoch, at.turn))

    def keep_best(self, metric: str) -> bool:
        """Keep the checkpoint that was just saved as the best by ``metric``. Returns False if the disk has no room."""
        return self._folder.keep_best(metric)

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Send rank 0's initial state of ``model`` to all members, which must have prepared the same model."""
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
        """Begin with the newest checkpoint, or with the parent's, or from the start.

        Returns whether it was a checkpoint.
        """
        assert self.trained is not None
        self.workers.layers_found(self.layers)
        self._report_division()
        goes_on = self._spec.resume or self.workers.restart_from_checkpoint
        if self.workers.restart_from_checkpoint:  # survivors may have been writing the newest one until now
            self.workers.gather([], "the checkpoints that are complete")
        name = self._folder.load_newest(self.trained) if goes_on else ""
        inherits = not name and self._folder.inherit(self.trained)
        self._adapter.routing.reload(self.trained)
        if self._owned is not None:
            self._owned.version = 1 + self._progress.position.step
        if inherits:
            self.save()  # so that this run can begin again even if the parent's folder is gone
        elif name:  # no worker takes a step before all have loaded the checkpoint
            self.workers.gather([], f"what is in {name}")
        if self.workers.restart_from_checkpoint and self.workers.rank == 0:
            self._send(Restarted(self._progress.position.step))
        return bool(name)


def _intact(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors


@dataclass(frozen=True)
class _Adaptation:
    """Monitors, policies and their open proposals, as a part of the state."""

    adapter: Adapter
    name: str = "adaptation"

    def state_dict(self) -> dict[str, Any]:
        return {**self.adapter.to_json(), "remembered": self.adapter.remembered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.adapter.remembered = state["remembered"]
        self.adapter.load({name: value for name, value in state.items() if name != "remembered"})


def packed_shards(kept: Kept) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """``kept`` as a JSON value, and its tensors in the order in which the value names them."""
    rows = [
        [shard.segment.param_block, shard.segment.start, shard.segment.stop, shard.held, list(shard.tensors)]
        for shard in kept.shards
    ]
    param_blocks = [asdict(param_block) for param_block in kept.split.param_blocks]
    header = {
        "leaves": param_blocks,
        "blocks": kept.split.blocks,
        "costs": list(kept.split.costs),
        "copies": kept.copies,
        "frees": kept.frees,
        "version": kept.version,
        "shards": rows,
        "facts": {str(param_block): facts for param_block, facts in kept.facts.items()},
    }
    return header, [tensor for shard in kept.shards for tensor in shard.tensors.values()]


def unpacked_shards(header: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Kept:
    """The reverse of ``packed_shards``."""
    remaining = iter(tensors)
    shards = [
        Shard(Segment(param_block, start, stop), {name: next(remaining) for name in names}, held)
        for param_block, start, stop, held, names in header["shards"]
    ]
    param_blocks = [
        ParamBlock(**{**param_block, "box": tuple((a, b) for a, b in param_block["box"])})
        for param_block in header["leaves"]
    ]
    split = Split(tuple(param_blocks), header["blocks"], tuple(header["costs"]))
    facts = {int(param_block): facts for param_block, facts in header["facts"].items()}
    return Kept(split, header["copies"], header["frees"], header["version"], tuple(shards), facts)


def average(buffers: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of ``buffers`` from the workers' flat ``rows``: means of floats, rank 0's values of anything else.

    A mean of equal numbers is that number, even if their sum was rounded.
    """
    table = torch.stack(list(rows))
    whole = torch.cat([torch.full((b.numel(),), not b.is_floating_point()) for b in buffers])
    return torch.where(whole | (table == table[0]).all(0), table[0], table.mean(0))
