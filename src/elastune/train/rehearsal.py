"""One step of a program without workers: what it computes, keeps and holds, known before anything is launched.

The program's own function runs with a stand-in for the session, up to its first ``session.backward``, on torch's
fake tensors, which have shapes and no memory. ``rehearse_apart`` does it in a process of its own, so fake tensors
that somebody caches end with it. ``refusal_of`` stops at ``session.prepare`` and says whether the mechanism
accepts the model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from elastune.core.errors import UserError
from elastune.core.layout import cut_by_cost
from elastune.core.run import Config, ExecutionSettings, Program
from elastune.parallel.mechanisms.owned.mechanism import blocks_of
from elastune.parallel.mechanisms.pipeline.layers import Layers, layers_of
from elastune.parallel.mechanisms.pipeline.pipeline_parallel import Pipeline, estimated_costs, pipeline_of
from elastune.parallel.mechanisms.registry import Plans, note_plan
from elastune.parallel.mechanisms.tensor.tensor_parallel import chosen
from elastune.parallel.mechanisms.tensor_storage import built_in_parts
from elastune.parallel.sync.registry import refuse_unfit
from elastune.train.compiling import uncompiled
from elastune.train.data.loading import LoaderOptions, fetch, to_device
from elastune.train.data.source import data_request
from elastune.train.models import Prepared
from elastune.train.program.errors import cause_of
from elastune.train.program.load import LoadedProgram, load, merge, process_restored

# [live bytes] The most bytes of tensors that are alive at once while some code runs; fake tensors count as real ones do.
#
# What an operation takes for itself while it runs, and what an allocator rounds up, is not in it.


class LiveBytes(TorchDispatchMode):
    """While it is entered, storages that operations make are counted until nobody has them.

    ``most`` leaves out ``held``, which were there before, and gradients of parameters from where they are complete.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._held = {tensor.untyped_storage()._cdata for tensor in held}
        self._ends: dict[int, weakref.finalize[..., Any]] = {}

    def watch(self, parameters: Iterable[torch.Tensor]) -> list[Any]:
        """Leave their gradients out; the handles end that."""
        return [each.register_post_accumulate_grad_hook(self._complete) for each in parameters if each.requires_grad]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count what it made."""
        made = func(*args, **(kwargs or {}))
        for each in tree_iter(made):
            if isinstance(each, torch.Tensor) and each.layout is torch.strided:
                self._count(each.untyped_storage())
        self.most = max(self.most, self._now)
        return made

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._held and key not in self._ends:
            self._now += size
            self._ends[key] = weakref.finalize(storage, self._gone, key, size)

    def _complete(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        end = self._ends.get(storage._cdata)
        if end is not None and end.detach() is not None:
            self._gone(storage._cdata, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._now -= size
        del self._ends[key]


# [stage parts] What a pipeline's stages would do of a forward pass: seen while one worker runs it whole.

STAGES = 16  # looked at, at most
SEEN = 0.9  # of all operations, in layers: else nobody knows where they are


@dataclass(frozen=True)
class StageProfile:
    """By the number of stages, from one on: which part of all operations the stage has that has most of them, and of
    all parameters. Empty where layers are not seen."""

    flops: tuple[float, ...] = ()
    parameters: tuple[float, ...] = ()


class StageProfiler:
    """Watches the layers of ``model`` that a pipeline cuts; ``flops`` says how many operations there have been."""

    def __init__(self, model: nn.Module, flops: Callable[[], int]) -> None:
        self._plan: Pipeline = pipeline_of(model)
        self._layers: Layers | None = None
        with suppress(UserError):  # nobody can follow them
            self._layers = layers_of(model, self._plan.cuts)
        self._flops = flops
        self._begun: list[int] = []
        self._done = [0.0] * self.count

    @property
    def count(self) -> int:
        """How many layers there are; 1 where nobody can follow them."""
        return 1 if self._layers is None else self._layers.count

    def watch(self) -> list[RemovableHandle]:
        """Until the handles are removed."""
        handles = list[RemovableHandle]()
        if self._layers is None:
            return handles
        users: dict[nn.Module, list[int]] = {}
        for layer in range(self.count):
            for module in self._layers.modules_of(range(layer, layer + 1)):
                users.setdefault(module, []).append(layer)
        for module, layers in users.items():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leaver(layers)))
        return handles

    @property
    def found(self) -> StageProfile:
        """Of the pass so far. Stages are cut by what layers are taken to cost, which need not be operations."""
        whole, done = sum(self._done), self._flops()
        if self._layers is None or not done or whole < SEEN * done:
            return StageProfile()
        costs = self._plan.costs or (self._done if self._plan.example else estimated_costs(self._layers))
        if len(costs) != self.count:
            return StageProfile()
        cuts = [cut_by_cost(costs, stages) for stages in range(1, min(STAGES, self.count) + 1)]
        held = [[sum(p.numel() for p in self._layers.parameters_of(run)) for run in runs] for runs in cuts]
        return StageProfile(
            tuple(max(sum(self._done[i] for i in run) for run in runs) / whole for runs in cuts),
            tuple(max(parts) / max(1, sum(parts)) for parts in held),
        )

    def _enter(self, *_: Any) -> None:
        self._begun.append(self._flops())

    def _leaver(self, layers: list[int]) -> Callable[..., None]:
        """Of a module that several layers call each has one call in so many."""

        def leave(*_: Any) -> None:
            done = self._flops() - self._begun.pop()
            for layer in layers:
                self._done[layer] += done / len(layers)

        return leave


# [tensor parts] What ``tensor`` would divide of a forward pass, and what it would sum: seen while one worker runs it whole.


@dataclass(frozen=True)
class TensorParallelProfile:
    """``whole``: the share of operations in layers that stay whole. ``sums``: forward and backward together, of
    ``summed_bytes``."""

    whole: float
    sums: int
    summed_bytes: float


class TensorParallelProfiler:
    """Watches the layers of ``model`` that are divided unasked; ``flops`` says how many operations there have been.

    A layer by columns sums the gradient of its input, one by rows its output; attention has its output layer inside.
    """

    def __init__(self, model: nn.Module, flops: Callable[[], int]) -> None:
        try:
            ways = chosen(model, 1, None)
        except UserError:
            ways = {}
        self._ways = [(model.get_submodule(name), way) for name, way in ways.items()]
        self._flops = flops
        self._begun: list[int] = []
        self._divided = self._sums = self._bytes = 0

    def watch(self) -> list[RemovableHandle]:
        """Until the handles are removed."""
        handles = []
        for layer, way in self._ways:
            inside = isinstance(layer, nn.MultiheadAttention)
            ends = (way == "columns" or inside, way == "rows" or inside or isinstance(layer, nn.Embedding))
            handles.append(layer.register_forward_pre_hook(self._enter))
            handles.append(layer.register_forward_hook(self._leaver(*ends), with_kwargs=True))
        return handles

    @property
    def found(self) -> TensorParallelProfile:
        """Of the pass so far. Where no divided layer computed anything, nothing is known to stay whole."""
        done = self._flops()
        whole = 1 - self._divided / done if self._divided and done else 0.0
        return TensorParallelProfile(max(0.0, whole), self._sums, float(self._bytes))

    def _enter(self, layer: nn.Module, given: Any) -> None:
        self._begun.append(self._flops())

    def _leaver(self, takes: bool, gives: bool) -> Callable[..., None]:
        def leave(layer: nn.Module, given: Any, named: Any, made: Any) -> None:
            self._divided += self._flops() - self._begun.pop()
            for counts, of in ((takes and not isinstance(layer, nn.Embedding), (given, named)), (gives, made)):
                first = next((each for each in tree_iter(of) if isinstance(each, torch.Tensor)), None)
                if counts and first is not None:
                    self._sums += 1
                    self._bytes += first.numel() * first.element_size()

        return leave


# [rehearsal] One step of a program without workers: what it computes, keeps and holds, told before anything is launched.
#
# The program's own function runs with a session that stands in for the real one, up to its first ``session.backward``,
# on a few samples; then the backward pass and a step of its optimizer follow. It is tried with torch's fake tensors,
# which have shapes and no memory, and where a program looks at values (``.item()``, a branch on a tensor) with real ones.

SAMPLES = (4, 2)  # of a pass, at most: what grows with them is told from what does not


@dataclass(frozen=True)
class ProgramSize:
    """What one step of a program is made of. Bytes and operations are exact, of float32 on one worker.

    Attributes:
        samples: In the training set.
        batch_size: Global, as the program asks for it.
        epochs: As the program asks for them.
        flops: Of one sample in matrix products and convolutions, forward and backward.
        kept_bytes: Of one sample: what its forward pass keeps for the backward pass, parameters left out.
        pass_bytes: Of one sample: what the most tensors that are alive at once in its pass take, without parameters and
            their gradients; without what an operation takes for itself.
        pass_fixed_bytes: The same, whatever the samples: such as a gradient on its way to where it is added up.
        parameter_bytes: With buffers.
        gradient_bytes: Of trainable parameters.
        optimizer_bytes: After the first step.
        layers: Of the chain that a pipeline cuts; 1 where it cannot be followed.
        divided: The share of parameters in layers that ``tensor`` divides.
        fake: Whether no memory was taken for it.
        whole_flops: The part of ``flops`` that ``tensor`` does not divide.
        tensor_sums: How many sums there are along ``tensor`` in one pass, forward and backward; None: not known.
        summed_bytes: Of one sample: what these sum.
        gathered: In how many parts parameters are gathered where each worker holds a share of them.
        fullest: By the number of stages, from one on: the share of ``flops`` in that which has most. Empty: not known.
        fullest_bytes: The same of parameters.
    """

    samples: int
    batch_size: int
    epochs: int
    flops: float
    kept_bytes: float
    pass_bytes: float
    pass_fixed_bytes: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    layers: int
    divided: float
    fake: bool
    whole_flops: float = 0.0
    tensor_sums: int | None = None
    summed_bytes: float = 0.0
    gathered: int = 1
    fullest: tuple[float, ...] = ()
    fullest_bytes: tuple[float, ...] = ()

    @property
    def steps(self) -> int:
        """Of a whole training."""
        return self.epochs * -(-self.samples // self.batch_size)


class Rehearsed(BaseException):
    """The step is over: the program need not go on."""


class Rehearsal:
    """What stands in for a session, up to the end of one step.

    A program that asks its session for what is not here has its own reasons, and is told the name.
    """

    rank, size, epoch, step, samples, turn, seconds = 0, 1, 0, 0, 0, 0, 0.0
    ends_step = leader = True

    def __init__(self, config: Config, seed: int, device: torch.device, most: int) -> None:
        self.config = config
        self.seed = seed
        self.device = device
        self.found: ProgramSize | None = None
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._epochs = 1
        self._asked = (0, 0)  # samples in the training set, in a batch
        self._most = most
        self._taken = 1
        self._counted: _Counted | None = None
        self._kept = 0

    def prepare(self, *given: Any, plan: Any = None) -> tuple[Any, ...]:
        """Nothing is attached."""
        prepared = Prepared.of(given)
        self._model, self._optimizer = prepared.model, prepared.optimizer
        return given

    def track(self, name: str, obj: Any) -> Any:
        """Nothing is kept."""
        return obj

    def once(self, name: str) -> bool:
        """Nothing is done for good."""
        return False

    def epochs(self, count: int) -> Iterator[int]:
        """The first of them."""
        self._epochs = count
        yield 0

    def batches(
        self, data: Any, batch_size: int | None = None, *, train: bool = True, turns: int = 1, **options: Any
    ) -> Iterator[Any]:
        """A few samples of ``data``, once; none where they are not to train on."""
        asked = data_request(data, batch_size, **options)
        if not train:
            return
        if self._model is None:
            raise UserError("session.prepare must come before training", "no model yet", "call session.prepare first")
        samples = asked.source(self.seed)(0).length(0, 1)
        self._asked = (samples, asked.batch_size)
        self._taken = min(self._most, len(asked.dataset), asked.batch_size)
        few = iter([list(range(self._taken))])
        plain = LoaderOptions(asked.loading.collate_fn)
        batch = to_device(next(iter(fetch(asked.dataset, few, plain, self.seed, 0))), self.device)
        with _Counted(self._model, batch) as counted:
            self._counted = counted
            yield batch
        raise UserError("a training pass must call session.backward", "a batch without it", "call it with the loss")

    def backward(self, loss: torch.Tensor, model: nn.Module | None = None, *, more: bool = False) -> None:
        """The rest of the step, and the end."""
        assert self._model is not None
        assert self._optimizer is not None
        assert self._counted is not None
        counted, kept = self._counted, sum(self._counted.kept.values())
        parts, stages = counted.parts, counted.stages.found
        self._kept = kept = max(kept, self._kept)
        loss.backward()
        if more:  # what it has kept is let go of
            counted.kept.clear()
            return
        counted.end()
        self._optimizer.step()
        model, parameters = self._model, list(self._model.parameters())
        state = [v for each in self._optimizer.state.values() for v in each.values() if isinstance(v, torch.Tensor)]
        self.found = ProgramSize(
            *self._asked,
            epochs=self._epochs,
            flops=counted.flops / self._taken,
            kept_bytes=kept / self._taken,
            pass_bytes=counted.live.most / self._taken,
            pass_fixed_bytes=0.0,
            parameter_bytes=_bytes([*parameters, *model.buffers()]),
            gradient_bytes=_bytes([p for p in parameters if p.requires_grad]),
            optimizer_bytes=_bytes(state),
            layers=counted.stages.count,
            divided=_divided(model),
            fake=False,
            whole_flops=counted.flops / self._taken * parts.whole,
            tensor_sums=parts.sums,
            summed_bytes=parts.summed_bytes / self._taken,
            gathered=sum(bool(block.param_blocks) for block in blocks_of(model, parameters)),
            fullest=stages.flops,
            fullest_bytes=stages.parameters,
        )
        raise Rehearsed

    def report(self, **metrics: Any) -> None:
        """Nothing is kept."""


def rehearse(loaded: LoadedProgram, program: Program, config: Config, seed: int = 0) -> ProgramSize:
    """What one step of ``loaded`` is made of, with ``config`` over its own.

    Raises:
        UserError: Where the program fails, with its own error.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    whole = merge(loaded.config, config)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return replace(_both(loaded.train, whole, seed), fake=True)
    except (Exception, SystemExit):  # noqa: BLE001 - values are looked at, or it is wrong: with real tensors it is told which
        pass
    try:
        return _both(loaded.train, whole, seed)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the program raises is the user's to see
        value = cause_of(error, str(program.path.resolve()))
        raise UserError("the program must train with its own settings", value, "mend it, or its --set") from None


def _both(train: Callable[[Any], None], config: Config, seed: int) -> ProgramSize:
    """A pass of more samples and one of fewer, as one."""
    (more, many), (less, few) = (_once(train, config, seed, most) for most in SAMPLES)
    if few == many:
        return more
    whole = more.pass_bytes * many
    each = min(more.pass_bytes, max(0.0, (whole - less.pass_bytes * few) / (many - few)))
    # Few samples may be the most beside a gradient on its way; of many it is what is kept, when the way back begins.
    return replace(more, pass_bytes=max(each, more.kept_bytes), pass_fixed_bytes=whole - each * many)


def _once(train: Callable[[Any], None], config: Config, seed: int, most: int) -> tuple[ProgramSize, int]:
    """What a pass of so many samples at most is made of, and how many they were."""
    session = Rehearsal(dict(config), seed, torch.device("cpu"), most)
    with process_restored(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            train(session)
        except Rehearsed:
            assert session.found is not None
            return session.found, session._taken
    raise UserError("a program must train", "no session.backward was called", "call session.backward(loss)")


class _Counted:
    """While it is entered: ``flops``, bytes ``kept`` for the backward pass by storage, and what is ``live`` at most."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        from torch.utils.flop_counter import FlopCounterMode  # takes long to import

        self.flops = 0.0
        self.kept: dict[int, int] = {}
        state = [*model.parameters(), *model.buffers()]
        self._held = {each.untyped_storage()._cdata for each in state}
        self.live = LiveBytes([*state, *(each for each in tree_iter(batch) if isinstance(each, torch.Tensor))])
        self._counter = FlopCounterMode(display=False)
        self._modes = ExitStack()
        self._parameters = list(model.parameters())
        self._tensor = TensorParallelProfiler(model, self._counter.get_total_flops)
        self.stages = StageProfiler(model, self._counter.get_total_flops)

    @property
    def parts(self) -> TensorParallelProfile:
        """What ``tensor`` would make of the forward pass that has been."""
        return self._tensor.found

    def __enter__(self) -> _Counted:
        if "torch._dynamo" in sys.modules:  # the program compiles: each operation is to be seen
            self._modes.enter_context(uncompiled())
        self._modes.enter_context(self._counter)
        self._modes.enter_context(self.live)
        for handle in (*self.live.watch(self._parameters), *self._tensor.watch(), *self.stages.watch()):
            self._modes.callback(handle.remove)
        self._modes.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept))
        return self

    def end(self) -> None:
        """No more is counted."""
        self._modes.close()
        self.flops = float(self._counter.get_total_flops())

    def __exit__(self, *error: object) -> None:
        self.end()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            self.kept[storage._cdata] = storage.nbytes()
        return tensor


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _divided(model: nn.Module) -> float:
    """The share of parameters in layers that tensor parallelism divides by itself."""
    try:
        ways = chosen(model, 1, None)
    except UserError:
        return 0.0
    inside = {id(p): p.numel() for name in ways for p in model.get_submodule(name).parameters()}
    whole = sum(p.numel() for p in model.parameters())
    return sum(inside.values()) / whole if whole else 0.0


# [examine] A program's model before any worker starts: would its mechanism take it?
#
# The program's own function runs with a session that stands in for the real one, up to ``session.prepare``, with torch's
# fake tensors, which have shapes and no memory. What the mechanism would refuse at that place on every worker is then
# known. A refusal that fake tensors brought is told once real ones have brought it, too: a model that looks at values
# while it is traced would be refused without reason.


class _Handed(BaseException):
    """The program has given its models; not an ``Exception``, so that its lines do not swallow it."""

    def __init__(self, given: tuple[Any, ...], plan: Plans | None) -> None:
        super().__init__()
        self.given = given
        self.plan = plan


class _UpToPrepare(Rehearsal):
    """Stands in for a session up to ``prepare``."""

    def __init__(self, config: Config, seed: int, workers: int, context: AbstractContextManager[None]) -> None:
        super().__init__(config, seed, torch.device("cpu"), most=1)
        self.size = workers
        self._context = context

    def model_context(self) -> AbstractContextManager[None]:
        """As ``Session.model_context``."""
        return self._context

    def prepare(self, *given: Any, plan: Plans | None = None) -> tuple[Any, ...]:
        """The end."""
        raise _Handed(given, plan)


def refusal_of(
    loaded: LoadedProgram, config: Config, execution: ExecutionSettings, folder: Path, seed: int = 0
) -> UserError | None:
    """Why ``session.prepare`` of ``loaded``, with ``config`` over its own, would refuse what the program gives it.

    Args:
        folder: For the parameters of a model that is built under ``session.model_context()``.

    Returns:
        None where it would not, and where nobody can tell: the program fails, or ends, before it comes there.
    """
    whole = merge(loaded.config, config)

    def found(fake: bool) -> UserError | None:
        context = nullcontext() if fake else built_in_parts(execution, folder)
        session = _UpToPrepare(dict(whole), seed, execution.workers, context)
        handed = _handed(loaded.train, session, fake)
        try:
            prepared = Prepared.of(handed.given)
            prepared.check(execution.mechanism)
            note_plan(prepared.model, handed.plan)
            refuse_unfit(prepared.model, prepared.optimizer, execution)
        except UserError as error:
            return error
        return None

    with suppress(Exception, SystemExit):  # a program that looks at values: real ones tell
        if found(fake=True) is None:
            return None
    with suppress(Exception, SystemExit):  # then workers tell: the program's own error, at its own place
        return found(fake=False)
    return None


def _handed(train: Callable[[Any], None], session: _UpToPrepare, fake: bool) -> _Handed:
    """What the program gives to ``session.prepare``. Raises whatever it does on the way."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as stack:
        stack.enter_context(process_restored())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        torch.manual_seed(session.seed)
        try:
            train(session)
        except _Handed as handed:
            return handed
    raise UserError("a program must train", "session.prepare was not called", "call it with model and optimizer")


# [rehearse apart] A program's rehearsal in a process of its own: fake tensors that somebody caches, as of a data set, end with it.


def rehearse_apart(program: Program, config: Config, seed: int = 0) -> ProgramSize:
    """As ``rehearse``; what the program prints goes to stderr.

    Raises:
        UserError: Where the program fails, with its own error, or its process dies.
    """
    with tempfile.TemporaryDirectory(prefix="elastune-rehearsal-") as folder:
        asked, told = Path(folder) / "asked.json", Path(folder) / "told.json"
        asked.write_text(
            json.dumps({"path": str(program.path), "train": program.train, "config": config, "seed": seed})
        )
        command = [sys.executable, "-m", "elastune.train.rehearsal", str(asked), str(told)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False)
        if done.returncode != 0 or not told.exists():
            value = f"exit code {done.returncode}"
            raise UserError(
                "a program's rehearsal must come to its end", value, "see what it printed; is memory short?"
            )
        found = json.loads(told.read_text())
    if "error" in found:
        raise UserError(*found["error"])
    found |= {name: tuple(told) for name, told in found.items() if isinstance(told, list)}
    return ProgramSize(**found)


def main() -> int:
    """The process: reads what is asked from its first argument, writes the answer to its second."""
    asked, told = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    program = Program(Path(asked["path"]), asked["train"])
    try:
        answer = asdict(rehearse(load(program), program, asked["config"], asked["seed"]))
    except UserError as error:
        answer = {"error": error.told}
    told.write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
