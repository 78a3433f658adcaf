"""Lightning's ``Fabric``, for scripts written for it: the import changes, the loop stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.fabric
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader

from elastune.adapters.fabric_logger import RunLogger
from elastune.adapters.fabric_steps import FabricSteps
from elastune.adapters.loaders import Loader
from elastune.adapters.passes import Passes, Scheduler, first_batch
from elastune.core.errors import UserError
from elastune.train.program.current import current_session


class FabricStrategy(SingleDeviceStrategy):
    """A strategy of Fabric's that trains on a run's workers; its script sees one process (docs/programs.md)."""

    cluster_environment = LightningEnvironment()  # whatever started the worker: Slurm's variables are for elastune

    def __init__(self) -> None:
        self.session = current_session()
        self.passes = Passes(self.session)
        super().__init__(self.session.device)
        self._prepared: nn.Module | None = None
        self._steps = FabricSteps(self.session)

    @property
    def is_global_zero(self) -> bool:
        """Whether what is to be done once is to be done here, now: not again, where the script begins in mid-run."""
        return self.session.leader and not self.passes.again

    @property
    def global_rank(self) -> int:
        """0 where files are written and lines are printed; that is one worker."""
        rank_zero_only.rank = found = 0 if self.is_global_zero else 1
        return found

    @global_rank.setter
    def global_rank(self, value: int) -> None:
        """Fabric's own says 0."""

    local_rank = global_rank

    def setup_module(self, module: nn.Module) -> nn.Module:
        """A model that trains comes with its optimizer; another one is moved to the device, and that is all."""
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Raises ``UserError``."""
        rule, call = "a model and its optimizer are set up in one call", "fabric.setup(model, optimizer)"
        raise UserError(rule, "fabric.setup_optimizers", f"model, optimizer = {call}")

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        """As ``session.prepare``. Raises ``UserError`` for a second call."""
        given = [] if scheduler is None else [scheduler]
        module, *rest = self.session.prepare(module, *optimizers, *given)
        self._prepared = module
        self._steps.scale(self.precision)
        return module, rest[: len(optimizers)], Scheduler(self.passes, rest[-1]) if given else None

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        """A pass over it trains, while the model is in ``train()`` and gradients are on; else it evaluates."""
        found = Loader(self._batches, dataloader)
        vars(found).update({name: each for name, each in vars(dataloader).items() if name not in vars(found)})
        return found

    def _batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        model = self._prepared
        if model is not None and model.training and torch.is_grad_enabled():
            return self._steps.of(self.passes.train(loader))
        return first_batch(loader) if self.passes.again else iter(loader)

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *given: Any, **options: Any) -> None:
        """As ``session.backward``: ``tensor`` is the mean over the batch."""
        if given or options:
            raise UserError("session.backward takes a loss, and no options of backward", sorted(options), "leave them")
        self._steps.backward(tensor, module)

    def optimizer_step(self, optimizer: Any, **options: Any) -> Any:
        """As Fabric's."""
        found = super().optimizer_step(optimizer, **options)
        self._steps.stepped()  # its closure, if it has one, makes backward passes
        return found

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """As ``session.clip_grad_norm_``: over all parameters of the model."""
        if norm_type != 2:
            raise UserError("the norm of gradients that is clipped is 2", norm_type, "leave norm_type out")
        self.precision.unscale_gradients(optimizer)
        return torch.tensor(self.session.clip_grad_norm_(float(max_norm)))

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """As Fabric's, of the gradient of a whole step."""
        if self.session.ends_step:
            super().clip_gradients_value(module, optimizer, clip_val)


class Fabric(lightning.fabric.Fabric):
    """``lightning.fabric.Fabric`` on the workers of a run; options of workers and devices are the run's own."""

    def __init__(self, *, loggers: Any = None, **given: Any) -> None:
        own, strategy = loggers if isinstance(loggers, Sequence) else [loggers] * bool(loggers), FabricStrategy()
        how: dict[str, Any] = {name: given[name] for name in ("precision", "plugins", "callbacks") if name in given}
        how |= {"accelerator": strategy.root_device.type, "devices": 1}
        super().__init__(strategy=strategy, loggers=[RunLogger(strategy.session, strategy.passes), *own], **how)

    @staticmethod
    def seed_everything(seed: int | None = None, *given: Any, **options: Any) -> int:
        """The run's own seed (``--seed``) stands in its place: workers and trials are seeded by it."""
        return seed or 0
