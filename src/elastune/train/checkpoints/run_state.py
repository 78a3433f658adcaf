"""All that becomes of a run's state: checkpoints, snapshots in memory, the transfer to another worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.comm.comms import Comms
from elastune.comm.group import Group, GroupBroken
from elastune.core.errors import UserError
from elastune.core.layout import Unrecoverable
from elastune.core.run import Config, RunSpec
from elastune.elastic.protocol.view import View
from elastune.elastic.worker.group import WorkerGroup
from elastune.elastic.worker.state_owner import Packed
from elastune.journal.records import Checkpointed, Record, Restarted, StateLost
from elastune.mechanisms.base import Replica
from elastune.mechanisms.buffers import flatten, unflatten
from elastune.mechanisms.owned.moving import Kept, hand_over, kept, restore
from elastune.mechanisms.owned.placement import VALUES, Placed, Shard, meet
from elastune.mechanisms.owned.replica import OwnedReplica
from elastune.mechanisms.parked import let_go
from elastune.train.adapt.adapter import Adapter
from elastune.train.checkpoints import checkpoint as checkpoints
from elastune.train.checkpoints.files import identity
from elastune.train.checkpoints.inherit import inherit, take_over
from elastune.train.checkpoints.parts import Part, from_trees, load_states, states_of, to_trees
from elastune.train.checkpoints.snapshots import packed_shards, unpacked_shards
from elastune.train.checkpoints.tree import Tensors
from elastune.train.progress import Progress
from elastune.train.training_state import TrainingState, described
from elastune.train.transaction import Phase, StepTransaction

MOST_NAMED = 8  # tensors of which pieces were lost


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
        transaction: StepTransaction,
        adapter: Adapter,
        send: Callable[[Record], None],
        parts: Sequence[Part] = (),
    ) -> None:
        self._spec = spec
        self._config = config
        self.workers = workers
        self._progress = progress
        self._transaction = transaction
        self._adapter = adapter
        self._send = send
        self._snapshot: Packed | None = None
        self._folder = identity(spec.out)
        self.trained: TrainingState | None = None
        self._before_model: tuple[Part, ...] = (progress, _Adaptation(adapter), *parts)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All that the run goes on from, in the order in which it is loaded; without a model before there is one."""
        return (*(() if self.trained is None else self.trained.parts), *self._before_model)

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
    def snapshot_step(self) -> int:
        if self._snapshot is None:
            return -1
        return int(json.loads(self._snapshot[0])["step"])

    @property
    def layers(self) -> int:
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
        if self._transaction.phase is Phase.OPEN:
            self._transaction.abandon()
        self.trained.sync.regroup(comms, over)

    def hand_over(self, group: Group, view: View) -> None:
        if self._owned is not None:
            hand_over(self._owned, group, view.grid, view.hosts)

    def watch(self, replica: Replica) -> None:
        """Be told where a group breaks in what ``replica`` does by itself."""
        if isinstance(replica, OwnedReplica):
            replica.on_break, rescue = self.mend, replica.division.rescue
            rescue.meet, rescue.step_lost = self._lose, lambda: self._transaction.phase is Phase.LOST

    def _lose(self, error: GroupBroken) -> None:
        """The group broke in a forward pass: the open step is lost. What was evaluated is to be evaluated again."""
        if self._transaction.phase is Phase.OPEN:
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
        return self.trained.sync.last_result()

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
            restore(self._owned, self.workers.comms, Placed(own.version, list(own.shards), own.facts))

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
        meet(comms.everyone, kept.split, found, exact=self._spec.means.mode == "exact")
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
        self.average_buffers()
        if self.trained is not None:
            self.trained.replica.gather()

    def save(self) -> None:
        """Write a checkpoint, whoever is lost meanwhile. Every member must call this, between steps."""
        if self.trained is None or not self.workers.synchronised:
            return
        self.average_buffers()
        written = False
        while True:
            found = self._contribute(self.trained)
            if found is None:
                continue
            if self.workers.rank == 0 and not written:
                path = checkpoints.publish(found[0], self._progress.position, self._meaning(), found[1])
                self._send(Checkpointed(self._progress.position.step, str(path)))
                written = True
            if not self.workers.elastic or self.workers.size == 1:
                return
            if any(told for (told,) in self.workers.gather([float(written)], "a checkpoint")):
                return

    def _contribute(self, trained: TrainingState) -> tuple[Path, list[checkpoints.Contribution]] | None:
        """Write this worker's part of a checkpoint: where, and what all have written there.

        None, on every worker, where one was lost meanwhile: others have to write its part.
        """
        out, workers = self._spec.out, self.workers
        if self._folder is not None and identity(out) != self._folder:
            rule = "an output folder must stay where it is while something runs"
            raise UserError(rule, f"{out} was removed or replaced", "begin again in a folder that stays")
        rank, size = (workers.rank, workers.size) if trained.in_shares else (0, 1)
        view = workers.view
        at = checkpoints.draft(out / "checkpoints", f"{self._progress.position.step}-{view}")
        if workers.rank != rank:  # another one writes all of it
            if trained.replica.gathers:
                trained.written(0)  # which all tell together
            return at, []
        states = trained.written(rank) | (states_of(self._before_model) if rank == 0 else {})
        own = checkpoints.contribute(at, states, rank, size)
        if size == 1:
            return at, [own]
        # What was gathered decides, and nothing else: it is equal everywhere, whoever is lost right now.
        told = [
            json.loads(row) for row in workers.gather_bytes(json.dumps([view, size, own.tree]).encode(), "a checkpoint")
        ]
        if {(view, size) for view, size, _ in told} != {(told[0][0], len(told))}:
            return None
        return at, [checkpoints.Contribution.of(tree) for _, _, tree in told]

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

    def begin(self) -> None:
        """Go on from the newest checkpoint; without one from the parent's, or from the start."""
        assert self.trained is not None
        goes_on = self._spec.resume or self.workers.restart_from_checkpoint
        folder = self._spec.out / "checkpoints"
        found = checkpoints.load_newest(folder, self._faults, whole_parts=False) if goes_on else None
        if found is not None:
            self._load(*found)
        elif self._spec.parent is not None:
            self._inherit(self._spec.parent / "checkpoints", self.trained)
        elif self._spec.from_dcp is not None:
            from elastune.train.checkpoints.dcp import read_dcp, states_of_dcp  # torch's takes long to import

            take_over(self.trained, states_of_dcp(read_dcp(self._spec.from_dcp)), str(self._spec.from_dcp))
        if self._owned is not None:
            self._owned.version = 1 + self._progress.position.step
        if found is None and (self._spec.parent is not None or self._spec.from_dcp is not None):
            self.save()  # whatever becomes of the folder that it came from, this run can begin again
        elif found is not None:  # nobody takes a step while another can still be lost with nothing loaded
            self.workers.gather([], f"what is in {found[0].name}")
        if self.workers.restart_from_checkpoint and self.workers.rank == 0:
            self._send(Restarted(self._progress.position.step))

    def _faults(self, path: Path, files: Mapping[str, str]) -> str:
        """As ``checkpoints.faults``; of several files each worker reads some."""
        workers = self.workers
        if len(files) == 1 or workers.size == 1:
            return checkpoints.faults(path, files)
        try:
            found = checkpoints.faults(path, files, slice(workers.rank, None, workers.size))
        except (OSError, ValueError) as error:  # to be told to all: they wait in the gather
            found = f"{type(error).__name__}: {error}"
        told = workers.gather_bytes(found.encode(), f"the files of {path.name}")
        return next((row.decode() for row in told if row), "")

    def _load(self, path: Path, kept: checkpoints.Checkpoint) -> None:
        self._check_meaning(kept, "a run resumes with the {} it was begun with")
        assert self.trained is not None
        load_states((*self.trained.saved_parts, *self._before_model), kept.states, str(path))
        self._adapter.load(self._adapter.to_json(), resumed=True)

    def _inherit(self, folder: Path, trained: TrainingState) -> None:
        """Begin with the newest checkpoint in ``folder``, another run's; what its policies changed is left out."""
        seen = checkpoints.complete(folder)
        newest = float(checkpoints.step_of(seen[-1])) if seen else -1.0
        # The parent may go on meanwhile: all take the same.
        step = int(self.workers.gather([newest], "the parent's checkpoint")[0][0])
        if step < 0:
            rule = "a child begins with its parent's newest checkpoint"
            raise UserError(rule, f"none in {folder}", "let the parent write one first")
        path = checkpoints.of_step(folder, step)
        fix = "keep a parent's folder as it is until its child has begun"
        kept = checkpoints.load(path, fix, self._faults, whole_parts=False)
        self._check_meaning(kept, "a child runs with the {} of its parent", own=("config",))
        inherit(trained, kept.states, str(path))
        own = {"batch_size": None, "micro_batch": None, "reports": 0}
        load_states([self._progress], {Progress.name: {**kept.states[Progress.name], **own}}, str(path))

    def _check_meaning(self, kept: checkpoints.Checkpoint, rule: str, own: tuple[str, ...] = ()) -> None:
        """Refuse a checkpoint of a run that was about something else, but for what is this run's ``own``."""
        wanted = self._meaning()
        other = [name for name in wanted if kept.meaning.get(name) != wanted[name] and name not in own]
        if other:
            found = [kept.meaning.get(name) for name in other]
            raise UserError(rule.format(", ".join(other)), [wanted[name] for name in other], f"use {found}")

    def _meaning(self) -> dict[str, Any]:
        spec, means = self._spec, self._spec.means
        slots = {"num_slots": means.num_slots} if means.mode == "exact" else {}
        return {"seed": spec.seed, "config": self._config, "mode": means.mode, "precision": means.precision, **slots}


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
