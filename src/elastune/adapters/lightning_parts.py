"""What Lightning's ``Trainer`` has besides steps: its position, callbacks' states and logs, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from elastune.adapters.loaders import rebuilt
from elastune.core.errors import UserError
from elastune.train.session import Session


class TrainerPlace:
    """The position of a trainer and the states of its callbacks, as a part of the run's state."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        callbacks = {each.state_key: each.state_dict() for each in self._trainer.callbacks}
        loops = json.dumps(self._trainer.fit_loop.state_dict())
        return {"loops": loops, "callbacks": {name: state for name, state in callbacks.items() if state}}

    def load_state_dict(self, held: Mapping[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(json.loads(held["loops"]))
        for each in self._trainer.callbacks:
            if (state := held["callbacks"].get(each.state_key)) is not None:
                each.load_state_dict(dict(state))


class PassEnds(Callback):
    """Notes the end of a pass, and reports what was logged in it before a test after the training clears it."""

    def __init__(self, session: Session, end_pass: Callable[[], None]) -> None:
        self._session = session
        self._end_pass = end_pass
        self._whole = False

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *given: Any) -> None:
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
        told: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self._whole and told:
            self._session.report(**told)
        self._whole = False


def most_epochs(trainer: Trainer) -> int:
    """Return the number of epochs after which the trainer ends; a million where something else decides it."""
    most = trainer.max_epochs
    return 1_000_000 if most is None or most < 0 else int(most)


class WholeSteps:
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
    """Raise ``UserError`` for what the run does in its own way, or Lightning would do between the parts of a batch."""
    told = {
        "a GradientAccumulationScheduler": any(
            isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks
        ),
        "no optimizer": not any(each.param_groups for each in trainer.optimizers),
        "limit_train_batches": trainer.limit_train_batches != 1.0 or isinstance(trainer.limit_train_batches, int),
    }
    if not trainer.lightning_module.automatic_optimization:
        rule = "Lightning counts a step in each optimizer.step() of a manual optimization, also in a part of a batch"
        raise UserError(rule, "automatic_optimization = False", "write that loop with a session, where it has turns")
    if found := ", ".join(name for name, asked in told.items() if asked):
        fix = "use one batch_size (it is that of all workers), one optimizer, all batches"
        raise UserError("Lightning's Trainer takes one step of one optimizer a batch here", found, fix)
