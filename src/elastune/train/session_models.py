"""The methods of a session for models and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from elastune.core.errors import UserError
from elastune.mechanisms.registry import Plans, note_plan
from elastune.sync.registry import in_use as sync_in_use
from elastune.sync.registry import prepare as prepare_sync
from elastune.train.compiling import by_shapes_alone, plain
from elastune.train.control import ControlVector
from elastune.train.freezing import AsItWas
from elastune.train.precision import Autocast
from elastune.train.schedules import gate, learning_rates
from elastune.train.session_state import SessionState
from elastune.train.several import Prepared
from elastune.train.training_state import TrainingState
from elastune.train.transaction import evaluates_again


class SessionModels(SessionState):
    """The part of ``Session`` that holds models and optimizers."""

    _models: list[nn.Module]
    _held: AsItWas | None = None
    _autocasts: Sequence[Autocast] = ()
    mean: Callable[[Any], float]

    @property
    def turn(self) -> int:
        """Which of the steps with the current batch this is, from 0; see ``turns`` of ``session.batches``."""
        return self._progress.position.turn

    def prepare(self, *models_optimizers_schedulers: Any, plan: Plans | None = None) -> tuple[Any, ...]:
        """Attach mechanism, precision and checkpoints to models and optimizers. Use the returned objects from here on.

        It moves the model to ``session.device`` and gives every worker the initial state of rank 0. Pass schedulers
        that step inside the batch loop here; ``ReduceLROnPlateau`` then steps with the mean over workers.

        Args:
            models_optimizers_schedulers: The model, its optimizer and any schedulers; or several models and optimizers,
                as a GAN has them (``docs/programs.md``). In any order.
            plan: Which layers the mechanism ``tensor`` divides, or a ``Pipeline`` that says where ``pipeline`` cuts the
                model (``docs/meshes.md``); None: elastune finds it.

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
        given = Prepared.of(models_optimizers_schedulers)
        by_shapes_alone(self._spec.means.mode)
        model, optimizer, schedulers = given.model, given.optimizer, given.schedulers
        means, workers, sync_plan, elastic = self._spec.means, self._workers, self._spec.sync, self._workers.elastic
        given.check(means.mechanism)
        most = max(self._spec.most_workers, workers.group.size)
        self._transaction.evaluates_again = evaluates_again(optimizer, means, most)
        note_plan(model, plan)
        model.to(self.device)
        self._begin_with(model)
        self.state.spread(model, optimizer)
        self._adapter.routing.lay(workers.comms)
        control = len(self._exchange.control(ControlVector()).to_list())
        with self.model_context():  # a division makes parameters of its own
            how = {"control": control, "seed": self._spec.seed}
            sync = prepare_sync(model, optimizer, means, workers.comms, sync_plan, elastic=elastic, **how)
        self.state.watch(sync.replica)
        in_use = sync_in_use(sync, self._spec, control, elastic=elastic)
        self.state.trained = TrainingState(in_use, schedulers, tuple(learning_rates(optimizer)))
        for _, later in self._spec.sync_schedule.changes:
            in_use.check(later)
        if means.precision == "bf16":
            self._autocasts = [Autocast(each, self.device) for each in given.models]
        goes_on = self._snapshot is not None
        if self._snapshot is not None:
            self.state.rewind(self._snapshot)
        elif workers.synchronised:
            goes_on = self.state.begin()
        self._held = self.state.trained.held() if goes_on else None
        for scheduler in schedulers:
            gate(scheduler, lambda: self._transaction.ends_local_step, self.mean)
        self._models = given.models
        now = {id(model): sync.replica.model, id(optimizer): sync.replica.optimizer}
        return tuple(now.get(id(each), each) for each in models_optimizers_schedulers)

    def _settle_compiler(self) -> None:
        """The program may have compiled models, or parts of them, since this was called last."""
        by_shapes_alone(self._spec.means.mode)
        for each in self._models:
            plain(each)
        for autocast in self._autocasts:
            autocast.register()

    def _trainable_of(self, model: nn.Module | None) -> list[nn.Parameter] | None:
        """The parameters of ``model``, one of those that were prepared; None of all."""
        if self.trained is not None:
            self.trained.flags.check()
        if model is None:
            return None
        model = plain(model)
        if not any(model is each for each in self._models):
            rule, fix = "a backward pass is for a model that was prepared", "leave model out for all of them"
            raise UserError(rule, type(model).__name__, fix)
        return [p for p in model.parameters() if p.requires_grad]

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
