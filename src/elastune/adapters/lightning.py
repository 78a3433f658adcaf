"""A strategy for Lightning's ``Trainer``: name the strategy, keep modules, callbacks and loops."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from elastune.adapters.lightning_parts import PassEnds, TrainerPlace, WholeSteps, most_epochs, moved, refuse
from elastune.adapters.loaders import Loader
from elastune.train.program.current import at_end, current_session, end_program


class ElastuneStrategy(SingleDeviceStrategy):
    """A strategy for Lightning's ``Trainer`` that trains on a run's workers (docs/programs.md).

    Lightning takes one step for each batch of its loader. Within that step, a worker runs its parts of the batch one
    after another.

    Raises:
        UserError: Outside of a run.

    Example:
        >>> trainer = Trainer(max_epochs=10, strategy=ElastuneStrategy(), devices=1)
    """

    optimizers: Any
    cluster_environment = LightningEnvironment()  # whatever started the worker: Slurm's variables are for elastune

    def __init__(self) -> None:
        self.session = current_session()
        super().__init__(self.session.device)
        self._epochs: Iterator[int] = iter(())
        self._pass: Iterator[Any] = iter(())
        self._part: tuple[Any] | None = None  # of the batch that Lightning is at, where it is not the first
        self._begun = self._trains = False

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker acts for all: writes files, prints."""
        rank_zero_only.rank = 0 if self.session.leader else 1
        return self.session.leader

    def setup(self, trainer: Trainer) -> None:
        """Do what ``session.prepare`` does, and go on to where the run is."""
        self._trainer, self._whole = trainer, WholeSteps(trainer)  # optimizers may ask for the number of steps
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        refuse(trainer)
        schedulers = [each.scheduler for each in self.lr_scheduler_configs]
        _, *rest = self.session.prepare(self.lightning_module, *self.optimizers, *schedulers)
        self.optimizers = rest[: len(self.optimizers)]
        self._ends = PassEnds(self.session, self.end_pass)
        self.session.track("lightning", TrainerPlace(trainer))
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:  # of 16-mixed
            self.session.track("lightning scaler", scaler)
        trainer.callbacks.append(self._ends)
        self._epochs = self.session.epochs(most_epochs(trainer))
        self._begun = next(self._epochs, None) is not None  # joins the others, who may be further
        at_end(self.end)

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        """Return a loader whose passes train where the trainer does; in other passes each worker reads all of it."""
        return Loader(self._batches, self._whole(dataloader))

    def _batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if not self._trainer.training:
            yield from loader
            return
        if self._trains:
            self._ends.report(self._trainer)
            self._begun = next(self._epochs, None) is not None
        if not self._begun:
            end_program()
        self._trains, self._pass = True, self.session.batches(loader)
        yield from self._pass
        if self.session.stopped != "complete":
            end_program()

    def training_step(self, batch: Any, *rest: Any) -> Any:
        """Call the module's ``training_step`` with the next part of ``batch``."""
        return super().training_step(batch if self._part is None else self._part[0], *rest)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *given: Any, **options: Any) -> Any:
        """Do what ``session.backward`` does, and call the hooks around it."""
        plugin, module = self.precision_plugin, self.lightning_module
        self.session.backward(plugin.pre_backward(closure_loss, module))
        return plugin.post_backward(closure_loss, module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        """Run ``closure`` for each part of the batch, again where a worker was lost; then ``optimizer`` steps once."""

        def whole() -> Any:
            found = closure()
            while not self.session.ends_step:
                self._part = (moved(self, next(self._pass)),)
                found = closure()
            self._part = None
            return found

        return super().optimizer_step(optimizer, whole, model, **options)

    def end_pass(self) -> None:
        """End the pass: Lightning asks for no more batches than there are, and the step of the last one must count."""
        for _ in self._pass:
            raise RuntimeError("an epoch goes on behind the last batch of its loader")

    def end(self) -> None:
        """End the newest epoch: its report, its checkpoint, its wish to stop."""
        if isinstance(self._pass, Generator):  # a pass has begun; it may have been left
            self._pass.close()
        self._ends.report(self._trainer)
        if self._trainer.should_stop and self.session.stopped == "complete":
            self.session.stop("a callback of the trainer")
        next(self._epochs, None)

    def teardown(self) -> None:
        """Close the checkpoint files. The model stays where it is, because the end of the run looks at it."""
        self.checkpoint_io.teardown()
