"""Records what a worker's steps do, for ``elastune check``, and repeats passes without chance (``Quiet``).

``recorder_of`` reads from the environment whether a run is to be recorded. The training loop calls ``Recorder``: at
the begin of a pass over data, around the program's lines for a batch, at each loss, at a reduced step and at its
commit.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode

from elastune.core.run import derive
from elastune.core.slots import BatchSlice
from elastune.train.data.fingerprint import checksum_of
from elastune.train.data.source import StepPlan, StepSource
from elastune.train.proof.compare import (
    BATCH_NORM,
    DROPOUT,
    MEAN,
    OTHER,
    SCHEDULE,
    SUM,
    Leaf,
    LossPart,
    PassRecord,
    StepRecord,
    encode,
)
from elastune.train.rng import seed_everything

# Passes without random numbers and without statistics of a batch: what is left is what the program's lines compute.
#
# ``Quiet`` is entered around a program's lines. Dropout lets everything through, BatchNorm uses its running
# statistics, and noise drawn from torch is its mean. So two passes over the same samples, cut otherwise, must have
# gradients that add up, unless a loss looks at several samples at once.

_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_MEANS: dict[str, float] = {
    **dict.fromkeys(("randn", "randn_like", "normal_"), 0.0),
    **dict.fromkeys(("rand", "rand_like", "uniform_"), 0.5),
    "exponential_": 1.0,
}
_ATTENTION_DROPOUT = 4  # its place among the arguments of scaled_dot_product_attention
_BATCH_NORM_TRAINING = 5  # likewise of batch_norm


class Quiet(TorchFunctionMode):
    """See the module."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` without randomness; anything that draws nothing runs as it is."""
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in _DROPOUTS:
            return args[0] if args else options["input"]
        if func is F.multi_head_attention_forward:
            options["training"] = False
        elif func is F.scaled_dot_product_attention:
            args = args[:_ATTENTION_DROPOUT] + (0.0,) * (len(args) > _ATTENTION_DROPOUT) + args[5:]
            if "dropout_p" in options:
                options["dropout_p"] = 0.0
        elif func is F.batch_norm:
            args, options = _with_running_statistics(args, options)
        elif name in _RECURRENT:
            args = tuple(0.0 if type(each) is float else each for each in args)
        elif name == "normal":
            drawn = func(*args, **options)
            mean = args[0] if args else options.get("mean", 0.0)
            return mean.expand_as(drawn).clone() if isinstance(mean, torch.Tensor) else torch.full_like(drawn, mean)
        drawn = func(*args, **options)
        if name in _MEANS and isinstance(drawn, torch.Tensor):
            with torch.no_grad():
                drawn.fill_(_MEANS[name])
        return drawn


def _with_running_statistics(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mean = args[1] if len(args) > 1 else options.get("running_mean")
    if mean is None:  # a layer that keeps none
        return args, options
    if len(args) > _BATCH_NORM_TRAINING:
        return (*args[:_BATCH_NORM_TRAINING], False, *args[_BATCH_NORM_TRAINING + 1 :]), options
    return args, {**options, "training": False}


# Records what a worker's steps do, for ``elastune check``.

VARIABLE = "ELASTUNE_RECORD"
BEGINNING = "beginning.safetensors"  # the parameters that training begins with, in the optimizer's order
MOST_NODES = 400  # of a loss's graph that are looked at
MOST_PARTS = 4
SCHEDULERS = (LRScheduler, ReduceLROnPlateau)
MOST_VARIABLES, MOST_ITEMS, MOST_TEXT = 100, 16, 100
_FRAME = re.compile(r'File "([^"]+)", line ([0-9]+)')
_REDUCTIONS = {1: MEAN, 2: SUM}  # as torch's loss functions keep them


@dataclass(frozen=True)
class Recording:
    """What is to be recorded of a run.

    Attributes:
        folder: Where each worker writes its steps.
        epoch_steps: The steps of each epoch; the rest of its data are left out. None: all.
        apart: Of how many steps the gradients of single passes are recorded: each costs one more backward pass.
        quiet: Dropout, noise and statistics of batches are switched off, see ``quiet``.
        salt: Another number gives the passes other random numbers; 0: those of the run.
        beginning: Whether the parameters are written as training begins.
    """

    folder: str
    epoch_steps: int | None = None
    apart: int = 0
    quiet: bool = False
    salt: int = 0
    beginning: bool = False

    def encode(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))


def recorder_of(environment: Mapping[str, str], program: Path) -> Recorder | None:
    """The recorder that this process's environment asks for; None: nothing is to be recorded."""
    text = environment.get(VARIABLE)
    return None if text is None else Recorder(Recording(**json.loads(text)), program)


class Recorder:
    """Records the steps of one worker, which may run its training function several times."""

    def __init__(self, recording: Recording, program: Path) -> None:
        self._recording = recording
        self._program = str(program.resolve())
        self._passes: list[PassRecord] = []
        self._samples = 0
        self._open: dict[str, Any] = {}
        self._recorded = 0
        self._rank = 0

    # -- data ----------------------------------------------------------------------------------------------------------

    def shortened(self, source: StepSource, size: int) -> StepSource:
        """The first batches of ``source``, of ``size`` samples, as an epoch."""
        steps = self._recording.epoch_steps
        return source if steps is None else ShortEpoch(source, steps)

    @contextmanager
    def around(self, plan: StepPlan, part: BatchSlice, batch: Any, source: StepSource) -> Iterator[None]:
        """Around the program's lines for ``batch``, the samples of ``part``."""
        if part is plan.slices[0]:
            self._passes, self._samples = [], source.samples
        places = range(plan.offset + part.samples.start, plan.offset + part.samples.stop)
        numbers = tuple(source.numbers(places))
        self._passes.append(PassRecord(part.slot, self._rank, part.weight, numbers, checksum_of(batch)))
        if self._recording.salt:
            seed_everything(derive(self._recording.salt, plan.offset, part.slot))
        with ExitStack() as stack:
            if self._recording.quiet:
                stack.enter_context(Quiet())
            if self._looks_apart:  # so that the graph knows the lines that made it
                stack.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            yield

    # -- losses and gradients ------------------------------------------------------------------------------------------

    @property
    def _looks_apart(self) -> bool:
        return self._recorded < self._recording.apart

    def loss(self, value: torch.Tensor, loss: torch.Tensor, module: nn.Module, only: list[nn.Parameter] | None) -> None:
        """Record the ``value`` that the program gave to ``session.backward``, which goes backward from ``loss``."""
        if not self._passes:
            return
        newest = self._passes[-1]
        record = replace(newest, losses=(*newest.losses, float(value.detach())))
        if self._looks_apart:
            gradient = gradient_of(loss, module, only)
            if gradient is not None and newest.gradient is not None:  # a further loss of the same batch
                gradient = None
            parts = newest.parts or parts_of(value, self._program)
            coarse = newest.coarse or casts(loss)
            record = replace(record, gradient=gradient, parts=parts, coarse=coarse, line=line_in(self._program))
        self._passes[-1] = record

    def reduced(self, step: int, epoch: int, module: nn.Module, settings: Mapping[str, str]) -> None:
        """The gradient of step ``step`` is complete."""
        gradient = {n: Leaf.of(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        before = weights_of(module) if self._recorded == 0 else None
        self._open = {"step": step, "epoch": epoch, "gradient": gradient, "before": before, "settings": dict(settings)}
        self._open["layers"] = layers_of(module) if self._looks_apart else ()

    def committed(self, module: nn.Module) -> None:
        """The program has applied the step."""
        if not self._open:
            return
        self._recorded += 1
        self._open |= {"variables": variables_in(self._program), "samples": self._samples}
        record = StepRecord(passes=tuple(self._passes), weights=weights_of(module), **self._open)
        self._open = {}
        with (Path(self._recording.folder) / f"{self._rank}.jsonl").open("a") as file:
            file.write(f"{encode(record)}\n")

    def begins(self, optimizer: torch.optim.Optimizer, module: nn.Module, rank: int) -> None:
        """A pass over the data begins on worker ``rank``; before the first one the parameters are written."""
        self._rank = rank
        file = Path(self._recording.folder) / BEGINNING
        if not self._recording.beginning or rank or file.exists():
            return
        names = {id(p): name for name, p in module.named_parameters()}
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        kept = {f"{i:06}.{names.get(id(p), '')}": p.detach().cpu().clone() for i, p in enumerate(trained)}
        save_file({name: p.contiguous() for name, p in kept.items()}, file)


class ShortEpoch:
    """The first ``steps`` batches of another source."""

    def __init__(self, source: StepSource, steps: int) -> None:
        self._source = source
        self._steps = steps
        self.turns, self.samples = source.turns, source.samples

    def batches(self, offset: int, size: int) -> Iterator[range]:
        """Those that begin before the end of the epoch."""
        for places in self._source.batches(offset, size):
            if places.start >= self._steps * size:
                return
            yield places

    def length(self, offset: int, size: int) -> int:
        """At most so many steps."""
        whole = self._source.length(offset, size)
        return min(whole, self._steps * size) if whole else 0

    def ends(self, place: int) -> bool:
        """As the other source; a shorter one is known by its length."""
        return self._source.ends(place)

    def checksum(self, places: range) -> int:
        """As the other source."""
        return self._source.checksum(places)

    def numbers(self, places: range) -> list[int]:
        """As the other source."""
        return self._source.numbers(places)

    def fetch(self, parts: Iterator[range]) -> Iterator[Any]:
        """As the other source."""
        return self._source.fetch(parts)

    def probe(self) -> range:
        """As the other source."""
        return self._source.probe()


def layers_of(module: nn.Module) -> tuple[str, ...]:
    """Of ``BATCH_NORM`` and ``DROPOUT`` those that ``module`` has."""
    layers = list(module.modules())
    kinds = {BATCH_NORM: nn.modules.batchnorm._BatchNorm, DROPOUT: nn.modules.dropout._DropoutNd}
    return tuple(name for name, kind in kinds.items() if any(isinstance(each, kind) for each in layers))


def weights_of(module: nn.Module) -> dict[str, Leaf]:
    """The parameters of ``module``, leaf by leaf."""
    return {name: Leaf.of(p) for name, p in module.named_parameters()}


def gradient_of(loss: torch.Tensor, module: nn.Module, only: list[nn.Parameter] | None) -> dict[str, Leaf] | None:
    """The gradient of ``loss`` alone, which stays usable; None where its graph does not allow that."""
    wanted = {id(p) for p in only} if only is not None else None
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad and (wanted is None or id(p) in wanted)]
    try:
        gradients = torch.autograd.grad(loss, [p for _, p in named], retain_graph=True, allow_unused=True)
    except RuntimeError:  # such as a graph with reentrant checkpoints
        return None
    return {name: Leaf.of(g) for (name, _), g in zip(named, gradients, strict=True) if g is not None}


def line_in(program: str) -> int:
    """The line of ``program`` that this thread is at; 0: none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == program:
            return int(frame.f_lineno)
        frame = frame.f_back
    return 0


def variables_in(program: str) -> dict[str, Any]:
    """The plain local variables of the functions of ``program`` that this thread is in: numbers, texts, short lists."""
    variables: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == program and code.co_name != "<module>":
            held = list(frame.f_locals.items())[:MOST_VARIABLES]
            plain = {name: _plain(value) for name, value in held}
            plain |= {f"{name}{SCHEDULE}": each.last_epoch for name, each in held if isinstance(each, SCHEDULERS)}
            variables |= {f"{code.co_name}.{name}": value for name, value in plain.items() if value is not None}
        frame = frame.f_back
    return variables


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str):
        return value if not isinstance(value, str) or len(value) <= MOST_TEXT else None
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, list | tuple | dict) and len(value) <= MOST_ITEMS:
        items = list(value.values()) if isinstance(value, dict) else list(value)
        return repr(value) if items and all(isinstance(each, bool | int | float | str) for each in items) else None
    return None


def parts_of(loss: torch.Tensor, program: str) -> tuple[LossPart, ...]:
    """Where the program reduced to ``loss``: sums and means in its graph, the nearest first; else its last line."""
    parts: list[LossPart] = []
    last = 0
    for node in _nodes(loss):
        line, kind = _line_of(node, program), _kind_of(node)
        last = last or line
        if kind is not None and line:
            parts.append(LossPart(kind, line))
        if len(parts) == MOST_PARTS:
            break
    return tuple(parts) or ((LossPart(OTHER, last),) if last else ())


def casts(loss: torch.Tensor) -> bool:
    """Whether values change their type on the way to ``loss``, as under autocast: gradients then round coarsely."""
    return any(node.name().startswith("ToCopyBackward") for node in _nodes(loss))


def _nodes(loss: torch.Tensor) -> Iterator[Any]:
    """The nodes of the graph of ``loss``, the nearest first, up to ``MOST_NODES``."""
    todo, seen = [loss.grad_fn], set[Any]()
    while todo and len(seen) < MOST_NODES:
        node = todo.pop(0)
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def _kind_of(node: Any) -> str | None:
    name = node.name()
    if name.startswith("SumBackward"):
        return SUM
    if name.startswith("MeanBackward"):
        return MEAN
    return _REDUCTIONS.get(getattr(node, "_saved_reduction", 0))


def _line_of(node: Any, program: str) -> int:
    frames = [place for frame in node.metadata.get("traceback_", ()) for place in _FRAME.findall(frame)]
    return next((int(line) for path, line in reversed(frames) if path == program), 0)
