"""The checkpoints of a run's folder: written together, loaded at the start, inherited from a parent.

A run may begin from another run's weights and optimizer state, under its own settings, as population-based training
needs (Jaderberg et al. 2017). Where the disk has no room, training goes on without a new checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from elastune.train.checkpoints.checkpoint import NoRoom
from elastune.train.checkpoints.out_folder import OutFolder
from elastune.train.checkpoints.place import storage_of
from elastune.train.checkpoints.tree import Part, load_states, states_of
from elastune.train.data.fingerprint import TrainingDataHistory
from elastune.train.progress import Progress
from elastune.train.schedules import learning_rates
from elastune.train.training_state import TrainingState, shapes_of

# [best] The best checkpoint so far, which stays when newer ones come.


def keep_best(out: Path, metric: str, step: int, make: Callable[[Path], None] = checkpoints.make_folder) -> bool:
    """Keep the checkpoint after ``step`` steps of the run in ``out``, which is dropped else as newer ones come, as the
    best by ``metric``, in ``best/METRIC/checkpoints``; in place of the one that was. It takes no space twice where the
    disk has hard links.

    False where there is none of that step, or no room. Raises ``UserError`` where it cannot be written.
    """
    found, folder = checkpoints.of_step(out / "checkpoints", step), out / "best" / metric / "checkpoints"
    if not found.is_dir():
        return False
    at = checkpoints.draft(folder, "best")
    try:
        with checkpoints.writing(at):
            make(folder)
            shutil.rmtree(at, ignore_errors=True)
            shutil.copytree(found, at, copy_function=_link)
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


# [inherit] A run that begins where another one is: with its weights and the state of its optimizer, under settings of its own.
#
# It is what population-based training does with a member that does badly (Jaderberg et al. 2017, "Population Based
# Training of Neural Networks", section 3: *exploit* copies weights, *explore* changes hyperparameters).

_BUFFERS = {"momentum": "momentum_buffer", "amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
"""Options of torch's optimizers, and what a parameter's state holds because of them."""
_WAITING = ("best", "num_bad_epochs", "cooldown_counter")  # what a plateau has seen


def inherit(trained: TrainingState, state: Mapping[str, Any], source: str) -> None:
    """Take over ``state``, the ``TrainingState.state`` of another run, which came from ``source``.

    Parameters, buffers and what the optimizer keeps for each parameter are the other run's. Learning rates, momentum
    and whatever else parameter groups hold are as this run's program built them; its schedulers are stepped as often as
    the other's were, so that the rate is what this run's own schedule gives there. Raises ``UserError`` where shapes,
    the optimizer's kind or the number of schedulers differ.
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
    _move(trained, state)


def take_over(trained: TrainingState, taken: Mapping[str, Mapping[str, Any]], source: str) -> None:
    """Begin with the ``model`` of another program, and with what it has of the ``optimizer`` by parameters' names.

    Options of the optimizer stay this program's. Raises ``UserError`` where names or shapes differ.
    """
    own, found = trained.shapes, shapes_of(taken["model"])
    for name in {**own, **found}:
        if own.get(name) != found.get(name):
            rule, fix = "weights fit a model of the same names and shapes", "build the model that they are of"
            raise UserError(rule, f"{name}: {own.get(name)}, in {source}: {found.get(name)}", fix)
    optimizer = {"state": taken["optimizer"], "param_groups": trained.groups}
    load_states(trained.saved_parts[:2], {"model": taken["model"], "optimizer": optimizer}, source)


def _check(trained: TrainingState, state: Mapping[str, Any], source: str) -> None:
    rule = "a child has the shapes, optimizer and schedulers of its parent"
    own, found = trained.shapes, shapes_of(state["model"])
    for name in {**own, **found}:
        if own.get(name) != found.get(name):
            fix = "keep fixed what decides the shapes of the model"
            raise UserError(rule, f"{name}: {own.get(name)}, in {source}: {found.get(name)}", fix)
    kind, other = type(trained.optimizer).__name__, state["built"]["kinds"][0]
    if kind != other:
        raise UserError(rule, f"{kind}, in {source}: {other}", "keep the optimizer fixed")
    sizes = [len(group["params"]) for group in trained.groups]
    others = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
    if sizes != others:
        raise UserError(rule, f"parameter groups of {sizes}, in {source}: {others}", "keep parameter groups fixed")
    if len(trained.schedulers) != len(state["schedulers"]["states"]):
        counts = f"{len(trained.schedulers)} schedulers, in {source}: {len(state['schedulers'])}"
        raise UserError(rule, counts, "prepare as many of them, constant ones too")


def _fit_options(group: Mapping[str, Any], kept: dict[str, Any] | None, parameter: torch.Tensor) -> None:
    """What an option calls for is there, what none calls for is not: torch makes it with the first step only."""
    if not kept:
        return
    for option, name in _BUFFERS.items():
        if option not in group:
            continue
        if not group[option]:
            kept.pop(name, None)
        elif kept.get(name) is None:
            kept[name] = torch.zeros_like(parameter)


def _move(trained: TrainingState, state: Mapping[str, Any]) -> None:
    """Step the schedulers to where the other run's are.

    Of several, one may step with every batch and one with every epoch: they take turns, evenly.
    """
    turns: list[tuple[float, int]] = []
    for i, (scheduler, other) in enumerate(zip(trained.schedulers, state["schedulers"]["states"], strict=True)):
        steps = _steps(other)
        if isinstance(scheduler, ReduceLROnPlateau):
            _wait_alike(scheduler, other, steps)
            turns += [(math.inf, i)] * _reductions(state, i)
        else:
            turns += [((step + 1) / steps, i) for step in range(steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "before optimizer.step()": those steps were the other run's
        for _, i in sorted(turns):
            scheduler = trained.schedulers[i]
            try:
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler._reduce_lr(scheduler.last_epoch)
                else:
                    scheduler.step()
            except ValueError as error:  # such as OneCycleLR beyond its last step
                rule = "a child's schedule reaches as far as its parent has come"
                raise UserError(rule, f"{type(scheduler).__name__}: {error}", "make the schedule longer") from None
    for scheduler in trained.schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.load_state_dict({"_last_lr": learning_rates(trained.optimizer)})


def _steps(scheduler: Mapping[str, Any]) -> int:
    """How often a scheduler with this state was stepped."""
    if "last_epoch" in scheduler:
        return int(scheduler["last_epoch"])
    if scheduler.get("_schedulers"):  # a chain counts nothing of its own
        return max(_steps(part) for part in scheduler["_schedulers"])
    rule = "a child's schedulers are stepped as often as its parent's were"
    raise UserError(rule, "one whose state has no last_epoch", "derive it from torch's LRScheduler")


def _wait_alike(scheduler: ReduceLROnPlateau, other: Mapping[str, Any], steps: int) -> None:
    seen = {name: other[name] for name in _WAITING if other.get("mode") == scheduler.mode}
    scheduler.load_state_dict({**seen, "last_epoch": steps})


def _reductions(state: Mapping[str, Any], i: int) -> int:
    """How often plateau scheduler ``i`` of the other run has reduced its rates: torch keeps no count."""
    other = state["schedulers"]["states"][i]
    if state["built"]["kinds"][1 + i] != ReduceLROnPlateau.__name__:
        return 0
    for built, group in zip(state["built"]["rates"], state["optimizer"]["param_groups"], strict=True):
        if built > 0 and group["lr"] > 0:
            return max(0, round(math.log(float(group["lr"]) / built) / math.log(other["factor"])))
    return 0


# [run folder] The checkpoints in a run's folder: workers write them together, begin from them, and do without where no room is.


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
        self.data = TrainingDataHistory(spec.data_seen, accepts=spec.accept_changes, tell=self._tell_change)
        self._place = storage_of(spec)
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
            from elastune.train.checkpoints.export import read_dcp, states_of_dcp  # torch's takes long to import

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
        spec, execution = self._spec, self._spec.execution
        slots = {"num_slots": execution.num_slots} if execution.mode == "exact" else {}
        own = {
            "seed": spec.seed,
            "config": self._config,
            "sync": str(spec.sync),
            "sync_schedule": str(spec.sync_schedule),
        }
        return {
            **own,
            "mode": execution.mode,
            "precision": execution.precision,
            "compress": execution.compress,
            **slots,
        }


def _goes_on(name: str, then: Any, now: Any) -> bool:
    """Whether a run that was begun with ``then`` goes on with ``now``: with the same, or for longer."""
    return then == now or (name == "config" and isinstance(then, dict) and not changed_settings(then, now))
