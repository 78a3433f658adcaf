"""Everything that a run's state goes through: checkpoints, snapshots in memory, the hand-over to another worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from elastune.comm.group import Group
from elastune.core.errors import UserError
from elastune.core.run import Config, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.elastic.worker.state_owner import Packed
from elastune.journal.records import Checkpointed, Record, Restarted
from elastune.mechanisms.base import flatten, unflatten
from elastune.train.adapt.adapter import Adapter
from elastune.train.checkpoints import checkpoint as checkpoints
from elastune.train.checkpoints.inherit import inherit
from elastune.train.checkpoints.tree import Tensors, from_tree, to_tree
from elastune.train.progress import Progress
from elastune.train.training_state import TrainingState
from elastune.train.transaction import Phase, StepTransaction


class RunState:
    """One worker's state, for its group (``elastic.worker.state_owner.StateOwner``) and for its run's folder."""

    def __init__(
        self,
        spec: RunSpec,
        config: Config,
        workers: WorkerGroup,
        progress: Progress,
        transaction: StepTransaction,
        adapter: Adapter,
        send: Callable[[Record], None],
    ) -> None:
        self._spec = spec
        self._config = config
        self.workers = workers
        self._progress = progress
        self._transaction = transaction
        self._adapter = adapter
        self._send = send
        self._snapshot: Packed | None = None
        self.trained: TrainingState | None = None

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
        return int(json.loads(self._snapshot[0])["progress"]["position"]["step"])

    def regroup(self, group: Group) -> None:
        self._adapter.regrouped()
        if self.trained is None:
            return
        if self._transaction.phase is Phase.OPEN:
            self._transaction.abandon()
        self.trained.replica.regroup(group)

    def last_result(self) -> list[torch.Tensor]:
        assert self.trained is not None
        return self.trained.replica.held()

    def result_room(self) -> list[torch.Tensor]:
        assert self.trained is not None
        return self.trained.replica.held_like()

    def adopt_result(self, result: list[torch.Tensor]) -> None:
        self._transaction.adopt_result(result)

    def pack(self) -> Packed:
        assert self.trained is not None
        tensors: Tensors = {}
        tree = to_tree(self._state(self.trained), tensors)
        header = {"state": tree, "names": list(tensors), "progress": self._progress.to_json()}
        header["adapt"] = self._adapter.to_json()
        return json.dumps(header).encode(), [t.detach() for t in tensors.values()]

    def unpack(self, packed: Packed) -> None:
        """Of another worker; the tensors are this one's from now on."""
        self._take(packed[0], packed[1])
        self._transaction.unrepeatable = False  # what it has evaluated so far, it has evaluated alone

    def stand_at(self, packed: Packed) -> None:
        """This worker was rewound to ``packed``, though its model is still to be built."""
        self._snapshot = packed
        told = json.loads(packed[0])
        self._progress.take(told["progress"])
        self._adapter.load(told["adapt"])

    def rewind(self, packed: Packed) -> None:
        """Be where a snapshot of this worker was taken; it may be needed again."""
        self._take(packed[0], [t.clone() for t in packed[1]])
        self._snapshot = packed

    def _take(self, header: bytes, tensors: list[torch.Tensor]) -> None:
        assert self.trained is not None
        told = json.loads(header)
        named = dict(zip(told["names"], tensors, strict=True))
        self._load_state(self.trained, from_tree(told["state"], named), "the state of another worker")
        self._progress.take(told["progress"])
        self._adapter.load(told["adapt"])

    def _state(self, trained: TrainingState) -> dict[str, Any]:
        return {**trained.state(), "remembered": self._adapter.remembered}

    def _load_state(self, trained: TrainingState, state: dict[str, Any], source: str) -> None:
        trained.load(state, source)
        self._adapter.remembered = state.get("remembered")

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
        if self.workers.elastic and self._spec.most_workers > 1 and self.trained is not None:
            header, tensors = self.pack()
            self._snapshot = header, [t.to("cpu", copy=True) for t in tensors]

    # -- on disk ------------------------------------------------------------------------------------------------------

    def average_buffers(self) -> None:
        """Make buffers that workers move each by itself equal everywhere: floats become means, others rank 0's."""
        if self.trained is None or not self.trained.replica.drifts or self.workers.size == 1:
            return
        buffers = list(self.trained.replica.module.buffers())
        if not buffers:
            return
        unflatten(average(buffers, self.workers.gather_tensors(flatten(buffers))), buffers)

    def save(self) -> None:
        """Write a checkpoint, whoever is lost meanwhile. Every member must call this, between steps."""
        if self.trained is None or not self.workers.synchronised:
            return
        self.average_buffers()
        written = False
        while True:
            if self.workers.rank == 0 and not written:
                self._write(self.trained)
                written = True
            if not self.workers.elastic or self.workers.size == 1:
                return
            if any(told for (told,) in self.workers.gather([float(written)])):
                return

    def _write(self, trained: TrainingState) -> None:
        progress = self._progress
        kept = checkpoints.Checkpoint(
            progress.position,
            self._meaning(),
            self._state(trained),
            progress.times.seconds,
            progress.metrics,
            progress.batch_size,
            progress.micro_batch,
            progress.spans,
            self._adapter.to_json(),
        )
        path = checkpoints.save(self._spec.out / "checkpoints", kept)
        self._send(Checkpointed(progress.position.step, str(path)))

    def begin(self) -> None:
        """Go on from the newest checkpoint; without one from the parent's, or from the start."""
        assert self.trained is not None
        goes_on = self._spec.resume or self.workers.restart_from_checkpoint
        found = checkpoints.complete(self._spec.out / "checkpoints") if goes_on else []
        if found:
            self._load(found[-1], self.trained)
        elif self._spec.parent is not None:
            self._inherit(self._spec.parent / "checkpoints", self.trained)
        if self.workers.restart_from_checkpoint and self.workers.rank == 0:
            self._send(Restarted(self._progress.position.step))

    def _load(self, path: Path, trained: TrainingState) -> None:
        kept = checkpoints.load(path)
        self._check_meaning(kept, "a run resumes with the {} it was begun with")
        self._load_state(trained, kept.state, str(path))
        self._stand_where(kept)
        self._progress.batch_size, self._progress.micro_batch = kept.batch_size, kept.micro_batch
        if kept.adapt:
            self._adapter.load(kept.adapt, resumed=True)

    def _inherit(self, folder: Path, trained: TrainingState) -> None:
        """Begin with the newest checkpoint in ``folder``, another run's. What its policies changed is not taken over.

        It is written down as this run's first at once: whatever becomes of the parent, this run can begin again.
        """
        seen = checkpoints.complete(folder)
        newest = float(checkpoints.step_of(seen[-1])) if seen else -1.0
        step = int(self.workers.gather([newest])[0][0])  # the parent may go on meanwhile: all take the same
        if step < 0:
            rule = "a child begins with its parent's newest checkpoint"
            raise UserError(rule, f"none in {folder}", "let the parent write one first")
        path = checkpoints.of_step(folder, step)
        kept = checkpoints.load(path, fix="keep a parent's folder as it is until its child has begun")
        self._check_meaning(kept, "a child runs with the {} of its parent", own=("config",))
        inherit(trained, kept.state, str(path))
        self._stand_where(kept)
        self.save()

    def _stand_where(self, kept: checkpoints.Checkpoint) -> None:
        self._progress.position, self._progress.metrics = kept.position, dict(kept.metrics)
        self._progress.times.seconds_before = kept.seconds
        self._progress.spans = kept.trail

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


def average(buffers: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """What workers' flat ``rows`` of ``buffers`` become: means of floats, and rank 0's of anything else.

    A mean of equal numbers is that number, though their sum may have been rounded.
    """
    table = torch.stack(list(rows))
    whole = torch.cat([torch.full((b.numel(),), not b.is_floating_point()) for b in buffers])
    return torch.where(whole | (table == table[0]).all(0), table[0], table.mean(0))
