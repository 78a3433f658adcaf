"""A strategy for Lightning's ``Trainer``: name the strategy, keep modules, callbacks and loops."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from elastune.adapters.epochs import DividedEvaluation, Loader, rebuilt
from elastune.core.errors import UserError
from elastune.train.data.source import Batches
from elastune.train.program.load import at_end, current_session, end_program
from elastune.train.session import Session


class TrainerProgress:
    """The position of a trainer and the states of its callbacks, as a part of the run's state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        callbacks = {callback.state_key: callback.state_dict() for callback in self._trainer.callbacks}
        loops = json.dumps(self._trainer.fit_loop.state_dict())
        return {"loops": loops, "callbacks": {name: state for name, state in callbacks.items() if state}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(json.loads(saved["loops"]))
        for callback in self._trainer.callbacks:
            if (state := saved["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(dict(state))


class EpochEndCallback(Callback):
    """Notes the end of a pass, and reports what was logged in it before a test after the training clears it."""

    def __init__(self, session: Session, end_pass: Callable[[], None], evaluation: DividedEvaluation) -> None:
        self._session = session
        self._end_pass = end_pass
        self._evaluation = evaluation
        self._whole = False

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if self._evaluation.on:
            reduce_logs(trainer, self._evaluation)

    on_test_batch_end = on_validation_batch_end

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.is_last_batch:
            self._end_pass()
            self._whole = True

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.report(trainer)

    def on_test_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._whole = True
        self.report(trainer)

    def report(self, trainer: Trainer) -> None:
        """Report once what was logged in an epoch and after it; of an epoch that was left early, nothing."""
        values: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self._whole and values:
            self._session.report(**values)
        self._whole = False


def reduce_logs(trainer: Trainer, evaluation: DividedEvaluation) -> None:
    """Have what a module has logged in a divided evaluation reduced over all workers at its end.

    Raises:
        UserError: For a value that is reduced in each batch: workers may have different numbers of batches.
    """
    for logged in (trainer._results or {}).values():
        meta = logged.meta
        if meta.on_step:
            rule = "a divided evaluation logs values of the whole pass"
            raise UserError(rule, f"{meta.name} with on_step=True", "leave on_step out, or divide_evaluation")
        if logged.is_tensor:  # a mean is the sum of weighted values over that of their weights
            op = "sum" if meta.is_mean_reduction else meta.reduce_fx.__name__
            meta.sync._fn = partial(evaluation.reduce, op=op)  # Lightning compares the other attributes


def most_epochs(trainer: Trainer) -> int:
    """Return the number of epochs after which the trainer ends; a million where something else decides it."""
    most = trainer.max_epochs
    return 1_000_000 if most is None or most < 0 else int(most)


class FullStepBatches:
    """Makes training batches as large as a step: what ``trainer`` would accumulate comes as one batch."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._batches = 1
        if trainer.state.fn == TrainerFn.FITTING:
            self._batches, trainer.accumulate_grad_batches = int(trainer.accumulate_grad_batches), 1

    def __call__(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return ``loader`` with larger batches, if it is for training.

        Raises:
            UserError: Where the loader has no batch size.
        """
        if self._batches == 1 or not self._trainer.training:
            return loader
        size = getattr(loader, "batch_size", None)
        if size is None:
            rule, fix = "batches of one size are accumulated", "let the batch_sampler give the batches of a step"
            raise UserError(rule, "a DataLoader without batch_size", fix)
        return rebuilt(loader, batch_size=size * self._batches)


def moved(strategy: Any, part: Any) -> Any:
    """Return a part of a batch, prepared as Lightning prepares the batches that it fetches itself."""
    part = strategy.precision_plugin.convert_input(part)
    part = strategy.lightning_module.on_before_batch_transfer(part, 0)
    return strategy.batch_to_device(part, strategy.root_device)


def refuse(trainer: Trainer) -> None:
    """Raise ``UserError`` for options of the trainer that a run decides, or that would act between parts of a batch."""
    options = {
        "a GradientAccumulationScheduler": any(
            isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks
        ),
        "no optimizer": not any(each.param_groups for each in trainer.optimizers),
        "limit_train_batches": trainer.limit_train_batches != 1.0 or isinstance(trainer.limit_train_batches, int),
    }
    if not trainer.lightning_module.automatic_optimization:
        rule = "Lightning counts a step in each optimizer.step() of a manual optimization, also in a part of a batch"
        raise UserError(rule, "automatic_optimization = False", "write that loop with a session, where it has turns")
    if refused := ", ".join(name for name, is_set in options.items() if is_set):
        fix = "use one batch_size (it is that of all workers), one optimizer, all batches"
        raise UserError("Lightning's Trainer takes one step of one optimizer a batch here", refused, fix)


class ElastuneStrategy(SingleDeviceStrategy):
    """A strategy for Lightning's ``Trainer`` that trains on a run's workers (docs/programs.md).

    Lightning takes one step for each batch of its loader. Within that step, a worker runs its parts of the batch one
    after another.

    Args:
        divide_evaluation: Whether each worker validates and tests on its own batches. What the module logs is reduced
            over all workers, torchmetrics too; what its hooks add up themselves they reduce, as under DDP.

    Raises:
        UserError: Outside of a run.

    Example:
        >>> trainer = Trainer(max_epochs=10, strategy=ElastuneStrategy(), devices=1)
    """

    optimizers: Any
    cluster_environment = LightningEnvironment()  # whatever started the worker: Slurm's variables are for elastune

    def __init__(self, divide_evaluation: bool = False) -> None:
        self.session = current_session()
        self._divides, self._evaluation = divide_evaluation, DividedEvaluation(self.session)
        super().__init__(self.session.device)
        self._epochs: Iterator[int] = iter(())
        self._pass: Iterator[Any] = iter(())
        self._part: tuple[Any] | None = None  # of the batch that Lightning is at, where it is not the first
        self._in_epoch = self._trains = False

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker acts for all: writes files, prints."""
        rank_zero_only.rank = 0 if self.session.leader else 1
        return self.session.leader

    def setup(self, trainer: Trainer) -> None:
        """Do what ``session.prepare`` does, and go on to where the run is."""
        self._trainer, self._whole = trainer, FullStepBatches(trainer)  # optimizers may ask for the number of steps
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        refuse(trainer)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        _, *rest = self.session.prepare(self.lightning_module, *self.optimizers, *schedulers)
        self.optimizers = rest[: len(self.optimizers)]
        self._ends = EpochEndCallback(self.session, self.end_pass, self._evaluation)
        self.session.track("lightning", TrainerProgress(trainer))
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:  # of 16-mixed
            self.session.track("lightning scaler", scaler)
        trainer.callbacks.append(self._ends)
        self._epochs = self.session.epochs(most_epochs(trainer))
        self._in_epoch = next(self._epochs, None) is not None  # joins the others, who may be further
        at_end(self.end)

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        """Return a loader whose passes train where the trainer does, and evaluate otherwise."""
        return Loader(self._batches, self._whole(dataloader))

    def _batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        trainer = self._trainer
        self._evaluation.on = False
        if not trainer.training:
            evaluates = trainer.validating or trainer.testing
            limits = trainer.limit_val_batches if trainer.validating else trainer.limit_test_batches
            if self._divides and evaluates and isinstance(limits, float) and limits == 1.0:
                self._reduce_metrics()
                yield from self._evaluation.batches(loader)
            else:
                yield from loader
            return
        if self._trains:
            self._ends.report(self._trainer)
            self._in_epoch = next(self._epochs, None) is not None
        if not self._in_epoch:
            end_program()
        self._trains, self._pass = True, self.session.batches(loader)
        yield from self._pass
        if self.session.stopped != "complete":
            end_program()

    def _reduce_metrics(self) -> None:
        """Have the module's torchmetrics reduced over all workers after a divided evaluation."""
        for metric in self.lightning_module.modules():
            if hasattr(metric, "dist_sync_fn") and hasattr(metric, "distributed_available_fn"):
                metric.dist_sync_fn = lambda tensor, group=None: list(self._evaluation.gather(tensor))
                metric.distributed_available_fn = lambda: self._evaluation.on

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean", *args: Any, **options: Any) -> Any:
        """Reduce over all workers after a divided evaluation; else return ``tensor``."""
        return self._evaluation.reduce(tensor, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Stack the tensors of all workers after a divided evaluation; else return ``tensor``."""
        return self._evaluation.gather(tensor)

    def training_step(self, batch: Any, *rest: Any) -> Any:
        """Call the module's ``training_step`` with the next part of ``batch``."""
        return super().training_step(batch if self._part is None else self._part[0], *rest)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **options: Any) -> Any:
        """Do what ``session.backward`` does, and call the hooks around it."""
        plugin, module = self.precision_plugin, self.lightning_module
        self.session.backward(plugin.pre_backward(closure_loss, module))
        return plugin.post_backward(closure_loss, module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        """Run ``closure`` for each part of the batch, again where a worker was lost; then ``optimizer`` steps once."""

        def whole() -> Any:
            result = closure()
            while not self.session.ends_step:
                self._part = (moved(self, next(self._pass)),)
                result = closure()
            self._part = None
            return result

        return super().optimizer_step(optimizer, whole, model, **options)

    def end_pass(self) -> None:
        """End the pass: Lightning asks for no more batches than there are, and the step of the last one must count."""
        for _ in self._pass:
            raise RuntimeError("an epoch goes on behind the last batch of its loader")

    def end(self) -> None:
        """End the newest epoch: write its report and its checkpoint, and stop if the trainer should."""
        if isinstance(self._pass, Batches):  # a pass has begun; it may have been left
            self._pass.close()
        self._ends.report(self._trainer)
        if self._trainer.should_stop and self.session.stopped == "complete":
            self.session.stop("a callback of the trainer")
        next(self._epochs, None)

    def teardown(self) -> None:
        """Close the checkpoint files. The model stays where it is, because the end of the run looks at it."""
        self.checkpoint_io.teardown()
