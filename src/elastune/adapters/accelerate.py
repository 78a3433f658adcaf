"""An ``Accelerator`` for scripts written for Hugging Face Accelerate: change the import, keep the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from elastune.adapters.epochs import Evaluation, Loader, Scheduler, SessionEpochs, first_batch, rebuilt
from elastune.core.errors import UserError
from elastune.train.program.load import current_session
from elastune.train.session import Session

STATE = "elastune_state.pt"


class UnsupportedFeature(UserError, AttributeError):
    """A part of Accelerate's API that elastune does not have; ``hasattr`` reports it as missing."""


class AcceleratorBase:
    """The part of ``Accelerator`` that does not train."""

    session: Session
    device: torch.device
    passes: SessionEpochs
    keeps: dict[str, Any]  # what a state has, by name
    num_processes = 1  # a script sees one process: its batch size is that of all workers together
    optimizer_step_was_skipped = False

    @property
    def sync_gradients(self) -> bool:
        """Whether this batch completed a step."""
        return self.session.ends_step

    @property
    def is_main_process(self) -> bool:
        """Whether this worker now performs the actions that happen once in a run.

        False where a script that starts again in mid-run repeats earlier lines.
        """
        return self.session.leader and not self.passes.again

    is_local_main_process = is_last_process = is_main_process

    @property
    def process_index(self) -> int:
        """This worker's rank, for messages."""
        return self.session.rank

    local_process_index = process_index

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Report the numbers among ``values``, as ``session.report`` does.

        Inside of a pass, it does so only at the end of a step.
        """
        numbers: dict[str, Any] = {
            name: value for name, value in values.items() if isinstance(value, (int, float, torch.Tensor))
        }
        if numbers and not self.passes.again and self.session.ends_step:
            self.session.report(**numbers)

    def print(self, *words: Any, **options: Any) -> None:
        """Print as Python's ``print`` does, once in a run."""
        if self.is_main_process:
            print(*words, **options)

    def save_state(self, output_dir: str | Path | None = None, **options: Any) -> None:
        """Write a checkpoint of the run, for ``--resume``.

        Args:
            output_dir: Also write into this folder the state that ``load_state`` reads.
        """
        if self.passes.again:
            return
        self.session.save()
        if output_dir is None:
            return
        if self.session.trained is not None and self.session.trained.in_shares:
            rule = "a state in a folder needs workers that have all of it"
            raise UserError(rule, output_dir, "leave output_dir out: --resume needs none")
        if self.is_main_process:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            self.save({name: tracked.state_dict() for name, tracked in self.keeps.items()}, Path(output_dir) / STATE)

    def load_state(self, input_dir: str | Path, **options: Any) -> None:
        """Start from the state that another run saved. A resumed run continues from its own checkpoint instead.

        Args:
            input_dir: The folder that ``save_state`` wrote.

        Raises:
            UserError: Where the folder holds no such state.
        """
        if self.session.step > 0:
            return
        file = Path(input_dir) / STATE
        if not file.is_file():
            raise UserError("a state is loaded from where save_state has put it", file, "check the folder")
        states = torch.load(file, map_location=self.device, weights_only=True)
        for name, tracked in self.keeps.items():
            tracked.load_state_dict(states[name])

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Make objects a part of the run's state, as ``session.track`` does. Call it after ``prepare``."""
        for tracked in objects:
            name = f"registered {len(self.keeps)}"
            self.keeps[name] = self.session.track(name, tracked)

    def save(self, obj: Any, file: str | Path, **options: Any) -> None:
        """Save as ``torch.save`` does, once in a run."""
        if self.is_main_process:
            torch.save(obj, file)

    def wait_for_everyone(self) -> None:
        """Return when all workers are here, between steps."""
        if not self.passes.again:
            self.session.sum(0.0)

    def unwrap_model(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return ``model``: nothing is wrapped around it."""
        return model

    def get_state_dict(self, model: nn.Module, **options: Any) -> dict[str, Any]:
        """Return ``model.state_dict()``."""
        return model.state_dict()

    def init_trackers(self, *args: Any, **options: Any) -> None:
        """Do nothing: the run's journal keeps what is logged."""

    end_training = free_memory = init_trackers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnsupportedFeature(
            "elastune's Accelerator has a part of Accelerate's", f"no {name}", "see docs/programs.md"
        )


NO_MEANING = {  # options that elastune ignores: it decides these itself
    *("device_placement", "split_batches", "cpu", "rng_types", "log_with", "project_dir", "project_config"),
    *("step_scheduler_with_optimizer", "even_batches", "dispatch_batches", "dataloader_config"),
}


def set_seed(seed: int, **options: Any) -> None:
    """Do nothing: the run's own seed (``--seed``) seeds workers and trials."""


class Accelerator(AcceleratorBase):
    """The part of Accelerate's ``Accelerator`` that scripts call, on a session.

    docs/programs.md lists the differences from Accelerate.

    Args:
        gradient_accumulation_steps: Number of the loader's batches in one step's batch.
        mixed_precision: None or "no": ``--precision`` decides.
        ignored: Options of Accelerate's that have no meaning here; others are refused.

    Raises:
        UserError: For options that are not supported, and outside of a run.

    Example:
        >>> accelerator = Accelerator()
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    def __init__(
        self, *, gradient_accumulation_steps: int = 1, mixed_precision: str | None = None, **ignored: Any
    ) -> None:
        if unknown := sorted(ignored.keys() - NO_MEANING):
            raise UserError("elastune's Accelerator takes Accelerate's plain options", unknown, "see docs/programs.md")
        if mixed_precision not in (None, "no"):
            rule = "precision is a setting of the run"
            raise UserError(rule, f"mixed_precision={mixed_precision!r}", "leave it out: elastune run --precision bf16")
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.session = current_session()
        self.device = self.session.device
        self.passes = SessionEpochs(self.session)
        self._evaluation: Evaluation | None = None
        self.keeps: dict[str, Any] = {}  # what a state has, by name

    def prepare(self, *objects: Any) -> Any:
        """Prepare models, optimizers, schedulers and loaders. Use the returned objects from here on.

        Give the model, its optimizer and its schedulers in one call.

        Returns:
            The prepared objects in the order of the call; a single object for a single one.

        Raises:
            UserError: For a model without its optimizer, or an optimizer without its model.
        """
        models = [item for item in objects if isinstance(item, nn.Module)]
        optimizers = [item for item in objects if isinstance(item, Optimizer)]
        schedulers = [item for item in objects if isinstance(item, LRScheduler)]
        prepared_by_id: dict[int, Any] = {
            id(item): Loader(self.batches, item) for item in objects if isinstance(item, DataLoader)
        }
        if models or optimizers or schedulers:
            if (len(models), len(optimizers)) != (1, 1):
                value = f"{len(models)} models, {len(optimizers)} optimizers"
                fix = "accelerator.prepare(model, optimizer, scheduler)"
                raise UserError("a model, its optimizer and its schedulers are prepared in one call", value, fix)
            model, optimizer, *rest = self.session.prepare(models[0], optimizers[0], *schedulers)
            self.keeps = {"model": model, "optimizer": optimizer} | {f"scheduler {i}": s for i, s in enumerate(rest)}
            prepared_by_id |= {id(models[0]): model, id(optimizers[0]): optimizer}
            prepared_by_id |= {id(old): Scheduler(self.passes, new) for old, new in zip(schedulers, rest, strict=True)}
        prepared = tuple(prepared_by_id.get(id(item), item) for item in objects)
        return prepared if len(prepared) > 1 else prepared[0]

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Return the batches of one pass over ``loader``.

        The pass trains while the model is in ``train()`` and gradients are on; else it evaluates.
        """
        model = self.keeps.get("model")
        if model is not None and model.training and torch.is_grad_enabled():
            accumulated = self.gradient_accumulation_steps
            if accumulated > 1 and loader.batch_size is not None:
                loader = rebuilt(loader, batch_size=loader.batch_size * accumulated)
            return self.passes.train(loader)
        self._evaluation = None
        if self.passes.again:
            return first_batch(loader)
        self._evaluation = Evaluation(self.session, loader)
        return iter(self._evaluation)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Do nothing, in a ``with`` block: no parameter has a gradient until the last batch of a step."""
        return nullcontext()

    no_sync = autocast = accumulate

    def backward(self, loss: torch.Tensor) -> None:
        """Do what ``session.backward`` does; ``loss`` is the mean over the batch."""
        self.session.backward(loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> float:
        """Do what ``session.clip_grad_norm_`` does, over all parameters of the model.

        Raises:
            UserError: For another ``norm_type`` than 2.
        """
        if norm_type != 2:
            raise UserError("the norm of gradients that is clipped is 2", norm_type, "leave norm_type out")
        return self.session.clip_grad_norm_(max_norm)

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """Return the tensors in ``data`` for the batches that all workers are at.

        Each sample counts once, and samples are in the loader's order. Outside of an evaluation, ``data`` is returned
        as it is.
        """
        return data if self._evaluation is None else self._evaluation.gather(data)
