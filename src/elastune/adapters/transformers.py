"""A ``Trainer`` for scripts written for Hugging Face's: change the import, keep arguments, callbacks and metrics."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput

from elastune.adapters.loaders import rebuilt
from elastune.adapters.trainer_parts import EvaluatingTrainer, TrackedState
from elastune.core.errors import UserError


class Trainer(EvaluatingTrainer):
    """Hugging Face's ``Trainer``, with the training loop of a session.

    It takes the arguments of ``transformers.Trainer``; docs/programs.md lists the differences.

    Raises:
        UserError: Outside of a run, and for arguments that settings of the run replace.

    Example:
        >>> trainer = Trainer(model, TrainingArguments("out", eval_strategy="epoch"), train_dataset=a, eval_dataset=b)
        >>> trainer.train()
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        if self.args.bf16 or self.args.fp16:
            fix = "leave it out: elastune run --precision bf16"
            raise UserError("precision is a setting of the run", "bf16 or fp16 in TrainingArguments", fix)
        self.accelerator.prepare = lambda loader: loader  # the session deals out what is in it
        self._losses: list[float] = []  # of this worker, since the last log
        self._told: dict[str, float] = {}  # of the newest step
        self._begins_step = True

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Train the model.

        Leave ``resume_from_checkpoint`` out: ``elastune run --resume`` continues a run.

        Returns:
            Hugging Face's ``TrainOutput``: the number of steps and the newest logged loss (NaN where none was logged).

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
        self._speaks_if_leader()
        self.control = handler.on_train_begin(args, state, self.control)
        for epoch in session.epochs(state.num_train_epochs):
            self._speaks_if_leader()
            self.control = handler.on_epoch_begin(args, state, self.control)
            self._train_epoch(loader, epoch)
            self.control = handler.on_epoch_end(args, state, self.control)
            self._do_what_is_due()
        self.control = handler.on_train_end(args, state, self.control)
        told = [entry["loss"] for entry in state.log_history if "loss" in entry]
        return TrainOutput(state.global_step, told[-1] if told else math.nan, {})

    def _train_epoch(self, loader: DataLoader[Any], epoch: int) -> None:
        args, session, state, handler = self.args, self.session, self.state, self.callback_handler
        self.model.train()
        for inputs in session.batches(loader):
            if self._begins_step:
                self.control = handler.on_step_begin(args, state, self.control)
            items = self._get_num_items_in_batch([inputs], session.device)  # of this part
            loss = self.compute_loss(self.model, self._prepare_inputs(inputs), num_items_in_batch=items)
            session.backward(loss)
            if args.max_grad_norm:
                self._told["grad_norm"] = session.clip_grad_norm_(args.max_grad_norm)
            self.optimizer.step()
            self._told["learning_rate"] = self._get_learning_rate()  # that of this step
            self.lr_scheduler.step()
            self.optimizer.zero_grad()
            self._losses.append(float(loss.detach()))
            self._begins_step = session.ends_step
            if session.ends_step:
                state.global_step += 1
                state.epoch = epoch + (state.global_step - epoch * len(loader)) / len(loader)
                self.control = handler.on_step_end(args, state, self.control)
                self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        """What callbacks have asked for."""
        session, control = self.session, self.control
        if control.should_log and self._losses:
            self.log({"loss": session.mean(self._losses), **self._told})
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
