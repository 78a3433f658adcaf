"""The checkpoints in a run's folder: workers write them together, begin from them, and do without where no room is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.core.run import Config, RunSpec
from elastune.core.training_length import changed_settings
from elastune.elastic.worker.group import WorkerGroup
from elastune.journal.records import ChangesAccepted, Checkpointed, CheckpointFailed, Record
from elastune.train.adapt.adapter import Adapter
from elastune.train.checkpoints import checkpoint as checkpoints
from elastune.train.checkpoints.best import keep_best
from elastune.train.checkpoints.files import NoRoom
from elastune.train.checkpoints.home import OutFolder
from elastune.train.checkpoints.inherit import inherit, take_over
from elastune.train.checkpoints.parts import Part, load_states, states_of
from elastune.train.checkpoints.place import place_of
from elastune.train.data.seen import SeenData
from elastune.train.progress import Progress
from elastune.train.training_state import TrainingState


class RunFolder:
    """The folder of the run that ``spec`` describes, as one of its ``workers`` uses it.

    ``parts``: what is saved beside the trained model, equal on all workers; ``send`` takes records for the journal.
    """

    def __init__(
        self,
        spec: RunSpec,
        config: Config,
        workers: WorkerGroup,
        progress: Progress,
        adapter: Adapter,
        send: Callable[[Record], None],
        parts: Sequence[Part],
    ) -> None:
        self._spec = spec
        self._config = config
        self._workers = workers
        self._progress = progress
        self._adapter = adapter
        self._send = send
        self._parts = parts
        self.data = SeenData(spec.data_seen, accepts=spec.accept_changes, tell=self._tell_change)
        self._place = place_of(spec)
        self._home = OutFolder.found(spec.out)
        self._nth = (-1, 0)  # the view in which checkpoints were written last, and how many before the last one

    # -- writing ------------------------------------------------------------------------------------------------------

    def save(self, trained: TrainingState) -> None:
        """Write a checkpoint, whoever is lost meanwhile; where the disk is full, tell so and leave the older ones.

        Every member must call this, between steps.
        """
        settled = False
        while True:
            at = self._place.draft(self._next_name())
            try:
                shares = self._contribute(trained, at)
                if shares is None:
                    continue
                if self._workers.rank == 0 and not settled:
                    path = self._place.publish(at, self._progress.position, self._kept(), shares)
                    if path is not None:
                        self._send(Checkpointed(self._progress.position.step, str(path)))
            except NoRoom as full:
                checkpoints.give_up(at)
                if self._workers.rank == 0:
                    self._send(CheckpointFailed(self._progress.position.step, str(full.value)))
            except UserError:
                self._place.check()  # one that is gone takes no files: that is what to tell then
                raise
            settled = self._workers.rank == 0
            if not self._workers.elastic or self._workers.size == 1:
                return
            if any(told for (told,) in self._workers.gather([float(settled)], "a checkpoint")):
                return

    def keep_best(self, metric: str) -> bool:
        """Keep the checkpoint of this step as the best by ``metric``, whoever is lost meanwhile.

        False where it was not written, for want of room. Every member must call this, behind ``save``.
        """
        step, kept = self._progress.position.step, -1
        while True:
            if self._workers.rank == 0 and kept < 0:
                kept = int(keep_best(self._spec.out, metric, step, self._home.make))
            if self._workers.size == 1:
                return bool(kept)
            told = [int(own) for (own,) in self._workers.gather([float(kept)], f"the best by {metric}")]
            if max(told) >= 0:
                return bool(max(told))

    def _next_name(self) -> str:
        """Of a draft: equal on all workers of this view, who save together, and of no other one."""
        view, nth = self._workers.view, self._nth[1] + 1 if self._nth[0] == self._workers.view else 0
        self._nth = view, nth
        return f"{self._progress.position.step}-{view}-{nth}"

    def _contribute(self, trained: TrainingState, at: Path) -> list[checkpoints.Contribution] | None:
        """Write this worker's part of a checkpoint: what all have written there.

        None, on every worker, where one was lost meanwhile: others have to write its part. Raises ``NoRoom`` on every
        writer where one of them had none.
        """
        workers = self._workers
        rank, size = (workers.rank, workers.size) if trained.in_shares else (0, 1)
        view, nth = self._nth
        if workers.rank != rank:  # another one writes all of it
            if trained.replica.gathers:
                trained.written(0)  # which all tell together
            return []
        states = trained.written(rank) | (states_of(self._parts) if rank == 0 else {})
        if size == 1:
            self._place.make_room(at, leads=True)
            alone = self._place.contribute(at, states)
            self._place.written(at, alone.file)
            return [alone]
        own: dict[str, Any] = {}
        full = ""
        try:
            self._place.make_room(at, leads=rank == 0)
            share = self._place.contribute(at, states, rank, size)
            own = share.tree
        except NoRoom as error:
            full = str(error.value)
        # What was gathered decides, and nothing else: it is equal everywhere, whoever is lost right now.
        mine = json.dumps([view, nth, size, own, full]).encode()
        told = [json.loads(row) for row in workers.gather_bytes(mine, "a checkpoint")]
        if {(view, nth, size) for view, nth, size, *_ in told} != {(*told[0][:2], len(told))}:
            # Some began before a loss, others behind it: from here on all count from the same number.
            self._nth = workers.view, max(nth for _, nth, *_ in told)
            return None
        if full := next((why for *_, why in told if why), ""):
            raise NoRoom(checkpoints.UNWRITABLE, full, "free space there")
        self._place.written(at, share.file)
        return [checkpoints.Contribution.of(tree) for _, _, _, tree, _ in told]

    # -- beginning ----------------------------------------------------------------------------------------------------

    def load_newest(self, trained: TrainingState) -> str:
        """Go on from the newest checkpoint: its name; "" where there is none."""
        found = self._place.load_newest(self._faults, lambda step: self._agreed(step, "the newest checkpoint"))
        if found is None:
            return ""
        self._load(trained, *found)
        return found[0].name

    def inherit(self, trained: TrainingState) -> bool:
        """Begin with what another run, or torch.distributed.checkpoint, has written; False where none was asked for."""
        spec = self._spec
        if spec.parent is not None:
            self._inherit(spec.parent, trained)
        elif spec.from_dcp is not None:
            from elastune.train.checkpoints.dcp import read_dcp, states_of_dcp  # torch's takes long to import

            take_over(trained, states_of_dcp(read_dcp(spec.from_dcp)), str(spec.from_dcp))
        return spec.parent is not None or spec.from_dcp is not None

    def _faults(self, path: Path, files: Mapping[str, str]) -> str:
        """As ``checkpoints.faults``; of several files each worker reads some."""
        workers = self._workers
        if len(files) == 1 or workers.size == 1:
            return checkpoints.faults(path, files)
        try:
            found = checkpoints.faults(path, files, slice(workers.rank, None, workers.size))
        except (OSError, ValueError) as error:  # to be told to all: they wait in the gather
            found = f"{type(error).__name__}: {error}"
        told = workers.gather_bytes(found.encode(), f"the files of {path.name}")
        return next((row.decode() for row in told if row), "")

    def _load(self, trained: TrainingState, path: Path, kept: checkpoints.Checkpoint) -> None:
        accepted = ("config",) if self._spec.accept_changes else ()
        self._check_meaning(kept, "a run resumes with the {} it was begun with", own=accepted)
        self.data.load(kept.meaning.get("data"))
        load_states((*trained.saved_parts, *self._parts), kept.states, str(path))
        self._adapter.load(self._adapter.to_json(), resumed=True)

    def _agreed(self, step: int, what: str) -> int:
        """The ``step`` that the first worker names."""
        return int(self._workers.gather([float(step)], what)[0][0])

    def _inherit(self, parent: Path, trained: TrainingState) -> None:
        """Begin with the newest checkpoint of the run in ``parent``; what its policies changed is left out."""
        # The parent may go on meanwhile: all take the same.
        newest = self._place.newest_of_parent(parent) if self._workers.rank == 0 else -1
        step = self._agreed(newest, "the parent's checkpoint")
        folder = self._place.of_parent(parent, step)
        if step < 0:
            rule = "a child begins with its parent's newest checkpoint"
            raise UserError(rule, f"none in {folder}", "let the parent write one first")
        path = checkpoints.of_step(folder, step)
        fix = "keep a parent's folder as it is until its child has begun"
        kept = checkpoints.load(path, fix, self._faults, whole_parts=False)
        self._check_meaning(kept, "a child runs with the {} of its parent", own=("config",))
        inherit(trained, kept.states, str(path))
        began = self._progress.state_dict()["begun"]
        own = {"batch_size": None, "micro_batch": None, "reports": 0, "begun": began}
        load_states([self._progress], {Progress.name: {**kept.states[Progress.name], **own}}, str(path))

    def _check_meaning(self, kept: checkpoints.Checkpoint, rule: str, own: tuple[str, ...] = ()) -> None:
        """Refuse a checkpoint of a run that was about something else, but for what is this run's ``own``."""
        wanted = self._meaning()
        other = [name for name in wanted if not _goes_on(name, kept.meaning.get(name), wanted[name])]
        other = [name for name in other if name not in own]
        if other:
            found = [kept.meaning.get(name) for name in other]
            raise UserError(rule.format(", ".join(other)), [wanted[name] for name in other], f"use {found}")

    def _kept(self) -> dict[str, Any]:
        """What a checkpoint tells of its run."""
        return {**self._meaning(), "data": self.data.kept(self._progress.position.epoch)}

    def _tell_change(self, what: str) -> None:
        """Of several equal records one is kept."""
        if self._workers.rank == 0:
            at = self._progress.position
            self._send(ChangesAccepted([what], at.step, at.epoch))

    def _meaning(self) -> dict[str, Any]:
        spec, means = self._spec, self._spec.means
        slots = {"num_slots": means.num_slots} if means.mode == "exact" else {}
        own = {
            "seed": spec.seed,
            "config": self._config,
            "sync": str(spec.sync),
            "sync_schedule": str(spec.sync_schedule),
        }
        return {**own, "mode": means.mode, "precision": means.precision, "compress": means.compress, **slots}


def _goes_on(name: str, then: Any, now: Any) -> bool:
    """Whether a run that was begun with ``then`` goes on with ``now``: with the same, or for longer."""
    return then == now or (name == "config" and isinstance(then, dict) and not changed_settings(then, now))
