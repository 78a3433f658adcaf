"""Hugging Face's ``Trainer`` on elastune: change the import, keep arguments, callbacks and metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, TrainOutput

from elastune.adapters.epochs import Evaluation, rebuilt
from elastune.core.errors import UserError
from elastune.train.program.load import current_session

REMEMBERED = "global_step", "epoch", "best_metric", "best_global_step"


class TrackedState:
    """The position of a trainer and the states of its callbacks, as a part of the run's state."""

    def __init__(self, state: Any, callbacks: Sequence[Any]) -> None:
        self._state = state
        self._callbacks = {
            type(callback).__name__: callback for callback in callbacks if isinstance(callback, ExportableState)
        }

    def state_dict(self) -> dict[str, Any]:
        callbacks = {
            name: callback.state().get("attributes", {})
            for name, callback in self._callbacks.items()
            if not isinstance(callback, transformers.TrainerControl)
        }
        return {"positions": json.dumps([{name: getattr(self._state, name) for name in REMEMBERED}, callbacks])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position, callbacks = json.loads(state["positions"])
        for name, value in position.items():
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

    def __init__(self, *args: Any, **options: Any) -> None:
        self.session = current_session()
        super().__init__(*args, **options)

    def is_world_process_zero(self) -> bool:
        """Return whether this worker acts for all."""
        return self.session.leader

    is_local_process_zero = is_world_process_zero

    def _mark_leader(self) -> None:
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
            outputs = self.prediction_step(model, inputs, only_loss, ignore_keys)
            loss, *rest = outputs
            if loss is not None:
                losses.append(evaluation.gather(loss.detach().repeat(find_batch_size(inputs))))
            for container, values in zip((predictions, labels), rest, strict=True):
                if values is not None:
                    container.add(evaluation.gather(values))
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


class Trainer(EvaluatingTrainer):
    """Hugging Face's ``Trainer``, with the training loop of a session.

    It takes the arguments of ``transformers.Trainer``; docs/programs.md lists the differences.

    Raises:
        UserError: Outside of a run, and for arguments that settings of the run replace.

    Example:
        >>> trainer = Trainer(model, TrainingArguments("out", eval_strategy="epoch"), train_dataset=a, eval_dataset=b)
        >>> trainer.train()
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.args.bf16 or self.args.fp16:
            fix = "leave it out: elastune run --precision bf16"
            raise UserError("precision is a setting of the run", "bf16 or fp16 in TrainingArguments", fix)
        self.accelerator.prepare = lambda loader: loader  # the session deals out what is in it
        self._losses: list[float] = []  # of this worker, since the last log
        self._step_values: dict[str, float] = {}  # of the newest step
        self._begins_step = True

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Train the model.

        Leave ``resume_from_checkpoint`` out: ``elastune run --resume`` continues a run.

        Returns:
            Hugging Face's ``TrainOutput``: the number of steps and the newest logged loss (NaN if none was logged).

        Raises:
            UserError: Where ``resume_from_checkpoint`` is given, and for what ``session.prepare`` refuses.
        """
        if resume_from_checkpoint:
            fix = "leave it out: elastune run --resume --out DIR"
            raise UserError("a run goes on from its own checkpoint", "resume_from_checkpoint", fix)
        args, session, state, handler = self.args, self.session, self.state, self.callback_handler
        if self.model_init is not None:
            self.model = self.call_model_init()
        loader = self.get_train_dataloader()
        if args.gradient_accumulation_steps > 1 and loader.batch_size is not None:
            loader = rebuilt(loader, batch_size=loader.batch_size * args.gradient_accumulation_steps)
        self._most = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * len(loader))
        self._ends_with_epoch = self._most % len(loader) == 0
        self.create_optimizer_and_scheduler(self._most)
        prepared = session.prepare(self.model, self.optimizer, self.lr_scheduler)
        self.model, self.optimizer, self.lr_scheduler = prepared
        self.model_wrapped = self.model
        handler.model, handler.optimizer, handler.lr_scheduler = prepared
        state.compute_steps(args, self._most)
        state.max_steps, state.num_train_epochs = self._most, -(-self._most // len(loader))
        session.track("trainer", TrackedState(state, handler.callbacks))
        self._mark_leader()
        self.control = handler.on_train_begin(args, state, self.control)
        for epoch in session.epochs(state.num_train_epochs):
            self._mark_leader()
            self.control = handler.on_epoch_begin(args, state, self.control)
            self._train_epoch(loader, epoch)
            self.control = handler.on_epoch_end(args, state, self.control)
            self._obey_callbacks()
        self.control = handler.on_train_end(args, state, self.control)
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        return TrainOutput(state.global_step, losses[-1] if losses else math.nan, {})

    def _train_epoch(self, loader: DataLoader[Any], epoch: int) -> None:
        args, session, state, handler = self.args, self.session, self.state, self.callback_handler
        self.model.train()
        assert session.trained is not None
        divides = not session.trained.sync.refuses_counts
        for inputs in session.batches(loader):
            if self._begins_step:
                self.control = handler.on_step_begin(args, state, self.control)
            items = self._get_num_items_in_batch([inputs], session.device)  # of this part
            loss = self.compute_loss(self.model, self._prepare_inputs(inputs), num_items_in_batch=items)
            session.backward(loss, count=items if divides else None)
            if args.max_grad_norm:
                self._step_values["grad_norm"] = session.clip_grad_norm_(args.max_grad_norm)
            self.optimizer.step()
            self._step_values["learning_rate"] = self._get_learning_rate()  # that of this step
            self.lr_scheduler.step()
            self.optimizer.zero_grad()
            self._losses.append(float(loss.detach()))
            self._begins_step = session.ends_step
            if session.ends_step:
                state.global_step += 1
                state.epoch = epoch + (state.global_step - epoch * len(loader)) / len(loader)
                self.control = handler.on_step_end(args, state, self.control)
                self._obey_callbacks()

    def _obey_callbacks(self) -> None:
        """Log, evaluate, save or stop, as callbacks have requested."""
        session, control = self.session, self.control
        if control.should_log and self._losses:
            self.log({"loss": session.mean(self._losses), **self._step_values})
            self._losses.clear()
            control.should_log = False
        if control.should_evaluate:
            self._determine_best_metric(self._evaluate(None, None), None)
            self.model.train()
        if control.should_save:
            session.save()
            self.control = self.callback_handler.on_save(self.args, self.state, control)
        over = self.state.global_step >= self._most
        if session.stopped == "complete" and control.should_training_stop and not (over and self._ends_with_epoch):
            session.stop("max_steps of TrainingArguments" if over else "a callback of the trainer")
