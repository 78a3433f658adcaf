"""A ``Fabric`` for scripts written for Lightning's Fabric: change the import, keep the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.fabric
import torch
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader

from elastune.adapters.epochs import DividedEvaluation, Loader, Scheduler, SessionEpochs, first_batch
from elastune.core.errors import UserError
from elastune.train.program.load import current_session
from elastune.train.session import Session


class FabricSteps:
    """Gives batches, and checks that an optimizer steps once for each. Of the parts of a batch, the last one counts."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._scaler: Any = None
        self._due = False

    def scale(self, precision: Any) -> None:
        """Scale gradients where ``precision`` does so (16-mixed). Call it after ``session.prepare``."""
        self._scaler = getattr(precision, "scaler", None)
        if self._scaler is not None:
            self._session.track("fabric scaler", self._scaler)

    def of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches`` to train on.

        Raises:
            UserError: Where no optimizer has stepped by the end of a batch, or of a part of one. A script that
                accumulates gradients takes one step for several batches, by counts that differ from worker to worker.
        """
        for batch in batches:
            yield batch
            if self._due:
                fix = "give its DataLoader the batch of a step, which --micro-batch cuts"
                raise UserError("each batch of a loader is a step", "one without optimizer.step()", fix)

    def backward(self, loss: torch.Tensor, module: nn.Module | None) -> None:
        """Do what ``session.backward`` does, with the loss scaled where there is a scaler."""
        self._session.backward(loss if self._scaler is None else self._scaler.scale(loss), module)
        self._due = True

    def stepped(self) -> None:
        """Note that an optimizer has stepped."""
        self._due = False


class RunLogger(Logger):
    """Reports, once in a run, what is logged at the end of a step or between passes."""

    name, version = "elastune", None

    def __init__(self, session: Session, passes: SessionEpochs) -> None:
        self._session = session
        self._passes = passes

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not self._passes.again and self._session.ends_step:
            values: dict[str, Any] = {name: float(value) for name, value in metrics.items()}
            self._session.report(**values)

    def log_hyperparams(self, params: Any, *args: Any, **options: Any) -> None:
        """Do nothing: the run's journal has its settings."""


class FabricStrategy(SingleDeviceStrategy):
    """A strategy for Fabric that trains on a run's workers, while the script sees one process (docs/programs.md).

    Args:
        divide_evaluation: Whether each worker reads its own batches of a pass that evaluates. The script then reduces
            what it adds up with ``fabric.all_reduce``, as it must under other strategies for several processes.

    Raises:
        UserError: Outside of a run.
    """

    cluster_environment = LightningEnvironment()  # whatever started the worker: Slurm's variables are for elastune

    def __init__(self, divide_evaluation: bool = False) -> None:
        self.session = current_session()
        self.passes = SessionEpochs(self.session)
        self._divides, self._evaluation = divide_evaluation, DividedEvaluation(self.session)
        super().__init__(self.session.device)
        self._prepared: nn.Module | None = None
        self._steps = FabricSteps(self.session)

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker now performs the actions that happen once in a run.

        False where a script that starts again in mid-run repeats earlier lines.
        """
        return self.session.leader and not self.passes.again

    @property
    def global_rank(self) -> int:
        """0 on the one worker that writes files and prints, else 1."""
        rank_zero_only.rank = rank = 0 if self.is_global_zero else 1
        return rank

    @global_rank.setter
    def global_rank(self, value: int) -> None:
        """Ignore the value that Fabric sets, which is always 0."""

    local_rank = global_rank

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return ``module``: without an optimizer it is moved to the device, and that is all.

        A model that trains comes with its optimizer.
        """
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Raise ``UserError``: a model and its optimizer are set up in one call."""
        rule, call = "a model and its optimizer are set up in one call", "fabric.setup(model, optimizer)"
        raise UserError(rule, "fabric.setup_optimizers", f"model, optimizer = {call}")

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        """Do what ``session.prepare`` does.

        Raises:
            UserError: For a second call.
        """
        schedulers = [] if scheduler is None else [scheduler]
        module, *rest = self.session.prepare(module, *optimizers, *schedulers)
        self._prepared = module
        self._steps.scale(self.precision)
        return module, rest[: len(optimizers)], Scheduler(self.passes, rest[-1]) if schedulers else None

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        """Return a loader for passes that train or evaluate.

        A pass trains while the model is in ``train()`` and gradients are on; else it evaluates.
        """
        wrapped = Loader(self._batches, dataloader)
        vars(wrapped).update({name: value for name, value in vars(dataloader).items() if name not in vars(wrapped)})
        return wrapped

    def _batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        model = self._prepared
        if model is not None and model.training and torch.is_grad_enabled():
            self._evaluation.on = False
            return self._steps.of(self.passes.train(loader))
        if self.passes.again:
            return first_batch(loader)
        return self._evaluation.batches(loader) if self._divides else iter(loader)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all workers after a divided evaluation; else return ``tensor``."""
        return self._evaluation.reduce(tensor, reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Stack the tensors of all workers after a divided evaluation; else return ``tensor``."""
        return self._evaluation.gather(tensor)

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **options: Any) -> None:
        """Do what ``session.backward`` does; ``tensor`` is the mean over the batch."""
        if args or options:
            raise UserError("session.backward takes a loss, and no options of backward", sorted(options), "leave them")
        self._steps.backward(tensor, module)

    def optimizer_step(self, optimizer: Any, **options: Any) -> Any:
        """Do what Fabric does."""
        result = super().optimizer_step(optimizer, **options)
        self._steps.stepped()  # its closure, if it has one, makes backward passes
        return result

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """Do what ``session.clip_grad_norm_`` does, over all parameters of the model.

        Raises:
            UserError: For another ``norm_type`` than 2.
        """
        if norm_type != 2:
            raise UserError("the norm of gradients that is clipped is 2", norm_type, "leave norm_type out")
        self.precision.unscale_gradients(optimizer)
        return torch.tensor(self.session.clip_grad_norm_(float(max_norm)))

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """Do what Fabric does, with the gradient of a whole step."""
        if self.session.ends_step:
            super().clip_gradients_value(module, optimizer, clip_val)


class Fabric(lightning.fabric.Fabric):
    """``lightning.fabric.Fabric`` on the workers of a run. The run decides workers and devices.

    Args:
        loggers: Further loggers of the script's own.
        divide_evaluation: See ``FabricStrategy``.
        options: Options of Fabric's. ``precision``, ``plugins`` and ``callbacks`` are used; others are ignored.

    Raises:
        UserError: Outside of a run.

    Example:
        >>> fabric = Fabric(precision="bf16-mixed")
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> loader = fabric.setup_dataloaders(loader)
    """

    def __init__(self, *, loggers: Any = None, divide_evaluation: bool = False, **options: Any) -> None:
        run_loggers = loggers if isinstance(loggers, Sequence) else [loggers] * bool(loggers)
        strategy = FabricStrategy(divide_evaluation)
        fabric_options: dict[str, Any] = {
            name: options[name] for name in ("precision", "plugins", "callbacks") if name in options
        }
        fabric_options |= {"accelerator": strategy.root_device.type, "devices": 1}
        super().__init__(
            strategy=strategy, loggers=[RunLogger(strategy.session, strategy.passes), *run_loggers], **fabric_options
        )

    @staticmethod
    def seed_everything(seed: int | None = None, *args: Any, **options: Any) -> int:
        """Do nothing, and return ``seed``: the run's own seed (``--seed``) seeds workers and trials."""
        return seed or 0
