"""What a program trains and keeps: models and optimizers as one, their first weights, unfreezing, tracked state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

from elastune.core.errors import UserError
from elastune.core.journal.folds import training_in
from elastune.core.journal.records import Record, StartedFrom
from elastune.core.run import RunSpec, StartFrom
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.worker.group import WorkerGroup
from elastune.train.checkpoints.checkpoint import complete, load_newest
from elastune.train.checkpoints.out_folder import OutFolder, note_beginning, noted_beginning
from elastune.train.checkpoints.start_from import start_from
from elastune.train.checkpoints.tree import fingerprint, to_tree
from elastune.train.compiling import is_compiled, plain
from elastune.train.program.errors import text_of
from elastune.train.progress import Progress, initial_weights_of
from elastune.train.schedules import UNGATED, ungated

# State of the program's own that a run keeps: averaged weights, a replay buffer, an fp16 gradient scaler.
#
# In a loop that passes several times through a step, averages and gradient scalers act once, on the whole sum.

UNTRACKED = "No inf checks were recorded"  # in torch's error where no parameter has a gradient
FIX = 'scaler = session.track("scaler", torch.amp.GradScaler(...)) behind session.prepare'
_SCALED = "_elastune_scaled"


class Tracked:
    """The objects of ``session.track``, by name: a part of the run's state, equal on all workers.

    State that was saved under a name waits until the program tracks an object of this name.

    Attributes:
        scaler: The program's gradient scaler, if it tracks one.
    """

    name = "tracked"

    def __init__(self) -> None:
        self.scaler: GradScaler | None = None
        self._objects: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}

    def add(self, name: str, obj: Any, ends_step: Callable[[], bool]) -> None:
        """Track ``obj`` from here on; it gets the state that waits for its name.

        Args:
            name: Its name in checkpoints.
            obj: An object with ``state_dict`` and ``load_state_dict``, or a dict.
            ends_step: Whether the current batch completed a step, for averages and scalers, which act once a step.

        Raises:
            UserError: For a name that is taken or empty, and for an object whose state cannot be saved.
        """
        if not isinstance(name, str) or not name:
            raise UserError("what is tracked has a name", repr(name)[:80], 'session.track("ema", ema)')
        if name in self._objects:
            raise UserError("each name is tracked once", name, "choose another name")
        if not isinstance(obj, MutableMapping) and not (
            callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))
        ):
            fix = "give it state_dict and load_state_dict, or track a dict"
            raise UserError("what is tracked has a state", f"{name}: {type(obj).__name__}", fix)
        if isinstance(obj, nn.Module):
            plain(obj)  # an average of a compiled model, say
        to_tree(_state(obj), {}, f"session.track({name})")  # an error comes now, and not with the first checkpoint
        self._objects[name] = plain(obj) if isinstance(obj, nn.Module) else obj
        if name in self._waiting:
            _load(name, self._objects[name], self._waiting.pop(name))
        if isinstance(obj, AveragedModel):
            _average_at_steps(obj, ends_step)
        if isinstance(obj, GradScaler):
            scale_at_steps(obj, ends_step)
            self.scaler = obj

    def refuse(self, plan: SyncPlan) -> None:
        """Raise ``UserError`` where learners of ``plan`` would differ, and tracked objects with them."""
        if self._objects and plan.in_rounds:
            rule = "what is tracked is equal on all workers, and learners between their rounds are not"
            raise UserError(rule, f"{plan} with {', '.join(sorted(self._objects))}", "use --sync allreduce")

    def refuse_scaler(self) -> None:
        """Raise ``UserError`` where a gradient scaler is tracked: the program does not hold the loss to be scaled."""
        if self.scaler is not None and self.scaler.is_enabled():
            rule, fix = "a loss of the global batch is not scaled", "use --precision bf16 without a gradient scaler"
            raise UserError(rule, "a tracked gradient scaler", fix)

    def state_dict(self) -> dict[str, Any]:
        return {**self._waiting, **{name: _state(obj) for name, obj in self._objects.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = {str(name): saved for name, saved in state.items() if name not in self._objects}
        for name, obj in self._objects.items():
            if name in state:
                _load(name, obj, state[name])


def _state(obj: Any) -> dict[str, Any]:
    return dict(obj) if isinstance(obj, MutableMapping) else dict(obj.state_dict())


def _load(name: str, obj: Any, state: Mapping[str, Any]) -> None:
    if isinstance(obj, MutableMapping):
        obj.clear()
        obj.update(state)
        return
    try:
        obj.load_state_dict(dict(state))
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "resume with the program that wrote it"
        raise UserError("what is tracked takes its own state back", f"{name}: {error}", fix) from None


def _average_at_steps(average: AveragedModel, ends_step: Callable[[], bool]) -> None:
    """Let ``average`` average once a step, though the loop's body runs once for each slot.

    The object gets a subclass of its own class, as schedulers do: a copy of it averages its own weights.
    """
    kind = ungated(average)

    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        if ends_step():
            kind.update_parameters(self, model)

    average.__class__ = type(kind.__name__, (kind,), {"update_parameters": update_parameters, UNGATED: kind})


# --- a gradient scaler (fp16) ---
def scale_at_steps(scaler: GradScaler, ends_step: Callable[[], bool]) -> None:
    """Let ``scaler`` unscale, step and update only where a step is complete, and mark the losses that it scales.

    The object gets a subclass of its own class, as schedulers do.
    """
    kind = ungated(scaler)

    def once(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)
        return lambda self, *args, **kwargs: method(self, *args, **kwargs) if ends_step() else None

    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = kind.scale(self, outputs)
        if isinstance(scaled, torch.Tensor) and self.is_enabled():
            setattr(scaled, _SCALED, True)
        return scaled

    methods = {name: once(name) for name in ("unscale_", "step", "update")}
    scaler.__class__ = type(kind.__name__, (kind,), {**methods, "scale": scale, UNGATED: kind})


def is_scaled(loss: torch.Tensor) -> bool:
    """Whether ``loss`` is what a tracked scaler returned, unchanged."""
    return bool(getattr(loss, _SCALED, False))


def untracked_scaler(error: BaseException) -> UserError | None:
    """The error of a program that does not track its scaler, where ``error`` comes from that; else None."""
    if not isinstance(error, AssertionError) or UNTRACKED not in text_of(error):
        return None
    rule = "a gradient scaler acts once a step, when the sum over workers is there"
    return UserError(rule, "one that acts in every batch", FIX)


# The models and optimizers of a program: several trained as one, the weights they start from, gradual unfreezing.


@dataclass(frozen=True)
class Prepared:
    """The arguments of ``session.prepare``: models, optimizers and schedulers.

    Several models, such as the two of a GAN, train as one model that holds them all, under one optimizer that stands
    for all. So state that moves, is saved or is compared is whole by itself. The program decides which of them a step
    changes.

    Attributes:
        model: The model, or one model that holds all of them.
        optimizer: The optimizer, or one optimizer that stands for all of them.
        schedulers: The other arguments.
        several: There is more than one model or optimizer.
        compiled: ``torch.compile`` was called on some model, or on a part of one.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: tuple[Any, ...]
    several: bool
    compiled: bool = False

    @classmethod
    def of(cls, objects: Sequence[Any]) -> Prepared:
        """Sort ``objects``, in any order. Raises ``UserError`` where a model or an optimizer is missing or idle."""
        compiled = [is_compiled(each) for each in objects if isinstance(each, nn.Module)]
        models = [plain(each) for each in objects if isinstance(each, nn.Module)]
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        rest = [each for each in objects if not isinstance(each, (nn.Module, torch.optim.Optimizer))]
        if not models or not optimizers:
            kinds = ", ".join(type(each).__name__ for each in objects) or "nothing"
            raise UserError(
                "session.prepare takes a model and its optimizer", kinds, "session.prepare(model, optimizer)"
            )
        if any(isinstance(each, GradScaler) for each in rest):
            raise UserError("session.prepare takes models, optimizers and schedulers", "a gradient scaler", FIX)
        if odd := [type(each).__name__ for each in rest if not callable(getattr(each, "step", None))]:
            fix = "give other state to session.track"
            raise UserError("session.prepare takes models, optimizers and schedulers", ", ".join(odd), fix)
        if len(models) == len(optimizers) == 1:
            return cls(models[0], optimizers[0], tuple(rest), several=False, compiled=any(compiled))
        of_models = {id(p) for model in models for p in model.parameters()}
        for number, optimizer in enumerate(optimizers):
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            if not all(id(p) in of_models for p in trained):
                rule = "each optimizer trains parameters of the models beside it"
                raise UserError(rule, f"{type(optimizer).__name__}, number {number + 1}", "give its model, too")
            if isinstance(optimizer, torch.optim.LBFGS):
                raise UserError("LBFGS evaluates a step several times", "beside another optimizer", "use it alone")
        joint = models[0] if len(models) == 1 else Models(models)
        joint_optimizer = optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers)
        return cls(joint, joint_optimizer, tuple(rest), several=True, compiled=any(compiled))

    def check(self, mechanism: str) -> None:
        """Raise ``UserError`` where ``mechanism`` would divide several models, or a compiled one."""
        if self.several and mechanism != "replicated":
            rule = "several models or optimizers lie whole on every worker"
            raise UserError(rule, f"--mechanism {mechanism}", "use --mechanism replicated")
        if self.compiled and mechanism != "replicated":
            rule, fix = "a compiled model lies whole on every worker", "use --mechanism replicated, or do not compile"
            raise UserError(rule, f"--mechanism {mechanism}", f"{fix} (docs/programs.md)")

    @property
    def models(self) -> list[nn.Module]:
        """The program's models."""
        return list(self.model.children()) if isinstance(self.model, Models) else [self.model]


class Models(nn.Module):
    """Several models as one: its children are named by their classes, and numbered where two have the same class."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        names = [type(model).__name__ for model in models]
        many, seen = Counter(names), Counter[str]()
        for name, model in zip(names, models, strict=True):
            seen[name] += 1
            self.add_module(name if many[name] == 1 else f"{name}{seen[name]}", model)


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one: their groups in a row, and each parameter's state where its own optimizer keeps it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Torch's constructor is not called: it would make groups and state of its own.
        self.optimizers = tuple(optimizers)
        self.defaults = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> _States:  # type: ignore[override]
        return _States(self.optimizers)

    def state_dict(self) -> dict[str, Any]:
        """The state as of one optimizer: parameters are numbered through all groups."""
        groups: list[dict[str, Any]] = []
        state: dict[int, Any] = {}
        first = 0
        for each in self.optimizers:
            part = each.state_dict()
            state |= {first + number: value for number, value in part["state"].items()}
            groups += [{**group, "params": [first + n for n in group["params"]]} for group in part["param_groups"]]
            first += sum(len(group["params"]) for group in part["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load ``state_dict``. Raises ``ValueError`` where it has other numbers of groups or parameters."""
        groups, first = iter(state_dict["param_groups"]), 0
        for each in self.optimizers:
            part = list(islice(groups, len(each.param_groups)))
            count = sum(len(group["params"]) for group in part)
            state = {n - first: value for n, value in state_dict["state"].items() if first <= n < first + count}
            shifted = [{**group, "params": [n - first for n in group["params"]]} for group in part]
            each.load_state_dict({"state": state, "param_groups": shifted})
            first += count
        if next(groups, None) is not None:
            raise ValueError("loaded state dict has a different number of parameter groups")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step of each optimizer, with the gradients of one call of ``closure``. Return the closure's loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for each in self.optimizers:
            each.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)


class _States(MutableMapping[torch.Tensor, Any]):
    """The state of every parameter of several optimizers."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, parameter: torch.Tensor) -> Any:
        """The state of the optimizer that trains ``parameter``."""
        for each in self._optimizers:
            if any(p is parameter for group in each.param_groups for p in group["params"]):
                return each.state
        raise KeyError("a parameter of no optimizer")

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        state = self._of(parameter)
        if parameter not in state:  # a defaultdict would make one
            raise KeyError("a parameter without state")
        return state[parameter]

    def __setitem__(self, parameter: torch.Tensor, state: Any) -> None:
        self._of(parameter)[parameter] = state

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for each in self._optimizers:
            yield from each.state

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)


class WeightSources:
    """The weights that a run's models start from, by ``session.start_from`` and by ``--start-from``.

    Each call copies from its source when the run begins, and is recorded in the journal. Later nothing is copied: a
    resumed run and a worker that joins get the model's state anyway, and the source may be gone. The calls then return
    the records of the beginning, from the newest checkpoint or from a note in the run's folder.
    """

    def __init__(
        self,
        spec: RunSpec,
        workers: WorkerGroup,
        progress: Progress,
        out_folder: OutFolder,
        send: Callable[[Record], None],
        *,
        rewound: bool,
    ) -> None:
        self._spec = spec
        self._workers = workers
        self._progress = progress
        self._out_folder = out_folder
        self._send = send
        self._rewound = rewound  # ``progress`` is that of a snapshot
        self._calls = 0

    def start_from(self, model: nn.Module, request: StartFrom) -> StartedFrom:
        """Do what ``session.start_from`` describes. Raises ``UserError`` for a source that cannot be read or used."""
        progress, workers = self._progress, self._workers
        nth, self._calls = self._calls, self._calls + 1
        if nth == 0 and not self._rewound and (self._resumes or not workers.synchronised):
            progress.initial_weights = self._earlier_starts()
        if nth < len(progress.initial_weights):
            return progress.initial_weights[nth]
        model = plain(model)
        started = start_from(model, request)
        progress.initial_weights.append(started)
        if workers.rank == 0 and workers.synchronised:
            self._record_start(model, started)
            note_beginning(self._out_folder, progress.initial_weights)
        return started

    def start_from_option(self, model: nn.Module) -> None:
        """Do what ``--start-from`` asks for, on the worker whose initial state becomes that of all."""
        spec, workers = self._spec, self._workers
        if spec.start_from is None or self._rewound or not workers.synchronised or workers.rank != 0:
            return
        if self._resumes and spec.spool is None and complete(spec.out / "checkpoints"):  # the source may be gone by now
            return
        self._record_start(model, start_from(model, spec.start_from))

    @property
    def _resumes(self) -> bool:
        """Whether the run begins at its newest checkpoint, if there is one."""
        return self._spec.resume or self._workers.restart_from_checkpoint

    def _earlier_starts(self) -> list[StartedFrom]:
        """The records in the run's newest checkpoint, whose weights replace the model's.

        Without a checkpoint, only a joiner finds them, in the note: others will send it their state.
        """
        newest = load_newest(self._spec.out / "checkpoints", lambda path, files: "", whole_parts=False)
        if newest is not None:
            return initial_weights_of(newest[1].states[Progress.name])
        return [] if self._workers.synchronised else noted_beginning(self._spec.out)

    def _record_start(self, model: nn.Module, started: StartedFrom) -> None:
        """Write to the journal what the model starts from: a study compares whether trials began alike."""
        begins = fingerprint({n: tensor for n, tensor in model.state_dict().items() if hasattr(tensor, "shape")})
        source = training_in(Path(started.source))
        known_s = None if source is None or source.unrecorded else source.worker_seconds
        self._send(replace(started, begins=begins, worker_seconds=known_s))


@dataclass(frozen=True)
class Unfreezing:
    """Gradual unfreezing of one model: tensors that train from a later epoch on (``session.unfreeze``).

    The last layers of a model that was trained on another task train first; the other layers join them epoch by epoch
    (Howard, Ruder 2018, "Universal Language Model Fine-tuning for Text Classification").

    Attributes:
        from_epoch: The first epoch, from 0, in which a tensor trains, by its name; None: never.
    """

    from_epoch: Mapping[str, int | None]
    _parameters: tuple[tuple[nn.Parameter, int | None], ...] = ()

    def hide(self, epoch: int) -> None:
        """Remove the gradients of tensors that are frozen in ``epoch``, so that optimizer and clipping skip them."""
        for parameter, first in self._parameters:
            if first is None or epoch < first:
                parameter.grad = None


def unfreezing(model: nn.Module, schedule: Mapping[str, int | None]) -> Unfreezing:
    """Apply ``schedule``, epochs by patterns of names, to the tensors of ``model``; the first fitting pattern counts.

    Raises:
        UserError: For a value that is no epoch, a pattern that names no tensor, a tensor that no pattern names, and
            where nothing trains in the first epoch.
    """
    if not isinstance(schedule, Mapping) or not schedule:
        rule = "a schedule of unfreezing has the first epoch of some names"
        raise UserError(rule, repr(schedule)[:80], '{"head.*": 0, "*": 2}')
    for pattern, epoch in schedule.items():
        whole = epoch is None or (isinstance(epoch, int) and not isinstance(epoch, bool) and epoch >= 0)
        if not isinstance(pattern, str) or not whole:
            rule = "a schedule of unfreezing has an epoch from 0 for a name, or None for never"
            raise UserError(rule, f"{pattern!r}: {epoch!r}"[:80], '{"head.*": 0, "*": 2}')
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    from_epoch: dict[str, int | None] = {}
    for name in trained:
        fits = [pattern for pattern in schedule if fnmatchcase(name, pattern)]
        if not fits:
            raise UserError("a schedule of unfreezing names every tensor that trains", name, 'end it with "*": 0')
        from_epoch[name] = schedule[fits[0]]
    for pattern in schedule:
        if not any(fnmatchcase(name, pattern) for name in trained):
            rule, some = "what is unfrozen is a tensor of the model that trains", ", ".join(list(trained)[-3:])
            raise UserError(rule, pattern[:80], f"such as {some}"[:300])
    if 0 not in from_epoch.values():
        raise UserError("something trains in the first epoch", "nothing", 'such as {"head.*": 0, "*": 2}')
    return Unfreezing(from_epoch, tuple((trained[name], epoch) for name, epoch in from_epoch.items()))
