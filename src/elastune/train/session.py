"""The session that a training function receives: an ordinary PyTorch loop, on any number of workers.

``Session`` holds the methods that a program calls, in four groups: data, model, control, results. ``TrainingParts``
holds the objects that do the work.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from elastune.adapt.policies.base import Policy
from elastune.core.clock import Clock, SystemClock
from elastune.core.communication import Topology
from elastune.core.cost import MEASURED
from elastune.core.decisions import Decision, Signal, topology_for_vote
from elastune.core.errors import UserError, page_of
from elastune.core.journal.records import Record, Reported, RunContext, StartedFrom
from elastune.core.mesh import Mesh
from elastune.core.run import Config, RunSpec, StartFrom, derive, refuse_repeated_batches
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.worker.group import WorkerGroup
from elastune.elastic.worker.recovery import Packed
from elastune.parallel.comm.channel import Channel
from elastune.parallel.comm.group import CALLS_TAG
from elastune.parallel.comm.norms import exact_mean, exact_sum
from elastune.parallel.mechanisms.capabilities import meshes_of
from elastune.parallel.mechanisms.registry import Plans, note_plan
from elastune.parallel.mechanisms.tensor_storage import built_in_parts
from elastune.parallel.sync.registry import active_sync as sync_in_use
from elastune.parallel.sync.registry import prepare as prepare_sync
from elastune.train.adaptation.adapter import Adapter
from elastune.train.adaptation.decisions import wished
from elastune.train.checkpoints.out_folder import OutFolder, claim
from elastune.train.checkpoints.run_state import RunState
from elastune.train.collectives import Call, CollectiveHandle, Kind, NamedCollectives
from elastune.train.compiling import Autocast, by_shapes_alone, plain
from elastune.train.data.divided import StreamPositions
from elastune.train.data.loading import LoaderOptions
from elastune.train.data.sample_log import SampleLog
from elastune.train.data.source import Batches, data_request, global_batches
from elastune.train.evaluations import Evaluations, Number, floats_of, sample_counts
from elastune.train.losses import loss_kind
from elastune.train.machine import run_context
from elastune.train.models import Prepared, Tracked, Unfreezing, WeightSources, is_scaled, unfreezing
from elastune.train.predictions import check_name, meet_and_keep, own_part
from elastune.train.program.loops import refuse_counted_slots
from elastune.train.progress import BY_PROGRAM, DivergenceWatch, Progress, StepMemory, StepTimes
from elastune.train.proof.verification import Verification
from elastune.train.rng import seed_everything
from elastune.train.schedules import gate, learning_rates
from elastune.train.step import DIGESTS_FROM, Phase, StepTransaction, TrainingLoop, reevaluates_loss
from elastune.train.training_state import HeldSettings, TrainingState

T = TypeVar("T")
LONGEST_WHY = 300  # characters of session.stop's reason
FILE_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")


class TrainingParts:
    """The objects that one worker's training is made of: ``Session`` hands the program's calls on to them.

    Attributes:
        spec: What the run is to do.
        workers: The workers that train together, and this worker's place among them.
        send: Takes records for the journal.
        snapshot: The state that this worker was rewound to and goes on from; None: it begins.
        progress: How far the run has come.
        log: Which samples the steps used.
        adapter: Monitors and policies.
        transaction: Whether a step is open, reduced, committed or lost.
        collectives: Collectives that the program starts by name.
        tracked: State of the program's own.
        streams: How far streams that are divided were read.
        state: All of the run's state, for checkpoints and joining workers.
        divergence: Ends a run whose loss explodes.
        loop: Takes the steps.
        evaluations: Passes that train nothing, and values gathered after them.
        out_folder: The run's folder, as it was when the session began. weight_sources: Weights that models start from.
    """

    def __init__(
        self,
        spec: RunSpec,
        workers: WorkerGroup,
        device: torch.device,
        *,
        config: Config,
        send: Callable[[Record], None],
        stop_requested: Callable[[], bool],
        clock: Clock,
        snapshot: Packed | None,
        warm_up: bool,
        policies: Mapping[str, type[Policy]],
    ) -> None:
        self.spec, self.workers, self.send, self.snapshot = spec, workers, send, snapshot
        self.progress = progress = Progress(StepTimes(clock), StepMemory(device))
        self.adapter = Adapter(spec, workers, progress, send, policies)
        self.log = SampleLog(workers.worker, send if workers.elastic or workers.rank == 0 else lambda record: None)
        self.transaction = transaction = StepTransaction(workers, progress, self.log)
        self.collectives = NamedCollectives(
            workers, lambda: transaction.attempts, transaction.recover, partial(Channel, tag=CALLS_TAG), self._stand_in
        )
        self.tracked = Tracked()
        self.streams = StreamPositions(workers, spec.execution.num_slots, progress, send, lambda: self.state.trained)
        verification = Verification(spec, workers, progress, device, send, lambda: self.state, DIGESTS_FROM)
        saved = [self.log, self.collectives, self.tracked, self.streams, *([verification] if verification.on else ())]
        self.state = state = RunState(spec, config, workers, progress, transaction, self.adapter, send, parts=saved)
        state.collectives, state.spoil = self.collectives, verification.corruptions.sent
        self.divergence = DivergenceWatch(spec.divergence, progress)
        step_parts = spec, workers, progress, transaction, self.log, state, self.adapter, self.divergence, device
        asked = partial(TrainingLoop, send=send, stop_requested=stop_requested, warming_up=warm_up)
        self.loop = asked(*step_parts, verification)
        self.evaluations = Evaluations(workers, state, transaction, device, spec.seed)
        self.out_folder = OutFolder.at(spec.out)
        sources = spec, workers, progress, self.out_folder, send
        self.weight_sources = WeightSources(*sources, rewound=snapshot is not None)
        if snapshot is not None:
            state.rewind(snapshot)
        seed_everything(derive(spec.seed, "init"))  # of the streams that build the model

    def _stand_in(self, until: Callable[[], bool]) -> None:
        """While this worker waits for a collective, others may need it in an evaluation."""
        if self.state.trained is not None:
            self.state.trained.replica.stand_in(until)


class Session:
    """One worker's view of a run: the argument of ``train(session)``. Every worker has a session of its own.

    The program gives its model to ``prepare``, draws batches from ``batches``, and calls ``backward`` instead of
    ``loss.backward()``. elastune makes sessions; a program never does.

    Example:
        >>> def train(session):
        ...     model = Net(session.config["width"])
        ...     model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for epoch in session.epochs(10):
        ...         for x, y in session.batches(train_set, batch_size=256):
        ...             session.backward(F.cross_entropy(model(x), y))
        ...             optimizer.step()
        ...             optimizer.zero_grad()

    Attributes:
        config: The program's settings.
        device: This worker's device.
        seed: The run's seed.
        state: The run's state, for the code that moves and saves it.

    Args:
        snapshot: The state that this worker was rewound to and goes on from.
        warm_up: This is a joiner's first time through the training function: it ends after a few passes that do not
            count.
        policies: The program's policy classes, by name.
    """

    def __init__(
        self,
        spec: RunSpec,
        workers: WorkerGroup,
        device: torch.device,
        *,
        config: Config,
        send: Callable[[Record], None],
        stop_requested: Callable[[], bool],
        clock: Clock | None = None,
        snapshot: Packed | None = None,
        warm_up: bool = False,
        policies: Mapping[str, type[Policy]] = MappingProxyType({}),
    ) -> None:
        self.config, self.device, self.seed = config, device, spec.seed
        self._parts = TrainingParts(
            spec,
            workers,
            device,
            config=config,
            send=send,
            stop_requested=stop_requested,
            clock=clock or SystemClock(),
            snapshot=snapshot,
            warm_up=warm_up,
            policies=policies,
        )
        self.state = self._parts.state
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._autocasts: Sequence[Autocast] = ()
        self._unfreezing: tuple[Unfreezing, ...] = ()  # of each model
        self._held: HeldSettings | None = None  # settings that lines before the first epoch must not change
        self._planned = spec.epochs or 0
        self._passes_in_epoch = 0
        self._turns = 1  # of the newest pass

    # -- data ----------------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that still have to run, of ``count`` in all.

        ``--epochs`` of the run replaces ``count``. A resumed run leaves out the epochs that it has completed.
        """
        progress, loop, spec = self._parts.progress, self._parts.loop, self._parts.spec
        until = spec.until_epoch
        if until is not None and until < 1:
            raise UserError("a run pauses after a whole number of epochs, at least 1", until, "until_epoch=1")
        loop.join()
        if self._held is not None:
            self._held.restore()
            self._held = None
        if self.trained is not None:
            self._gate(self.trained.found_schedulers.search(self._optimizers, self.trained.given_schedulers))
        total = self._planned = count if spec.epochs is None else spec.epochs
        while progress.position.epoch < total and loop.begins_epoch():
            epoch = progress.position.epoch
            if until is not None and epoch >= until:
                loop.stop("until_epoch")
            self._passes_in_epoch = 0
            self.state.seed_epoch()
            with self._parts.workers.name_loop_in_beats("session.epochs"):
                yield epoch
            self._require_whole_step()
            loop.commit()  # where workers meet after a step, and the program has left the loop at once
            if self.stopped != "complete":
                if self.stopped == BY_PROGRAM and spec.checkpoint_every_steps != 0:
                    loop.save()  # a resumed run must know of it
                return
            if progress.position.epoch == epoch:  # an epoch without a whole training pass
                progress.position = replace(progress.position, epoch=epoch + 1, offset=0)
                loop.stop_if_requested()
            self._passes_in_epoch = 0
            pauses = until is not None and until <= progress.position.epoch < total
            if spec.checkpoint_every_steps != 0 and not pauses:  # a pause writes one
                loop.commit()
                loop.save(wait=progress.position.epoch >= total or not loop.begins_epoch())

    def batches(
        self,
        data: Any,
        batch_size: int | None = None,
        *,
        train: bool = True,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        drop_last: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loader_workers: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int | None = None,
        turns: int = 1,
    ) -> Batches:
        """Return an iterator over this worker's batches of one pass over ``data``, collated and on ``session.device``.

        A training pass continues where a resumed run stopped. Each batch of it needs one ``session.backward``. With
        several slots a global batch comes in several of them: put what belongs to the global batch (counts, breaks,
        logs) under ``if session.ends_step:``. ``len()`` is the number of global batches. With ``train=False`` the pass
        is an evaluation: in order, each batch of ``batch_size`` samples goes to one worker, and sums over workers count
        every sample once.

        Args:
            data: A map-style data set, a stream (``IterableDataset``), or a ``DataLoader`` of either. A loader's data
                set, batches, order and other options are taken over.
            batch_size: The global batch size: samples that all workers together use in one step.
            train: Whether this is a training pass.
            shuffle: Whether each epoch visits samples in a new order, which the run's seed decides (default).
            sampler: Replaces that order, such as a ``WeightedRandomSampler``. It draws once an epoch, from the run's
                seed, and the same on all workers.
            drop_last, collate_fn, pin_memory, prefetch_factor: As for torch's ``DataLoader``.
            loader_workers: As ``num_workers`` of torch's ``DataLoader``.
            turns: Steps with each batch, one after another; ``session.turn`` is 0 in the first. A GAN's two networks
                have one turn each.

        Raises:
            UserError: For data that cannot be divided among workers; for options that contradict each other; for a
                loop that acts by its own count of batches, where a global batch has several.

        Example:
            >>> for x, y in session.batches(DataLoader(train_set, batch_size=256, shuffle=True)):
            ...     session.backward(F.cross_entropy(model(x), y))
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        self._require_whole_step()
        self._refresh_compiled()
        request = data_request(
            data,
            batch_size,
            shuffle=shuffle,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            loader_workers=loader_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            seed=self.seed,
        )
        if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
            raise UserError("a batch has a whole number of turns, at least 1", turns, "such as turns=2")
        if not train:
            data, size = request.to_evaluate(self.seed), request.batch_size
            count = None if request.streams else -(-len(data) // size)
            return Batches(self._evaluation_pass(data, size, request.loading), lambda: count)
        _ = self.state.prepared  # raises where there is no model yet
        if self._passes_in_epoch:
            raise UserError("an epoch holds one training pass", "a second one", "use one more session.epochs")
        self._passes_in_epoch += 1
        self._turns = turns
        if turns > 1:
            self._forbid_strategies(refuse_repeated_batches)
        self.state.data.begin_pass(request.dataset, self.epoch)
        if self._parts.spec.execution.cuts_batches:
            refuse_counted_slots(sys._getframe(1))
        source, epoch = cache(replace(request, turns=turns).source(self.seed, self._parts.streams)), self.epoch
        batches = self._parts.loop.training_pass(source, request.batch_size, self._planned)
        size = self._parts.progress.batch_size or request.batch_size
        return Batches(batches, lambda: global_batches(source(epoch), size))

    @property
    def epoch(self) -> int:
        """The number of completed training passes."""
        return self._parts.progress.position.epoch

    @property
    def step(self) -> int:
        """The number of completed steps (global batches)."""
        return self._parts.progress.position.step

    @property
    def batch_index(self) -> int:
        """Which global batch of the epoch the current one is, from 0; ``step`` counts through all epochs."""
        return self._parts.progress.steps_of_epoch // self._turns

    @property
    def turn(self) -> int:
        """Which of the steps with the current batch this is, from 0; see ``turns`` of ``session.batches``."""
        return self._parts.progress.position.turn

    @property
    def samples(self) -> int:
        """The number of samples that the completed steps of all workers used."""
        return self._parts.progress.position.samples

    @property
    def ends_step(self) -> bool:
        """Whether the current batch completed a step: a worker with several slots has several batches in a step.

        Inside the batch loop, put whatever counts steps, reports or breaks under ``if session.ends_step:``. A step in
        which a worker was lost is done again: none of its batches ended it.

        Example:
            >>> if session.ends_step and session.batch_index % 100 == 0:
            ...     print(session.epoch, session.batch_index, session.loss)
        """
        return not self._parts.transaction.more_to_come

    def sum(self, values: Number | Iterable[Number]) -> float:
        """Return the sum, over all workers, of a number, a tensor or a list of them.

        It is rounded once, so the number of workers does not show in it. Every worker must call this, between steps.
        """
        self._require_between_steps("sum")
        return exact_sum(x for row in self._meet(floats_of(values), "sum") for x in row)

    def mean(self, values: Number | Iterable[Number]) -> float:
        """Return the mean over all values of all workers, rounded once. Every worker must call this, between steps."""
        self._require_between_steps("mean")
        return exact_mean(x for row in self._meet(floats_of(values), "mean") for x in row)

    def predictions(self, name: str, outputs: Any, targets: Any) -> None:
        """Keep the model's predictions on a data set, in the order of its samples, for ensembles (docs/ensembles.md).

        Every worker must call this after an evaluation of the whole data set, with the rows of its own batches. The
        file in the run's folder has the same bytes for any number of workers. A later call with the same name replaces
        the file.

        Args:
            name: The name of the data set. A name that begins with "test" is for data that no choice may rest on.
            outputs: Logits, probabilities or values: a tensor, or a list with one tensor for each batch; rows are
                samples.
            targets: The right answers, in the same form.

        Raises:
            UserError: For rows that are not those of the newest evaluation, for targets that are not finite numbers,
                and where the file cannot be written.
            Diverged: For outputs that are not finite.

        Example:
            >>> outputs, targets = [], []
            >>> for x, y in session.batches(data.validation, batch_size=100, train=False):
            ...     outputs.append(model(x))
            ...     targets.append(y)
            >>> session.predictions("validation", outputs, targets)
        """
        self._require_between_steps("predictions")
        check_name(name)
        self._require_shared_folder("predictions", "predictions lie in a folder that all workers share")
        workers, evaluations = self._parts.workers, self._parts.evaluations
        seen = evaluations.seen
        rows = evaluations.meet_bytes(own_part(seen, outputs, targets), f"session.predictions({name})")
        if not workers.synchronised:  # catching up with the run: the file of that time stands
            return
        place = self._parts.spec.out, self._parts.out_folder, name, self.step
        if (kept := meet_and_keep(workers, rows, seen.length, *place)) is not None:
            self._parts.send(kept)

    @property
    def rank(self) -> int:
        """This worker's rank, from 0. It may change between steps."""
        return self._parts.workers.rank

    @property
    def size(self) -> int:
        """The number of workers. It may change between steps."""
        return self._parts.workers.size

    @property
    def leader(self) -> bool:
        """Whether this worker acts for all: it prints, writes a file, or updates a dashboard.

        At most one worker is the leader at a time, never one that still catches up with the run. If a worker is lost,
        the leader's work since the last step may be done again, perhaps by another worker; or by none, where the leader
        itself is lost before that line. So write files anew instead of appending to them. ``session.report`` keeps each
        value once; use ``session.once`` for what must not happen twice.
        """
        return self.rank == 0 and self._parts.workers.synchronised

    def once(self, name: str) -> bool:
        """Return whether this worker is to do ``name`` now: True on one worker, once in the life of the run.

        The first worker that comes here gets it, so a lost worker does not stop it. The mark (``once/NAME`` in the
        run's folder) is on the disk before this returns, and a resumed run finds it. So what was begun is never begun
        again, even where its worker was killed before the end. Inside a batch loop, only the batch that completes a
        step can get it. Workers may come here at different times: call no method of the session in the block.

        Args:
            name: Letters, digits, ``_`` and ``-``; use another name for each occasion: ``f"epoch-{epoch}"``.

        Returns:
            Whether this worker is to do it.

        Raises:
            UserError: For a name that no file can have, and where hosts do not share the run's folder, or it is full.

        Example:
            >>> if session.once(f"mail-{session.epoch}"):
            ...     send_mail(f"epoch {session.epoch} is done")
        """
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            fix = 'such as session.once("mail-3")'
            raise UserError("what is done once is named by up to 80 letters, digits, _ and -", repr(name)[:60], fix)
        self._require_shared_folder("once", "what was done once is noted in a folder that all share")
        if not self._parts.workers.synchronised or not self.ends_step:
            return False  # a worker that catches up, and the end of the step, come here again
        return claim(self._parts.out_folder, name, f"worker {self._parts.workers.worker}, after step {self.step}")

    # -- model ---------------------------------------------------------------------------------------------------------

    def model_context(self) -> AbstractContextManager[None]:
        """Return a context for building a model that does not fit into any worker's memory.

        Make the optimizer after the block. Initial values are those of a plain construction. Parameters lie in unnamed
        files in the run's folder until ``session.prepare`` has given each worker its part. Where every worker computes
        with all parameters, the context does nothing.

        Example:
            >>> with session.model_context():
            ...     model = Transformer(layers=96)
        """
        return built_in_parts(self._parts.spec.execution, self._parts.spec.out)

    def start_from(
        self,
        model: nn.Module,
        source: str | Path,
        *,
        rename: Mapping[str, str] = MappingProxyType({}),
        fresh: Sequence[str] = (),
    ) -> StartedFrom:
        """Start from another model's weights: copy the tensors of the same name and shape into ``model``.

        Call it before ``session.prepare``. Best call it before you make the optimizer: fresh tensors may then get a
        learning rate of their own. A resumed run continues from its own checkpoint: it copies nothing, and the source
        may be gone. A worker that joins does not read the source either, where it shares the run's folder.
        ``elastune run --start-from`` does the same without a change of the program.

        Args:
            model: The program's model; tensors that are not copied stay as they are.
            source: The folder of a run or a trial, or a safetensors file, on every worker's host.
            rename: How the source's names begin, and how they begin here: ``{"backbone.": "encoder."}``.
            fresh: Names here that are not copied, with ``*`` for anything: ``["head.*"]``.

        Returns:
            What was copied, what is fresh and why, as it was when the run began. The journal has it, too.

        Raises:
            UserError: For a source that cannot be read, and where nothing of it fits.

        Example:
            >>> start = session.start_from(model, "runs/pretrained", fresh=["head.*"])
            >>> groups = [{"params": [p], "lr": 0.1 if n in start.fresh else 0.01} for n, p in model.named_parameters()]
            >>> model, optimizer = session.prepare(model, torch.optim.SGD(groups))
        """
        if self.trained is not None:
            rule = "session.start_from comes before session.prepare"
            raise UserError(rule, "a call behind it", "move it before session.prepare")
        if isinstance(fresh, str) or not all(isinstance(name, str) for name in fresh):
            raise UserError("fresh is a list of names", repr(fresh)[:80], 'such as ["head.*"]')
        request = StartFrom(Path(source), tuple(dict(rename).items()), tuple(fresh))
        return self._parts.weight_sources.start_from(model, request)

    def unfreeze(self, model: nn.Module, schedule: Mapping[str, int | None]) -> dict[str, int | None]:
        """Train the tensors of ``model`` from different epochs on, such as the head first and lower layers later.

        A frozen tensor has no gradient when the optimizer steps, so neither momentum nor weight decay changes it. Its
        gradient is still computed and summed: epochs take as long as before, and running statistics of normalising
        layers move. For a tensor that never trains, ``requires_grad_(False)`` before ``session.prepare`` is cheaper.

        Args:
            model: The program's model; each of several models has a schedule of its own, or none.
            schedule: Names, with ``*`` for anything, and the epoch (from 0) from which on they train; None: never. The
                first name that fits counts. It is plain data, so it may stand in the program's config.

        Returns:
            The first training epoch of each tensor, by name.

        Raises:
            UserError: For a schedule that leaves tensors out, names no tensor, or begins with nothing; and for a
                mechanism that divides the model.

        Example:
            >>> session.start_from(model, "runs/pretrained", fresh=["head.*"])
            >>> session.unfreeze(model, {"head.*": 0, "layer4.*": 2, "*": 4})
            >>> model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        """
        if self._parts.spec.execution.mechanism != "replicated":
            rule = "unfreezing needs whole tensors on every worker"
            raise UserError(rule, f"mechanism {self._parts.spec.execution.mechanism}", "use --mechanism replicated")
        model_schedule = unfreezing(plain(model), schedule)
        self._unfreezing = (*self._unfreezing, model_schedule)
        return dict(model_schedule.from_epoch)

    def prepare(self, *models_optimizers_schedulers: Any, plan: Plans | None = None) -> tuple[Any, ...]:
        """Attach mechanism, precision and checkpoints to models and optimizers. Use the returned objects from here on.

        It moves the model to ``session.device`` and gives every worker the initial state of rank 0. Schedulers may be
        among the arguments. Others of these optimizers, made before ``session.epochs``, are found and treated alike:
        they step where a step ends, ``ReduceLROnPlateau`` with the mean over workers, and are saved.

        Args:
            models_optimizers_schedulers: The model, its optimizer and any schedulers; or several models and optimizers,
                as a GAN has them (``docs/programs.md``). In any order.
            plan: The layers that the mechanism ``tensor`` divides, or a ``Pipeline`` with the places where ``pipeline``
                cuts the model (``docs/meshes.md``); None: elastune finds them.

        Returns:
            The same objects, in the same order.

        Raises:
            UserError: For objects that cannot be trained in this way, and for a second call.

        Example:
            >>> model, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters()))
            >>> gen, disc, opt_gen, opt_disc = session.prepare(gen, disc, opt_gen, opt_disc)
        """
        if self.trained is not None:
            raise UserError(
                "session.prepare must be called once", "a second call", "give all models and optimizers to one call"
            )
        prepared = Prepared.of(models_optimizers_schedulers)
        self._check_trainable(prepared)
        note_plan(prepared.model, plan)
        prepared.model.to(self.device)
        self._parts.weight_sources.start_from_option(prepared.model)
        self.state.spread(prepared.model, prepared.optimizer)
        trained = self.state.trained = self._build_sync(prepared)
        if self._parts.spec.execution.precision == "bf16":
            self._autocasts = [Autocast(each, self.device) for each in prepared.models]
        replacements = {id(prepared.model): trained.replica.model, id(prepared.optimizer): trained.replica.optimizer}
        self._held = trained.held() if self._resume_or_begin() else None
        self._gate(prepared.schedulers)
        self._models = prepared.models
        returned = tuple(replacements.get(id(each), each) for each in models_optimizers_schedulers)
        both = (*models_optimizers_schedulers, *returned)
        self._optimizers = [*{id(each): each for each in both if isinstance(each, torch.optim.Optimizer)}.values()]
        return returned

    def backward(
        self,
        loss: torch.Tensor,
        model: nn.Module | None = None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        count: float | torch.Tensor | None = None,
        more: bool = False,
    ) -> None:
        """Run the backward pass of ``loss``, the MEAN over the batch that ``batches`` just gave.

        After the last call of a step, the gradients are those of the mean over the global batch, equal on all workers.
        Before that call no parameter has a gradient.

        Args:
            loss: The loss over the batch; a scalar.
            model: Of several prepared models, the only one that gets gradients; others may be a part of the loss.
            reduction: "sum" for a loss that is a sum over its samples: the gradients are those of the sum over the
                global batch.
            count: The number of elements that the loss is a mean over, where it is not the number of samples: tokens
                that are not padding, pixels under a mask. The gradients are those of the mean over all elements of
                the global batch. Give it in each call, also where it is 0.
            more: Another loss of the same batch follows, in a call of its own; their gradients add up.

        Raises:
            UserError: For a count that is no number, and where the run's mechanism or compression cannot divide by it.
            Diverged: Where the loss is not finite, or has exploded.

        Example:
            >>> for tokens, targets in session.batches(texts, batch_size=32):
            ...     loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
            ...     session.backward(loss, count=(targets != -100).sum())
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        kind = loss_kind(reduction, count)
        scaler = self._parts.tracked.scaler
        self.state.scale = None if scaler is None or not is_scaled(loss) else scaler.get_scale
        self._parts.loop.backward(loss, self._trainable_of(model), more, kind)
        for schedule in self._unfreezing:
            schedule.hide(self.epoch)

    def backward_global(
        self,
        loss: Callable[..., torch.Tensor],
        encode: Callable[..., torch.Tensor | Iterable[torch.Tensor]],
        *inputs: Any,
    ) -> None:
        """Run the backward pass of a loss that compares samples of the whole global batch with each other.

        It takes the place of ``backward``: contrastive losses, in-batch negatives, triplets. With several slots each
        forward pass runs twice: for the features, gathered over slots and workers, and with a graph for gradients.

        Args:
            loss: Gets the features of the global batch, in the order of its samples, and returns the loss; a scalar.
                It may use parameters by itself, such as a temperature.
            encode: Computes features of a batch: a tensor, or several, each with a row for each sample. What needs no
                gradient, such as labels, may be among them.
            inputs: The arguments of ``encode``: what ``batches`` gave.

        Raises:
            UserError: For features without a row for each sample, mechanisms other than ``replicated`` and ``zero``,
                and sync strategies whose learners differ.
            Diverged: Where the loss is not finite, or has exploded.

        Example:
            >>> def similarity(images, texts):
            ...     logits = images @ texts.T / 0.07
            ...     return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))
            >>> for images, texts in session.batches(pairs, batch_size=512):
            ...     session.backward_global(similarity, model, images, texts)
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        self._parts.tracked.refuse_scaler()
        self.state.scale = None
        self._trainable_of(None)
        self._parts.loop.backward_global(loss, encode, inputs)
        for schedule in self._unfreezing:
            schedule.hide(self.epoch)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the step's gradient so that its norm, over all parameters of the model, is at most ``max_norm``.

        It does what torch's ``clip_grad_norm_`` does (norm 2), but for every mechanism: torch's function finds no norm
        of gradients that lie in pieces on several workers. The number of workers and the mesh do not show in the norm.

        Args:
            max_norm: The largest norm that stays as it is.

        Returns:
            The norm before scaling; 0 where this batch did not complete a step, so that nothing was done.

        Raises:
            UserError: For a bound that is not positive.

        Example:
            >>> session.backward(loss)
            >>> session.clip_grad_norm_(1.0)
            >>> optimizer.step()
        """
        if not max_norm > 0:
            raise UserError("the norm of a gradient is bounded by a positive number", max_norm, "such as 1.0")
        return self.state.prepared.replica.clip(float(max_norm))

    def track(self, name: str, obj: T) -> T:
        """Make ``obj`` a part of the run's state.

        The state is saved in checkpoints, sent to workers that join, and taken back where a step is taken back. Call
        this after ``session.prepare``, in the same way on every worker. Change the object in the same way on all
        workers, between steps (``if session.ends_step:``); an ``AveragedModel`` does so by itself.

        Args:
            name: Its name in checkpoints.
            obj: Anything with ``state_dict`` and ``load_state_dict`` of tensors, numbers and text, or a dict of these.

        Returns:
            ``obj``.

        Raises:
            UserError: For a name that is taken, an object without state, a mechanism that leaves each worker a part of
                the model, and sync strategies whose learners differ.

        Example:
            >>> ema = session.track("ema", AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)))
            >>> best = session.track("best", {"loss": float("inf")})
        """
        trained = self.trained
        if trained is None:
            raise UserError("session.track comes behind session.prepare", "no model yet", "call session.prepare first")
        if trained.in_shares:
            rule, fix = "what is tracked is equal on all workers", "use --mechanism replicated"
            raise UserError(rule, f"{name} where workers hold a part of the state each", fix)
        self._parts.tracked.add(name, obj, lambda: self.ends_step)
        self._forbid_strategies(self._parts.tracked.refuse)
        return obj

    @property
    def loss(self) -> float:
        """The loss over the global batch of the newest step, equal on all workers: the mean, or the sum.

        Use it to steer the training: it stays right when a worker is lost, while a sum that the program keeps itself is
        lost with its worker. It is NaN before the first step. Reading it costs a wait for the device; so on a GPU it is
        also NaN until the step after the first time it is read.
        """
        self._parts.progress.loss_wanted = True
        return math.nan if self._parts.progress.loss is None else self._parts.progress.loss

    @property
    def trained(self) -> TrainingState | None:
        """The state that ``prepare`` made of models, optimizers and schedulers; None before it."""
        return self.state.trained

    @property
    def signals(self) -> dict[str, Signal]:
        """The newest signals of the run's monitors, by name."""
        return self._parts.adapter.monitoring.signals

    # -- control -------------------------------------------------------------------------------------------------------

    def resize(self, workers: int) -> None:
        """Ask for another number of workers, from a later step boundary on.

        New workers first warm up while training goes on. One worker may ask, or all.

        Args:
            workers: The wanted number; it is cut to the bounds of ``--workers LOW:HIGH``. Where that leaves nothing to
                change, the journal and the terminal say so once.

        Raises:
            UserError: Where another launcher started the workers.
        """
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise UserError("a run needs a whole number of workers, at least 1", workers, "session.resize(2)")
        self._parts.workers.resize(workers, "session.resize")
        self._parts.adapter.note_resize(workers, self.trained)

    def reshape(self, mesh: str | Mesh) -> None:
        """Ask for another mesh, and for as many workers as it has, from a later step boundary on.

        The workers' parts of the model then move between them; in ``exact`` mode no result changes. One worker may ask,
        or all.

        Args:
            mesh: Workers along each axis, such as "data=1,tensor=2"; axes that are left out have one.

        Raises:
            UserError: For a mesh that the run's mechanism or its ``--workers LOW:HIGH`` do not allow, and where another
                launcher started the workers.

        Example:
            >>> if session.ends_step and session.step == 100:
            ...     session.reshape("data=2,shard=2")
        """
        wanted, spec = Mesh.parse(mesh) if isinstance(mesh, str) else mesh, self._parts.spec
        meshes_of(spec.execution).widened(self.state.layers).refuse(wanted)
        low, high = min(spec.elastic.low, spec.execution.workers), spec.most_workers
        if not low <= wanted.workers <= high:
            fix = "ask for a mesh of as many, or begin the run with --workers LOW:HIGH"
            raise UserError(f"this run has from {low} to {high} workers", f"{wanted}: {wanted.workers}", fix)
        self._parts.workers.reshape(wanted, "session.reshape")

    def change(self, *, batch_size: int | None = None, lr: float | None = None) -> None:
        """Ask for another global batch size or learning rate on every worker.

        Every worker must ask for the same between the same two steps. Workers vote on it in the next step's reduction
        and change together after that step; schedulers continue from the new learning rate. The journal keeps the
        outcome, as of a policy's decision: applied; refused, where it is impossible (a batch longer than an epoch); or
        disagreed, where nothing changed.

        Args:
            batch_size: Samples in the global batch; None leaves it as it is.
            lr: The learning rate of every parameter group; None leaves it as it is.

        Raises:
            UserError: For an impossible batch size or learning rate.

        Example:
            >>> if session.ends_step and session.step == 1000:
            ...     session.change(batch_size=512, lr=0.4)
        """
        self._parts.adapter.wish(wished(batch_size, lr))

    def set_sync(self, strategy: str) -> None:
        """Ask for another sync strategy on every worker, from the next step boundary on.

        Every worker must ask for the same between the same two steps. They vote on it as on ``change``, and the journal
        keeps the outcome. Many learners become one when their round ends; one learner becomes many when the next round
        begins.

        Args:
            strategy: A text as for ``--sync``.

        Raises:
            UserError: For a text that is no strategy, and for a strategy that this run cannot have: more workers than
                learners, slots that learners do not divide, or another mechanism than ``replicated``.

        Example:
            >>> if session.ends_step and session.step == 1000:
            ...     session.set_sync("local:learners=8,every=16")
        """
        plan = SyncPlan.parse(strategy)
        if self.state.trained is not None:
            self.state.trained.active_sync.check(plan)
        self._parts.adapter.wish(Decision(sync=str(plan)))

    def set_topology(self, topology: str) -> None:
        """Ask for other routes of the workers' sums on every worker, under the rules of ``change``.

        In ``exact`` mode no result changes. The routes change between two steps, on the process groups that exist.

        Args:
            topology: A text as for ``--topology``: "tree", "ring:chunk_kib=256", "parents=[0,0,1,0]".

        Raises:
            UserError: For a text that is no topology.

        Example:
            >>> if session.ends_step and session.step == 100:
            ...     session.set_topology("binary_tree")
        """
        self._parts.adapter.wish(Decision(topology=topology_for_vote(Topology.parse(topology))))

    def set_tree(self, parents: Sequence[int]) -> None:
        """Ask for the tree in which rank r sends its sums to ``parents[r]``; the root names itself.

        After a resize that the tree does not fit, sums take the backend's own routes. Errors are those of
        ``set_topology``.
        """
        self._parts.adapter.wish(Decision(topology=topology_for_vote(Topology.of_parents(parents))))

    def allreduce(self, name: str, tensor: torch.Tensor) -> CollectiveHandle[torch.Tensor]:
        """Start to add up ``tensor`` over all workers. It is copied, and travels while training goes on.

        Args:
            name: The name by which workers match their calls.
            tensor: This worker's part; its shape and type are the same on all workers.

        Returns:
            A handle. ``handle.wait()`` gives the sum (on the CPU) and the numbers of the workers that took part.

        Raises:
            UserError: For a tensor that cannot be sent, and for a call inside of a step.

        Example:
            >>> if session.ends_step:
            ...     handle = session.allreduce("hits", hits)
            ...     evaluate_something_else()
            ...     total = handle.wait().value
        """
        return CollectiveHandle(
            self._parts.collectives, self._start_collective("allreduce", name, tensor), lambda tensors: tensors[0]
        )

    def broadcast(self, name: str, tensor: torch.Tensor, root: int = 0) -> CollectiveHandle[torch.Tensor]:
        """Start to send ``tensor`` from the worker of rank ``root`` to all workers.

        Args:
            name: The name by which workers match their calls.
            tensor: The tensor to send; only the root's counts.
            root: The sender's rank among the present workers.

        Returns:
            A handle. ``handle.wait()`` gives the root's tensor, on the CPU.

        Raises:
            UserError: As ``allreduce``, and for a rank that no worker has.

        Example:
            >>> handle = session.broadcast("thresholds", torch.rand(10), root=0)
        """
        return CollectiveHandle(
            self._parts.collectives, self._start_collective("broadcast", name, tensor, root), lambda tensors: tensors[0]
        )

    def gather(self, name: str, tensor: torch.Tensor) -> CollectiveHandle[list[torch.Tensor]]:
        """Start to send every worker's ``tensor`` to all workers; shapes and types may differ.

        Args:
            name: The name by which workers match their calls.
            tensor: This worker's tensor.

        Returns:
            A handle. ``handle.wait()`` gives the tensors, on the CPU, and the numbers of their workers.

        Raises:
            UserError: As ``allreduce``.

        Example:
            >>> handle = session.gather("hardest", losses.topk(3).values)
        """
        return CollectiveHandle(self._parts.collectives, self._start_collective("gather", name, tensor), list)

    def stop(self, why: str) -> None:
        """End training here, as if all epochs were done.

        The loops over ``session.epochs`` and ``session.batches`` end, and the code after them still runs. A resumed run
        does not train on. Every worker must call this, between steps, for a reason that is equal on all workers: a
        reported metric, a mean.

        Args:
            why: One line for the journal and the report.

        Raises:
            UserError: Inside of a step, and where other workers do something else instead.

        Example:
            >>> session.report(loss=loss)
            >>> if session.metrics["loss"] > best["loss"] and session.epoch > 5:
            ...     session.stop("the validation loss rises")
        """
        if not isinstance(why, str) or not why.strip():
            raise UserError("session.stop says why", repr(why)[:80], 'session.stop("the loss rises")')
        why = " ".join(why.split())[:LONGEST_WHY]
        self._require_between_steps("stop")
        self._meet([], f"stop({why})")
        if self._parts.workers.synchronised:  # else catching up with the run, which has stopped already
            self._parts.progress.stopped, self._parts.progress.stop_why = BY_PROGRAM, why

    @property
    def seconds(self) -> float:
        """Training time so far, in seconds; it includes earlier parts of a resumed run."""
        return self._parts.progress.times.seconds

    # -- results -------------------------------------------------------------------------------------------------------

    def report(self, *, evaluated_on: int | Mapping[str, int] | None = None, **metrics: Number) -> None:
        """Record metrics, each averaged over workers. A search optimises the last value of each.

        Every worker must call this, between steps. No search reads a name that begins with ``test_``: a held-out
        figure.

        Args:
            evaluated_on: Number of samples, of all workers, that the metrics were measured on; or one number for each
                metric name. Without it, confidence intervals cannot count the error of the test set.

        Raises:
            Diverged: Where a metric is not finite, or one that a study minimises has exploded.
        """
        self._require_between_steps("report")
        reserved = sorted(set(metrics) & set(MEASURED))
        if reserved or not metrics:
            raise UserError("report needs metrics other than seconds and cost", reserved or "none", "rename them")
        counts = sample_counts(evaluated_on, metrics)
        names = sorted(metrics)  # on every worker the same order
        values = [floats_of(metrics[name])[0] for name in names]
        rows = self._meet(values, f"report({', '.join(names)})")
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        self._record_report({name: exact_mean(columns[name]) for name in metrics}, counts)

    @property
    def metrics(self) -> dict[str, float]:
        """The newest value of every reported metric, by name."""
        return self._parts.progress.metrics

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint now. Every worker must call this, between steps; a reduced step counts as completed.

        Without ``wait`` a thread writes it while training goes on; the next one, and the end of the run, wait for it.
        """
        self._require_between_steps("save")
        self._meet([], "save")
        self._parts.loop.commit()
        self._parts.loop.save(wait=wait)

    def save_best(self, metric: str, direction: Literal["min", "max"] = "max") -> bool:
        """Keep a checkpoint of the best model so far, by the newest reported value of ``metric``.

        The checkpoint stays in the run's folder until a better one replaces it; ``elastune export RUN/best/METRIC`` and
        ``--start-from RUN/best/METRIC`` read it. Every worker must call this, between steps, after ``session.report``.

        Args:
            metric: A name that was reported.
            direction: Which values are better.

        Returns:
            Whether the model is the best so far and was kept. Where the disk has no room for it, the earlier best
            stays.

        Raises:
            UserError: For a metric that was not reported, and where hosts do not share the run's folder.

        Example:
            >>> session.report(accuracy=right / count)
            >>> session.save_best("accuracy")
        """
        self._require_between_steps("save_best")
        self._require_shared_folder("save_best", "the best checkpoint lies in a folder that all share")
        if not FILE_NAME.fullmatch(metric):
            rule, fix = "a metric that names a folder has letters, digits, _ and -", "report it under such a name"
            raise UserError(rule, repr(metric)[:60], fix)
        if metric not in self.metrics or direction not in ("min", "max"):
            rule, fix = "the best is by a reported metric, min or max", 'session.save_best("accuracy", "max")'
            raise UserError(rule, f"{metric}, {direction}; reported: {', '.join(sorted(self.metrics)) or 'none'}", fix)
        self._meet([], f"save_best({metric})")
        progress, loop = self._parts.progress, self._parts.loop
        if not self._parts.workers.synchronised or not progress.is_best(metric, direction):
            return False
        value, earlier = progress.metrics[metric], progress.best.get(metric)
        loop.commit()
        progress.best[metric] = value
        loop.save()
        if not self.state.keep_best(metric):  # the disk has no room; the journal has a record of it
            progress.forget_best(metric, earlier)
            return False
        return True

    @property
    def progress(self) -> Progress:
        """How far training has come, for the code that ends the run."""
        return self._parts.progress

    @property
    def context(self) -> RunContext:
        """The facts that a result depends on and the run cannot choose: data and model, as seen so far, and device."""
        trained = self.trained
        return run_context(self.device, self.state.data.context(), 0 if trained is None else trained.parameters)

    @property
    def stopped(self) -> str:
        """Why training ended: "complete", "max_steps", "until_epoch", "requested", "policy" or "program"."""
        return self._parts.progress.stopped

    def finish(self) -> None:
        """End the session: the training function has returned."""
        if self._parts.transaction.left_between_slots:
            self._require_whole_step()
        if self.trained is not None:  # it may have left an evaluation early
            self.trained.replica.stand_in()
        self._parts.loop.commit()
        self._parts.loop.finish()
        self._parts.adapter.after_train(self.trained)

    def flush(self) -> None:
        """Send the part of the sample record that was not sent yet."""
        self._parts.log.flush()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _require_whole_step(self) -> None:
        """Workers take different numbers of batches a step: they can act together only between steps.

        An evaluation that the program has left early, here or on another worker, ends here on all of them.
        """
        if self._parts.transaction.phase is Phase.LEFT:
            fix = "put 'if session.ends_step:' before the break, or use --max-steps"
            line = self._parts.transaction.left_at
            value = f"left inside of a step at {line}" if line else "left inside of a step"
            raise UserError("a batch loop may be left between steps only", value, fix)
        if self.trained is not None:
            self.trained.replica.stand_in()

    def _require_step_ended(self, method: str, page: str | None = None) -> None:
        if self._parts.transaction.more_to_come and self._parts.workers.synchronised:
            fix = "put 'if session.ends_step:' before it, or move it after the loop"
            raise UserError(f"session.{method} belongs between steps", "a call inside of a step", fix, page)

    def _require_between_steps(self, method: str) -> None:
        """Let workers meet, where the strategy has them meet after a step. Raises ``UserError`` inside of a step."""
        self._require_whole_step()
        self._require_step_ended(method)
        trained, loop = self.trained, self._parts.loop
        applies = self._parts.transaction.phase in (Phase.REDUCED, Phase.APART)
        if trained is not None and trained.sync.awaits_step and applies:
            why = "learners meet" if trained.sync.meets_after_step else "workers hold a part of the state each"
            rule = f"where {why}, session.{method} comes after optimizer.step()"
            raise UserError(rule, "a call between session.backward and optimizer.step()", "move it behind that")
        loop.meet(repeatable=loop.in_pass)

    def _require_shared_folder(self, method: str, rule: str) -> None:
        if self._parts.spec.spool is not None:
            page = page_of(f"{__name__}.Session.{method}")
            raise UserError(rule, "a folder of each host's own", "use a cluster without folder=local", page)

    def _meet(self, values: list[float], call: str) -> list[list[float]]:
        """Gather ``values`` of all workers, which all call ``session.CALL``."""
        return self._parts.evaluations.meet(values, f"session.{call}")

    def _evaluation_pass(self, dataset: Any, batch_size: int, loading: LoaderOptions) -> Generator[Any, None, None]:
        if self.trained is not None and self.trained.sync.meets_after_step:
            self._require_between_steps("batches(train=False)")
        yield from self._parts.evaluations.batches(dataset, batch_size, loading)

    def _check_trainable(self, prepared: Prepared) -> None:
        """Raise ``UserError`` where this run cannot train what the program gave to ``prepare``."""
        spec, workers = self._parts.spec, self._parts.workers
        by_shapes_alone(spec.execution.mode)
        prepared.check(spec.execution.mechanism)
        most = max(spec.most_workers, workers.group.size)
        self._parts.transaction.reevaluates_loss = reevaluates_loss(prepared.optimizer, spec.execution, most)

    def _build_sync(self, prepared: Prepared) -> TrainingState:
        """Lay model and optimizer out on the workers, under the run's mechanism and sync strategies."""
        spec, workers = self._parts.spec, self._parts.workers
        self._parts.adapter.routing.lay(workers.comms)
        control = self._parts.loop.control_length
        with self.model_context():  # a division makes parameters of its own
            layout = prepared.model, prepared.optimizer, spec.execution, workers.comms, spec.sync
            sync = prepare_sync(*layout, elastic=workers.elastic, control=control, seed=spec.seed)
        self.state.watch(sync.replica)
        active_sync = sync_in_use(sync, spec, control, elastic=workers.elastic)
        trained = TrainingState(active_sync, prepared.schedulers, tuple(learning_rates(prepared.optimizer)))
        for _, later in spec.sync_schedule.changes:
            active_sync.check(later)
        return trained

    def _resume_or_begin(self) -> bool:
        """Take up the state of a snapshot or checkpoint. Return whether there was one."""
        snapshot = self._parts.snapshot
        if snapshot is not None:
            self.state.rewind(snapshot)
            return True
        return self._parts.workers.synchronised and self.state.begin()

    def _refresh_compiled(self) -> None:
        """Take note of models, or parts of them, that the program has compiled since the last call."""
        by_shapes_alone(self._parts.spec.execution.mode)
        for model in self._models:
            plain(model)
        for autocast in self._autocasts:
            autocast.register()

    def _trainable_of(self, model: nn.Module | None) -> list[nn.Parameter] | None:
        """The parameters of ``model``, one of the prepared models; None for all parameters."""
        if self.trained is not None:
            self.trained.flags.check()
        if model is None:
            return None
        model = plain(model)
        if not any(model is each for each in self._models):
            rule, fix = "a backward pass is for a model that was prepared", "leave model out for all of them"
            raise UserError(rule, type(model).__name__, fix)
        return [p for p in model.parameters() if p.requires_grad]

    def _gate(self, schedulers: Iterable[Any]) -> None:
        for scheduler in schedulers:
            gate(scheduler, lambda: self._parts.transaction.ends_local_step, self.mean)

    def _forbid_strategies(self, rule: Callable[[SyncPlan], object]) -> None:
        """Allow no strategy for which ``rule`` raises ``UserError``: neither now, nor by schedule, nor later."""
        active_sync = self.state.prepared.active_sync
        active_sync.forbid(rule)
        for step, plan in self._parts.spec.sync_schedule.changes:
            if step > active_sync.scheduled:
                rule(plan)

    def _start_collective(self, kind: Kind, name: str, tensor: torch.Tensor, root: int = 0) -> Call:
        self._require_step_ended(kind, page_of(f"{__name__}.Session._start_collective"))
        return self._parts.collectives.start(kind, name, tensor, root)

    def _record_report(self, averages: dict[str, float], counts: dict[str, int]) -> None:
        """Keep reported metrics, send them to the journal, and judge whether training diverges."""
        parts, progress, workers = self._parts, self._parts.progress, self._parts.workers
        position = progress.position
        progress.evaluated_on |= counts
        if workers.synchronised:
            progress.metrics = {**progress.metrics, **averages}
            if workers.rank == 0 or workers.elastic:  # of several equal records one is kept
                so_far = position.epoch, position.step, position.samples, self.seconds
                parts.send(Reported(*so_far, averages, nth=progress.reports, epochs=self._planned))
            progress.reports += 1
        else:  # catching up with the run: the values reported there stand
            progress.metrics = {**averages, **progress.metrics}
        if not parts.adapter.survives_divergence:
            parts.divergence.metrics(averages, position.step, again=not workers.synchronised)
