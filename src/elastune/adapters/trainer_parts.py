"""What belongs to Hugging Face's ``Trainer`` besides training: evaluation, files, its callbacks' states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction

from elastune.adapters.evaluation import Evaluation
from elastune.train.program.current import current_session

REMEMBERED = "global_step", "epoch", "best_metric", "best_global_step"


class TrackedState:
    """The position of a trainer and the states of its callbacks, as a part of the run's state."""

    def __init__(self, state: Any, callbacks: Sequence[Any]) -> None:
        self._state = state
        self._callbacks = {type(each).__name__: each for each in callbacks if isinstance(each, ExportableState)}

    def state_dict(self) -> dict[str, Any]:
        callbacks = {
            name: each.state().get("attributes", {})
            for name, each in self._callbacks.items()
            if not isinstance(each, transformers.TrainerControl)
        }
        return {"told": json.dumps([{name: getattr(self._state, name) for name in REMEMBERED}, callbacks])}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        own, callbacks = json.loads(held["told"])
        for name, value in own.items():
            setattr(self._state, name, value)
        for name, attributes in callbacks.items():
            for attribute, value in attributes.items():
                setattr(self._callbacks[name], attribute, value)


class EvaluatingTrainer(transformers.Trainer):
    """The part of ``Trainer`` that evaluates and saves."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    control: Any

    def __init__(self, *given: Any, **options: Any) -> None:
        self.session = current_session()
        super().__init__(*given, **options)

    def is_world_process_zero(self) -> bool:
        """Return whether this worker acts for all."""
        return self.session.leader

    is_local_process_zero = is_world_process_zero

    def _speaks_if_leader(self) -> None:
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.session.leader

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as Hugging Face's ``Trainer`` does, once in a run."""
        if self.session.leader:
            super().save_model(output_dir, _internal_call)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate: each worker evaluates its own batches, and all workers get all predictions and their metrics.

        The metrics are reported, with their prefix.
        """
        only_loss = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        model = self.model.to(self.session.device)
        model.eval()
        evaluation, losses = Evaluation(self.session, dataloader), []
        predictions, labels = EvalLoopContainer(True, -100), EvalLoopContainer(True, -100)
        for inputs in evaluation:
            found = self.prediction_step(model, inputs, only_loss, ignore_keys)
            loss, *rest = found
            if loss is not None:
                losses.append(evaluation.gather(loss.detach().repeat(find_batch_size(inputs))))
            for held, each in zip((predictions, labels), rest, strict=True):
                if each is not None:
                    held.add(evaluation.gather(each))
        held_predictions, held_labels = predictions.get_arrays(), labels.get_arrays()
        metrics: dict[str, Any] = {"loss": float(torch.cat(losses).double().mean())} if losses else {}
        if self.compute_metrics is not None and held_predictions is not None and held_labels is not None:
            metrics |= self.compute_metrics(EvalPrediction(held_predictions, held_labels))
        named = {
            name if name.startswith(metric_key_prefix) else f"{metric_key_prefix}_{name}": value
            for name, value in metrics.items()
        }
        if named:
            self.session.report(**named)
        return EvalLoopOutput(held_predictions, held_labels, named, len(dataloader.dataset))
