"""The checkpoints of a run's folder: written together, loaded at the start, inherited from a parent.

A run may begin from another run's weights and optimizer state, under its own settings, as population-based training
needs (Jaderberg et al. 2017). Where the disk has no room, training goes on without a new checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from elastune.core.errors import UserError
from elastune.core.journal.records import ChangesAccepted, Checkpointed, CheckpointFailed, Record
from elastune.core.run import Config, RunSpec, changed_settings
from elastune.elastic.worker.group import WorkerGroup
from elastune.train.adaptation.adapter import Adapter
from elastune.train.checkpoints import checkpoint as checkpoints
from elastune.train.checkpoints.background import PendingCheckpoint, Published
from elastune.train.checkpoints.checkpoint import NoRoom
from elastune.train.checkpoints.checkpoint_part import CheckpointPart, HostBuffers
from elastune.train.checkpoints.out_folder import OutFolder
from elastune.train.checkpoints.place import storage_of
from elastune.train.checkpoints.tree import Part, load_states, states_of
from elastune.train.data.fingerprint import TrainingDataHistory
from elastune.train.progress import Progress
from elastune.train.schedules import learning_rates
from elastune.train.training_state import TrainingState, shapes_of

_BUFFERS = {"momentum": "momentum_buffer", "amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
"""Options of torch's optimizers, and the entry in a parameter's state that each of them causes."""
LOST = "a worker was lost while it was written"
PARTS_LIMIT_S = 10.0  # for other workers' parts of a checkpoint, as this worker leaves the run or goes back
_WAITING = ("best", "num_bad_epochs", "cooldown_counter")  # the state of ReduceLROnPlateau between reductions


class RunFolder:
    """The checkpoints of the run that ``spec`` describes, as one of its ``workers`` writes and loads them.

    Args:
        spec: The run.
        config: The settings of the program.
        workers: The group of this worker.
        progress: How far the run is.
        adapter: Monitors and policies.
        send: Takes records for the journal.
        parts: The parts to save beside the trained model, equal on all workers.
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
        self.data = TrainingDataHistory(spec.data_seen, accepts=spec.accept_changes, notify=self._report_change)
        self._storage = storage_of(spec)
        self._out_folder = OutFolder.at(spec.out)
        self._nth = (-1, 0)  # the view of the newest checkpoint, and its number in that view
        self._buffers = HostBuffers()
        self._pending: PendingCheckpoint | None = None
        self._begun = (-1, False)  # the step of the checkpoint that threads write, and whether this worker publishes it
        self._others_publish = False  # the one before was published by a worker of another rank, maybe only just now
        self._full = ""  # why this worker could not write its part of the checkpoint before

    # -- writing ------------------------------------------------------------------------------------------------------

    def save(self, trained: TrainingState, *, wait: bool = True) -> None:
        """Write a checkpoint, after the one before it. If the disk is full, report it and keep the older ones.

        Every member must call this, between steps.

        Args:
            trained: The state.
            wait: Return once the checkpoint is complete, even if workers are lost meanwhile. If not, return once the
                state is copied, and let a thread write it: if a worker is lost meanwhile, the one before may stay the
                newest.
        """
        self.settle(trained)
        if not wait and (self._spec.spool is None or not trained.in_shares or self._workers.size == 1):
            self._begin(trained)
            return
        settled = False
        while True:
            at = self._storage.draft(self._next_name())
            try:
                shares = self._contribute(trained, at)
                if shares is None:
                    continue
                if self._workers.rank == 0 and not settled:
                    published = self._storage.publish(at, self._progress.position, self._described(), shares)
                    self._report(self._progress.position.step, published)
            except NoRoom as full:
                checkpoints.give_up(at)
                if self._workers.rank == 0:
                    self._report_failure(self._progress.position.step, str(full.value))
            except UserError:
                self._storage.check()  # if the folder is gone, that is the error to report
                raise
            settled = self._workers.rank == 0
            if not self._workers.elastic or self._workers.size == 1:
                return
            if any(done for (done,) in self._workers.gather([float(settled)], "a checkpoint")):
                return

    def _begin(self, trained: TrainingState) -> None:
        """Copy this worker's part of a checkpoint, and let a thread write it."""
        workers, storage = self._workers, self._storage
        rank, size = (workers.rank, workers.size) if trained.in_shares else (0, 1)
        at, position = storage.draft(self._next_name()), self._progress.position
        self._begun = position.step, workers.rank == 0
        if workers.rank != rank:  # rank 0 writes all of it
            if trained.replica.gathers:
                trained.written(0)  # a collective operation of all workers
            return
        part = self._buffers.copy(
            CheckpointPart.of(trained.written(rank) | (states_of(self._parts) if rank == 0 else {}))
        )
        described = self._described() if rank == 0 else {}
        leads, shares = rank == 0 and not self._others_publish, list[checkpoints.Contribution]()

        def write() -> None:
            try:
                storage.make_room(at, leads=leads)
                shares.append(storage.contribute(at, part, rank, size))
                if size == 1:
                    storage.written(at, shares[0].file)
                else:
                    storage.note(at, rank, shares[0])
            except NoRoom as full:
                if size > 1:
                    with suppress(UserError):  # without room for the note, too: all hear of it when they settle
                        storage.note(at, rank, None, str(full.value))
                raise

        def publish() -> Published | None:
            parts = shares if size == 1 else storage.notes(at, size)
            return None if parts is None else storage.publish(at, position, described, parts)

        self._pending = PendingCheckpoint(position.step, at, write, publish if rank == 0 else None)

    def look(self) -> None:
        """Report a checkpoint that a thread has completed, or has failed to write. Raises ``UserError`` as ``save``."""
        if self._pending is not None and self._pending.done:
            self._conclude()

    def settle(self, trained: TrainingState) -> None:
        """Wait for the checkpoint that threads write, and report it.

        Every member must call this, between steps. Raises ``UserError`` as ``save``.
        """
        workers, pending = self._workers, self._pending
        together = workers.size > 1 and (workers.elastic or trained.in_shares)
        if pending is not None and (pending.publishes and not trained.in_shares):
            self._conclude()
        elif pending is not None:
            pending.wait_written()
        rows: list[list[Any]] = []
        if together:  # from here on no member writes, and what is missing will not come
            nth = self._nth[1] if self._nth[0] == workers.view else -1
            error = None if pending is None else pending.error
            full = str(error.value) if isinstance(error, NoRoom) else self._full
            row = json.dumps([nth, *self._begun, full]).encode()
            rows = [json.loads(row) for row in workers.gather_bytes(row, "the checkpoint before")]
            self._nth = workers.view, max(nth for nth, *_ in rows)
        if self._pending is not None:
            self._conclude(next((full for *_, full in rows if full), ""))
        self._others_publish = any(publishes for at, (*_, publishes, _) in enumerate(rows) if at != workers.rank)
        begun = max((step for _, step, *_ in rows), default=-1)
        orphaned = begun >= 0 and not any(publishes for *_, publishes, _ in rows)
        if orphaned and workers.rank == 0 and not self._storage.has(begun):
            self._report_failure(begun, LOST)
        self._begun, self._full = (-1, False), ""

    def abandon(self) -> None:
        """Let the thread end, as this worker leaves the run or goes back. It raises nothing."""
        if self._pending is None:
            return
        self._pending.wait_written()
        self._pending.wait(PARTS_LIMIT_S)
        try:
            self._conclude()
        except UserError as error:
            print(f"elastune: {error}", file=sys.stderr)

    def _conclude(self, full: str = "") -> None:
        """Report how the pending checkpoint ended. ``full``: why another worker could not write its part."""
        pending, self._pending = self._pending, None
        assert pending is not None
        pending.conclude()
        error = pending.error
        if isinstance(error, NoRoom):
            self._full = str(error.value)
            full = full or self._full
        elif isinstance(error, UserError):
            self._storage.check()  # if the folder is gone, that is the error to report
        if error is not None and not isinstance(error, NoRoom):
            raise error
        if not pending.publishes:
            return
        if pending.published is not None:
            self._report(pending.step, pending.published)
        else:
            checkpoints.give_up(pending.at)
            self._report_failure(pending.step, full or LOST)

    def _report(self, step: int, published: Published) -> None:
        if published.path is not None:  # else the controller reports it
            self._send(Checkpointed(step, str(published.path), list(published.dropped), published.low))

    def _report_failure(self, step: int, why: str) -> None:
        self._send(CheckpointFailed(step, why, self._storage.newest()))

    def forget(self, step: int) -> None:
        """Remove the checkpoints after ``step``. Several workers may do this at once."""
        self._storage.forget(step)

    def spare(self, step: int) -> None:
        """Let the newest checkpoint up to ``step`` stay."""
        self._storage.spare(step)

    def keep_best(self, metric: str) -> bool:
        """Keep the checkpoint of this step as the best by ``metric``, even if workers are lost meanwhile.

        Returns whether it was written; False if the disk has no room. Every member must call this, after ``save``.
        """
        step, kept = self._progress.position.step, -1
        while True:
            if self._workers.rank == 0 and kept < 0:
                kept = int(keep_best(self._spec.out, metric, step, self._out_folder.make))
            if self._workers.size == 1:
                return bool(kept)
            results = [int(row) for (row,) in self._workers.gather([float(kept)], f"the best by {metric}")]
            if max(results) >= 0:
                return bool(max(results))

    def _next_name(self) -> str:
        """The name of a draft: equal on all workers of this view, which save together, and used by no other draft."""
        view, nth = self._workers.view, self._nth[1] + 1 if self._nth[0] == self._workers.view else 0
        self._nth = view, nth
        return f"{self._progress.position.step}-{view}-{nth}"

    def _contribute(self, trained: TrainingState, at: Path) -> list[checkpoints.Contribution] | None:
        """Write this worker's part of a checkpoint. Returns the contributions of all workers.

        None, on every worker, if a worker was lost meanwhile, so that others have to write its part. Raises ``NoRoom``
        on every writer if one of them had no room.
        """
        workers = self._workers
        rank, size = (workers.rank, workers.size) if trained.in_shares else (0, 1)
        view, nth = self._nth
        if workers.rank != rank:  # rank 0 writes all of it
            if trained.replica.gathers:
                trained.written(0)  # a collective operation of all workers
            return []
        part = CheckpointPart.of(trained.written(rank) | (states_of(self._parts) if rank == 0 else {}))
        if size == 1:
            self._storage.make_room(at, leads=True)
            alone = self._storage.contribute(at, part)
            self._storage.written(at, alone.file)
            return [alone]
        tree: dict[str, Any] = {}
        full = ""
        try:
            self._storage.make_room(at, leads=rank == 0)
            share = self._storage.contribute(at, part, rank, size)
            tree = share.tree
        except NoRoom as error:
            full = str(error.value)
        # Only the gathered rows decide: they are equal everywhere, even if a worker is lost right now.
        row = json.dumps([view, nth, size, tree, full]).encode()
        rows = [json.loads(row) for row in workers.gather_bytes(row, "a checkpoint")]
        if {(view, nth, size) for view, nth, size, *_ in rows} != {(*rows[0][:2], len(rows))}:
            # Some workers began before a loss, others after it: from here on all count from the same number.
            self._nth = workers.view, max(nth for _, nth, *_ in rows)
            return None
        if full := next((why for *_, why in rows if why), ""):
            raise NoRoom(checkpoints.UNWRITABLE, full, "free space there")
        self._storage.written(at, share.file)
        return [checkpoints.Contribution.of(tree) for _, _, _, tree, _ in rows]

    # -- beginning ----------------------------------------------------------------------------------------------------

    def load_newest(self, trained: TrainingState) -> str:
        """Go on from the newest checkpoint. Returns its name; "" if there is none."""
        newest = self._storage.load_newest(self._faults, lambda step: self._agreed(step, "the newest checkpoint"))
        if newest is None:
            return ""
        self._load(trained, *newest)
        return newest[0].name

    def inherit(self, trained: TrainingState) -> bool:
        """Begin with the state of another run, or of torch.distributed.checkpoint.

        Returns whether one was requested.
        """
        spec = self._spec
        if spec.parent is not None:
            self._inherit(spec.parent, trained)
        elif spec.from_dcp is not None:
            from elastune.train.checkpoints.export import read_dcp, states_of_dcp  # imports torch's, which takes long

            take_over(trained, states_of_dcp(read_dcp(spec.from_dcp)), str(spec.from_dcp))
        return spec.parent is not None or spec.from_dcp is not None

    def _faults(self, path: Path, files: Mapping[str, str]) -> str:
        """As ``checkpoints.faults``; of several files each worker reads some."""
        workers = self._workers
        if len(files) == 1 or workers.size == 1:
            return checkpoints.faults(path, files)
        try:
            fault = checkpoints.faults(path, files, slice(workers.rank, None, workers.size))
        except (OSError, ValueError) as error:  # all workers wait in the gather, and get the error there
            fault = f"{type(error).__name__}: {error}"
        rows = workers.gather_bytes(fault.encode(), f"the files of {path.name}")
        return next((row.decode() for row in rows if row), "")

    def _load(self, trained: TrainingState, path: Path, kept: checkpoints.Checkpoint) -> None:
        accepted = ("config",) if self._spec.accept_changes else ()
        self._check_match(kept, "a run resumes with the {} it was begun with", may_differ=accepted)
        self.data.load(kept.must_match.get("data"))
        load_states((*trained.saved_parts, *self._parts), kept.states, str(path))
        self._adapter.load(self._adapter.to_json(), resumed=True)

    def _agreed(self, step: int, what: str) -> int:
        """The ``step`` of the first worker, on all workers."""
        return int(self._workers.gather([float(step)], what)[0][0])

    def _inherit(self, parent: Path, trained: TrainingState) -> None:
        """Begin with the newest checkpoint of the run in ``parent``, without the changes of its policies."""
        # The parent may write another checkpoint meanwhile, so all workers agree on one.
        newest = self._storage.newest_of_parent(parent) if self._workers.rank == 0 else -1
        step = self._agreed(newest, "the parent's checkpoint")
        folder = self._storage.of_parent(parent, step)
        if step < 0:
            rule = "a child begins with its parent's newest checkpoint"
            raise UserError(rule, f"none in {folder}", "let the parent write one first")
        path = checkpoints.of_step(folder, step)
        fix = "keep a parent's folder as it is until its child has begun"
        kept = checkpoints.load(path, fix, self._faults, whole_parts=False)
        self._check_match(kept, "a child runs with the {} of its parent", may_differ=("config",))
        inherit(trained, kept.states, str(path))
        began = self._progress.state_dict()["initial_weights"]
        begins_with = {"batch_size": None, "micro_batch": None, "reports": 0, "initial_weights": began}
        load_states([self._progress], {Progress.name: {**kept.states[Progress.name], **begins_with}}, str(path))

    def _check_match(self, kept: checkpoints.Checkpoint, rule: str, may_differ: tuple[str, ...] = ()) -> None:
        """Refuse a checkpoint of a run with other hyperparameters; names in ``may_differ`` may differ."""
        wanted = self._must_match()
        other = [name for name in wanted if not _goes_on(name, kept.must_match.get(name), wanted[name])]
        other = [name for name in other if name not in may_differ]
        if other:
            kept_values = [kept.must_match.get(name) for name in other]
            raise UserError(rule.format(", ".join(other)), [wanted[name] for name in other], f"use {kept_values}")

    def _described(self) -> dict[str, Any]:
        """The description of the run that its checkpoints hold."""
        return {**self._must_match(), "data": self.data.kept(self._progress.position.epoch)}

    def _report_change(self, what: str) -> None:
        """Report that a difference of the data was accepted; rank 0 does, as one record is enough."""
        if self._workers.rank == 0:
            at = self._progress.position
            self._send(ChangesAccepted([what], at.step, at.epoch))

    def _must_match(self) -> dict[str, Any]:
        spec, execution = self._spec, self._spec.execution
        slots = {"num_slots": execution.num_slots} if execution.mode == "exact" else {}
        of_program = {
            "seed": spec.seed,
            "config": self._config,
            "sync": str(spec.sync),
            "sync_schedule": str(spec.sync_schedule),
        }
        return {
            **of_program,
            "mode": execution.mode,
            "precision": execution.precision,
            "compress": execution.compress,
            **slots,
        }


def _goes_on(name: str, then: Any, now: Any) -> bool:
    """Whether a run that began with ``then`` goes on with ``now``: the same value, or one for a longer run."""
    return then == now or (name == "config" and isinstance(then, dict) and not changed_settings(then, now))


# --- beginning with the state of another run ---


def inherit(trained: TrainingState, state: Mapping[str, Any], source: str) -> None:
    """Take over ``state``, the ``TrainingState.state`` of another run, which came from ``source``.

    Population-based training does this with a member that does badly (Jaderberg et al. 2017, section 3: *exploit*
    copies weights, *explore* changes hyperparameters). Parameters, buffers and the optimizer's state of each parameter
    are the other run's. Learning rates, momentum and other options of parameter groups stay as this run's program built
    them. Its schedulers are stepped as often as the other run's were, so that the rate follows this run's own schedule;
    those that the program did not give to ``session.prepare`` once they are found.

    Raises:
        UserError: Shapes, the kind of the optimizer or the number of schedulers differ.
    """
    _check(trained, state, source)
    optimizer = trained.optimizer
    taken = {"model": state["model"], "optimizer": {**state["optimizer"], "param_groups": trained.groups}}
    for part in trained.saved_parts:
        if part.name in taken:
            part.load_state_dict(taken[part.name])
    for group in optimizer.param_groups:
        for p in group["params"]:
            _fit_options(group, optimizer.state.get(p), p)
    trained.flags.set(state["built"].get("frozen", ()))
    _move(trained.given_schedulers, state["schedulers"]["states"], state["built"]["kinds"][1:], trained, state)
    if saved := state["schedulers"].get("found"):
        states, kinds = [each["state"] for each in saved], [each["kind"] for each in saved]
        trained.found_schedulers.wait_with(kinds, lambda those: _move(those, states, kinds, trained, state))


def take_over(trained: TrainingState, taken: Mapping[str, Mapping[str, Any]], source: str) -> None:
    """Begin with the ``model`` of another program, and with its state of the ``optimizer`` by parameter names.

    Options of the optimizer stay this program's. Raises ``UserError`` if names or shapes differ.
    """
    shapes, source_shapes = trained.shapes, shapes_of(taken["model"])
    for name in {**shapes, **source_shapes}:
        if shapes.get(name) != source_shapes.get(name):
            rule, fix = "weights fit a model of the same names and shapes", "build the model that they are of"
            raise UserError(rule, f"{name}: {shapes.get(name)}, in {source}: {source_shapes.get(name)}", fix)
    optimizer = {"state": taken["optimizer"], "param_groups": trained.groups}
    load_states(trained.saved_parts[:2], {"model": taken["model"], "optimizer": optimizer}, source)


def _check(trained: TrainingState, state: Mapping[str, Any], source: str) -> None:
    rule = "a child has the shapes, optimizer and schedulers of its parent"
    shapes, parent_shapes = trained.shapes, shapes_of(state["model"])
    for name in {**shapes, **parent_shapes}:
        if shapes.get(name) != parent_shapes.get(name):
            fix = "keep fixed what decides the shapes of the model"
            raise UserError(rule, f"{name}: {shapes.get(name)}, in {source}: {parent_shapes.get(name)}", fix)
    kind, other = type(trained.optimizer).__name__, state["built"]["kinds"][0]
    if kind != other:
        raise UserError(rule, f"{kind}, in {source}: {other}", "keep the optimizer fixed")
    sizes = [len(group["params"]) for group in trained.groups]
    others = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
    if sizes != others:
        raise UserError(rule, f"parameter groups of {sizes}, in {source}: {others}", "keep parameter groups fixed")
    if len(trained.given_schedulers) != len(state["schedulers"]["states"]):
        counts = f"{len(trained.given_schedulers)} schedulers, in {source}: {len(state['schedulers']['states'])}"
        raise UserError(rule, counts, "prepare as many of them, constant ones too")


def _fit_options(group: Mapping[str, Any], kept: dict[str, Any] | None, parameter: torch.Tensor) -> None:
    """Add the state that an option needs, and drop the state of options that are off; torch does so at the first step
    only.
    """
    if not kept:
        return
    for option, name in _BUFFERS.items():
        if option not in group:
            continue
        if not group[option]:
            kept.pop(name, None)
        elif kept.get(name) is None:
            kept[name] = torch.zeros_like(parameter)


def _move(
    schedulers: Sequence[Any],
    others: Sequence[Mapping[str, Any]],
    kinds: Sequence[str],
    trained: TrainingState,
    state: Mapping[str, Any],
) -> None:
    """Step ``schedulers`` to where the ``others`` of ``kinds``, the other run's, are.

    If there are several, one may step with every batch and another with every epoch: they are stepped in turn, evenly.
    """
    turns: list[tuple[float, int]] = []
    for i, (scheduler, other, kind) in enumerate(zip(schedulers, others, kinds, strict=False)):
        steps = _steps(other)
        if isinstance(scheduler, ReduceLROnPlateau):
            _wait_alike(scheduler, other, steps)
            turns += [(math.inf, i)] * _reductions(state, other, kind)
        else:
            turns += [((step + 1) / steps, i) for step in range(steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "before optimizer.step()": the other run has done those steps
        for _, i in sorted(turns):
            scheduler = schedulers[i]
            try:
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler._reduce_lr(scheduler.last_epoch)
                else:
                    scheduler.step()
            except ValueError as error:  # such as OneCycleLR beyond its last step
                rule = "a child's schedule reaches as far as its parent has come"
                raise UserError(rule, f"{type(scheduler).__name__}: {error}", "make the schedule longer") from None
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.load_state_dict({"_last_lr": learning_rates(trained.optimizer)})


def _steps(scheduler: Mapping[str, Any]) -> int:
    """How often a scheduler with this state was stepped."""
    if "last_epoch" in scheduler:
        return int(scheduler["last_epoch"])
    if scheduler.get("_schedulers"):  # a chain has no count of its own
        return max(_steps(part) for part in scheduler["_schedulers"])
    rule = "a child's schedulers are stepped as often as its parent's were"
    raise UserError(rule, "one whose state has no last_epoch", "derive it from torch's LRScheduler")


def _wait_alike(scheduler: ReduceLROnPlateau, other: Mapping[str, Any], steps: int) -> None:
    seen = {name: other[name] for name in _WAITING if other.get("mode") == scheduler.mode}
    scheduler.load_state_dict({**seen, "last_epoch": steps})


def _reductions(state: Mapping[str, Any], other: Mapping[str, Any], kind: str) -> int:
    """How often the plateau scheduler ``other`` of the other run has reduced its rates; torch does not count it."""
    if kind != ReduceLROnPlateau.__name__:
        return 0
    for built, group in zip(state["built"]["rates"], state["optimizer"]["param_groups"], strict=True):
        if built > 0 and group["lr"] > 0:
            return max(0, round(math.log(float(group["lr"]) / built) / math.log(other["factor"])))
    return 0


# --- the best checkpoint so far ---


def keep_best(out: Path, metric: str, step: int, make: Callable[[Path], None] = checkpoints.make_folder) -> bool:
    """Keep the checkpoint after ``step`` steps of the run in ``out`` as the best by ``metric``.

    It replaces the best one before, and stays in ``best/METRIC/checkpoints`` when newer checkpoints come. On a disk
    with hard links it takes no second space. Returns False if there is no checkpoint of that step, or no room. Raises
    ``UserError`` if it cannot be written.
    """
    source, folder = checkpoints.of_step(out / "checkpoints", step), out / "best" / metric / "checkpoints"
    if not source.is_dir():
        return False
    at = checkpoints.draft(folder, "best")
    try:
        with checkpoints.writing(at):
            make(folder)
            shutil.rmtree(at, ignore_errors=True)
            shutil.copytree(source, at, copy_function=_link)
            checkpoints.complete_draft(at, folder, step)
    except NoRoom:
        checkpoints.give_up(at)
        return False
    for path in checkpoints.complete(folder):
        if checkpoints.step_of(path) != step:
            shutil.rmtree(path, ignore_errors=True)
    return True


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a disk without hard links
        shutil.copy2(source, target)
