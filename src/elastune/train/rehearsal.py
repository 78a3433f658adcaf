"""One step of a program without workers: its operations, memory and samples, known before anything is launched.

The program's own function runs with a stand-in for the session, up to its first ``session.backward``, on a few samples;
then the backward pass and a step of its optimizer follow. Torch's fake tensors have shapes and no memory. Where a
program looks at values (``.item()``, a branch on a tensor), real tensors take their place.

``rehearse_apart`` does it in a process of its own, so fake tensors that a program caches, as of a data set, end with
it. ``refusal_of`` stops at ``session.prepare`` and returns why the mechanism refuses the model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
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
from elastune.train.data.source import Batches, DataRequest, data_request
from elastune.train.models import Prepared
from elastune.train.program.errors import cause_of
from elastune.train.program.load import LoadedProgram, load, merge, process_restored

SAMPLES = (4, 2)  # of two passes, at most: their difference is what grows with the samples
STAGES = 16  # the most that are examined
SEEN = 0.9  # the least share of operations in layers; with less the stages are not known


@dataclass(frozen=True)
class ProgramSize:
    """The size of one step of a program. Bytes and operations are exact, of float32 on one worker.

    Attributes:
        samples: Samples in the training set.
        batch_size: The global batch size that the program asks for.
        epochs: The epochs that the program asks for.
        flops: Operations of one sample in matrix products and convolutions, forward and backward.
        kept_bytes: Bytes of one sample that its forward pass keeps for the backward pass, parameters left out.
        pass_bytes: Bytes of one sample in the tensors that are alive at once in its pass, at most. Parameters, their
            gradients, and memory that an operation takes for itself are left out.
        pass_fixed_bytes: The part of these bytes that does not grow with the samples, such as a gradient before it is
            added up.
        parameter_bytes: Bytes of parameters and buffers.
        gradient_bytes: Bytes of the gradients of trainable parameters.
        optimizer_bytes: Bytes of the optimizer's state after the first step.
        layers: Layers of the chain that a pipeline cuts; 1 where it cannot be followed.
        divided: The share of parameters in layers that ``tensor`` divides.
        fake: Whether fake tensors were enough, so that no memory was taken.
        whole_flops: The part of ``flops`` that ``tensor`` does not divide.
        tensor_sums: The sums along ``tensor`` in one pass, forward and backward; None: not known.
        summed_bytes: Bytes of one sample in these sums.
        gathered: The parts in which parameters are gathered, where each worker holds a share of them.
        fullest: The share of ``flops`` in the fullest stage, by the number of stages, from one on. Empty: not known.
        fullest_bytes: The share of parameters in the fullest stage, likewise.
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
        """The steps of a whole training."""
        return self.epochs * -(-self.samples // self.batch_size)


def rehearse_apart(program: Program, config: Config, seed: int = 0) -> ProgramSize:
    """Rehearse ``program`` in a process of its own, whose output goes to stderr.

    Raises:
        UserError: Where the program fails, with its own error, or its process dies.
    """
    with tempfile.TemporaryDirectory(prefix="elastune-rehearsal-") as folder:
        request, reply = Path(folder) / "request.json", Path(folder) / "reply.json"
        task = {"path": str(program.path), "train": program.train, "arguments": list(program.arguments)}
        request.write_text(json.dumps({**task, "config": config, "seed": seed}))
        command = [sys.executable, "-m", "elastune.train.rehearsal", str(request), str(reply)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False)
        if done.returncode != 0 or not reply.exists():
            value = f"exit code {done.returncode}"
            raise UserError(
                "a program's rehearsal must come to its end", value, "see what it printed; is memory short?"
            )
        fields = json.loads(reply.read_text())
    if "error" in fields:
        raise UserError(*fields["error"])
    fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return ProgramSize(**fields)


def rehearse(loaded: LoadedProgram, program: Program, config: Config, seed: int = 0) -> ProgramSize:
    """The size of one step of ``loaded``, with ``config`` over the program's own settings.

    Raises:
        UserError: Where the program fails, with its own error.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    whole = merge(loaded.config, config)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return replace(_both(loaded.train, whole, seed), fake=True)
    except (Exception, SystemExit):  # noqa: BLE001 - it looks at values, or it is wrong: real tensors show which
        pass
    try:
        return _both(loaded.train, whole, seed)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the program raises is the user's to see
        value = cause_of(error, str(program.path.resolve()))
        raise UserError("the program must train with its own settings", value, "mend it, or its --set") from None


def _both(train: Callable[[Any], None], config: Config, seed: int) -> ProgramSize:
    """Rehearse with more and with fewer samples, to know what grows with them."""
    (more, many), (less, few) = (_once(train, config, seed, most) for most in SAMPLES)
    if few == many:
        return more
    whole = more.pass_bytes * many
    each = min(more.pass_bytes, max(0.0, (whole - less.pass_bytes * few) / (many - few)))
    # With few samples a gradient may make the peak; with many it is what is kept when the backward pass begins.
    return replace(more, pass_bytes=max(each, more.kept_bytes), pass_fixed_bytes=whole - each * many)


def _once(train: Callable[[Any], None], config: Config, seed: int, most: int) -> tuple[ProgramSize, int]:
    """The size of a step with at most ``most`` samples, and the number of its samples."""
    session = Rehearsal(dict(config), seed, torch.device("cpu"), most)
    with process_restored(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            train(session)
        except Rehearsed:
            assert session.program_size is not None
            return session.program_size, session._taken
    raise UserError("a program must train", "no session.backward was called", "call session.backward(loss)")


class Rehearsed(BaseException):
    """The step is over: it ends the program's function."""


class Rehearsal:
    """Stands in for a session, up to the end of one step.

    It has the methods and properties of ``Session`` that programs use up to their first backward pass. For others the
    program gets Python's error with their name.

    Attributes:
        program_size: The size of the step, once it is over.
    """

    rank, size, epoch, step, batch_index, samples, turn, seconds = 0, 1, 0, 0, 0, 0, 0, 0.0
    ends_step = leader = True

    def __init__(self, config: Config, seed: int, device: torch.device, most: int) -> None:
        self.config = config
        self.seed = seed
        self.device = device
        self.program_size: ProgramSize | None = None
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._epochs = 1
        self._sizes = (0, 0)  # samples in the training set, in a batch
        self._most = most
        self._taken = 1
        self._counted: _Counted | None = None
        self._kept = 0

    def prepare(self, *objects: Any, plan: Any = None) -> tuple[Any, ...]:
        """Remember model and optimizer; nothing is attached."""
        prepared = Prepared.of(objects)
        self._model, self._optimizer = prepared.model, prepared.optimizer
        return objects

    def track(self, name: str, obj: Any) -> Any:
        """Return ``obj``; nothing is kept."""
        return obj

    def once(self, name: str) -> bool:
        """Return False: a rehearsal has no side effects."""
        return False

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the first epoch."""
        self._epochs = count
        yield 0

    def batches(
        self, data: Any, batch_size: int | None = None, *, train: bool = True, turns: int = 1, **options: Any
    ) -> Batches:
        """Return one batch of a few samples of ``data``; of an evaluation none."""
        request = data_request(data, batch_size, **options)
        count = None if request.streams else -(-len(request.dataset) // request.batch_size)
        return Batches(self._batches(request, train), lambda: count)

    def _batches(self, request: DataRequest, train: bool) -> Generator[Any, None, None]:
        if not train:
            return
        if self._model is None:
            raise UserError("session.prepare must come before training", "no model yet", "call session.prepare first")
        samples = request.source(self.seed)(0).length(0, 1)
        self._sizes = (samples, request.batch_size)
        self._taken = min(self._most, len(request.dataset), request.batch_size)
        few = iter([list(range(self._taken))])
        plain = LoaderOptions(request.loading.collate_fn)
        batch = to_device(next(iter(fetch(request.dataset, few, plain, self.seed, 0))), self.device)
        with _Counted(self._model, batch) as counted:
            self._counted = counted
            yield batch
        raise UserError("a training pass must call session.backward", "a batch without it", "call it with the loss")

    def backward(
        self,
        loss: torch.Tensor,
        model: nn.Module | None = None,
        *,
        reduction: str = "mean",
        count: Any = None,
        more: bool = False,
    ) -> None:
        """Run the rest of the step, keep its size, and raise ``Rehearsed``."""
        assert self._model is not None
        assert self._optimizer is not None
        assert self._counted is not None
        counted, kept = self._counted, sum(self._counted.kept.values())
        parts, stages = counted.parts, counted.stages.profile
        self._kept = kept = max(kept, self._kept)
        loss.backward()
        if more:  # its kept tensors are freed
            counted.kept.clear()
            return
        counted.end()
        self._optimizer.step()
        model, parameters = self._model, list(self._model.parameters())
        state = [v for each in self._optimizer.state.values() for v in each.values() if isinstance(v, torch.Tensor)]
        self.program_size = ProgramSize(
            *self._sizes,
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

    def backward_global(self, loss: Callable[..., torch.Tensor], encode: Callable[..., Any], *inputs: Any) -> None:
        """As ``backward``, of the loss of these samples alone."""
        features = encode(*inputs)
        self.backward(loss(features) if isinstance(features, torch.Tensor) else loss(*features))

    def report(self, **metrics: Any) -> None:
        """Nothing is kept."""


# --- does the mechanism accept the model? ---


def refusal_of(
    loaded: LoadedProgram, config: Config, execution: ExecutionSettings, folder: Path, seed: int = 0
) -> UserError | None:
    """Why ``session.prepare`` would refuse the model of ``loaded``, known before any worker starts.

    A refusal on fake tensors counts only if real tensors bring it too: a model that looks at values while it is traced
    would be refused without reason.

    Args:
        loaded: The program.
        config: Settings over the program's own.
        execution: Has the mechanism that is to take the model.
        folder: For the parameters of a model that is built under ``session.model_context()``.
        seed: The run's seed.

    Returns:
        None where ``session.prepare`` would accept the model, or where the program fails or ends before it.
    """
    whole = merge(loaded.config, config)

    def refusal(fake: bool) -> UserError | None:
        context = nullcontext() if fake else built_in_parts(execution, folder)
        session = _UpToPrepare(dict(whole), seed, execution.workers, context)
        handed = _handed(loaded.train, session, fake)
        try:
            prepared = Prepared.of(handed.objects)
            prepared.check(execution.mechanism)
            note_plan(prepared.model, handed.plan)
            refuse_unfit(prepared.model, prepared.optimizer, execution)
        except UserError as error:
            return error
        return None

    with suppress(Exception, SystemExit):  # a program that looks at values: real tensors show
        if refusal(fake=True) is None:
            return None
    with suppress(Exception, SystemExit):  # the workers will report the program's own error, at its own place
        return refusal(fake=False)
    return None


def _handed(train: Callable[[Any], None], session: _UpToPrepare, fake: bool) -> _Handed:
    """The arguments of the program's ``session.prepare``. Raises the program's own errors before it."""
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


class _Handed(BaseException):
    """The program has called ``prepare``; not an ``Exception``, so that its lines do not swallow it."""

    def __init__(self, objects: tuple[Any, ...], plan: Plans | None) -> None:
        super().__init__()
        self.objects = objects
        self.plan = plan


class _UpToPrepare(Rehearsal):
    """Stands in for a session up to ``prepare``."""

    def __init__(self, config: Config, seed: int, workers: int, context: AbstractContextManager[None]) -> None:
        super().__init__(config, seed, torch.device("cpu"), most=1)
        self.size = workers
        self._context = context

    def model_context(self) -> AbstractContextManager[None]:
        """Return a context like that of ``Session.model_context``."""
        return self._context

    def prepare(self, *objects: Any, plan: Plans | None = None) -> tuple[Any, ...]:
        """End the program's function."""
        raise _Handed(objects, plan)


# --- counting while the step runs ---


class _Counted:
    """Counts while it is entered.

    Attributes:
        flops: Operations.
        kept: Bytes kept for the backward pass, by storage.
        live: The most bytes that are alive at once.
        stages: The operations of layers that a pipeline cuts.
    """

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
        """What ``tensor`` would divide of the forward pass that has run."""
        return self._tensor.profile

    def __enter__(self) -> _Counted:
        if "torch._dynamo" in sys.modules:  # the program compiles: run it uncompiled, so that each operation is seen
            self._modes.enter_context(uncompiled())
        self._modes.enter_context(self._counter)
        self._modes.enter_context(self.live)
        for handle in (*self.live.watch(self._parameters), *self._tensor.watch(), *self.stages.watch()):
            self._modes.callback(handle.remove)
        self._modes.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept))
        return self

    def end(self) -> None:
        """Stop counting."""
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
        splits = chosen(model, 1, None)
    except UserError:
        return 0.0
    divided = {id(p): p.numel() for name in splits for p in model.get_submodule(name).parameters()}
    whole = sum(p.numel() for p in model.parameters())
    return sum(divided.values()) / whole if whole else 0.0


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that are alive at once while some code runs; fake tensors count as real tensors do.

    While it is entered, each storage that an operation makes counts until it is freed. Not counted are ``held``, the
    tensors from before; gradients of parameters once they are complete; memory that an operation takes for itself
    while it runs; and what an allocator rounds up.

    Attributes:
        most: The most bytes so far.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._held = {tensor.untyped_storage()._cdata for tensor in held}
        self._ends: dict[int, weakref.finalize[..., Any]] = {}

    def watch(self, parameters: Iterable[torch.Tensor]) -> list[Any]:
        """Do not count complete gradients of ``parameters``, until the returned handles are removed."""
        return [each.register_post_accumulate_grad_hook(self._complete) for each in parameters if each.requires_grad]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and count the tensors that it makes."""
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


@dataclass(frozen=True)
class StageProfile:
    """How even a pipeline's stages are, by the number of stages, from one on. Empty where layers are not seen.

    Attributes:
        flops: The share of all operations in the stage that has most.
        parameters: The share of all parameters in the stage that has most.
    """

    flops: tuple[float, ...] = ()
    parameters: tuple[float, ...] = ()


class StageProfiler:
    """Counts the operations in each layer that a pipeline could cut ``model`` by, while one worker runs it whole.

    ``flops`` returns the operations so far.
    """

    def __init__(self, model: nn.Module, flops: Callable[[], int]) -> None:
        self._plan: Pipeline = pipeline_of(model)
        self._layers: Layers | None = None
        with suppress(UserError):  # the layers cannot be followed
            self._layers = layers_of(model, self._plan.cuts)
        self._flops = flops
        self._start_flops: list[int] = []
        self._done = [0.0] * self.count

    @property
    def count(self) -> int:
        """The number of layers; 1 where they cannot be followed."""
        return 1 if self._layers is None else self._layers.count

    def watch(self) -> list[RemovableHandle]:
        """Count until the returned handles are removed."""
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
    def profile(self) -> StageProfile:
        """The profile of the pass so far. Stages are cut by estimated costs of layers, which need not be operations."""
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
        self._start_flops.append(self._flops())

    def _leaver(self, layers: list[int]) -> Callable[..., None]:
        """A hook for a module of ``layers``: each of them makes an equal share of its calls."""

        def leave(*_: Any) -> None:
            done = self._flops() - self._start_flops.pop()
            for layer in layers:
                self._done[layer] += done / len(layers)

        return leave


@dataclass(frozen=True)
class TensorParallelProfile:
    """What the mechanism ``tensor`` would divide of a pass, and what it would sum.

    Attributes:
        whole: The share of operations in layers that stay whole.
        sums: The number of sums, forward and backward.
        summed_bytes: The bytes that they sum.
    """

    whole: float
    sums: int
    summed_bytes: float


class TensorParallelProfiler:
    """Counts operations and sums of the layers that ``tensor`` divides by itself, while one worker runs them whole.

    A layer divided by columns sums the gradient of its input; a layer divided by rows sums its output. Attention
    contains its output layer. ``flops`` returns the operations so far.
    """

    def __init__(self, model: nn.Module, flops: Callable[[], int]) -> None:
        try:
            splits = chosen(model, 1, None)
        except UserError:
            splits = {}
        self._splits = [(model.get_submodule(name), split) for name, split in splits.items()]
        self._flops = flops
        self._start_flops: list[int] = []
        self._divided = self._sums = self._bytes = 0

    def watch(self) -> list[RemovableHandle]:
        """Count until the returned handles are removed."""
        handles = []
        for layer, split in self._splits:
            inside = isinstance(layer, nn.MultiheadAttention)
            ends = (split == "columns" or inside, split == "rows" or inside or isinstance(layer, nn.Embedding))
            handles.append(layer.register_forward_pre_hook(self._enter))
            handles.append(layer.register_forward_hook(self._leaver(*ends), with_kwargs=True))
        return handles

    @property
    def profile(self) -> TensorParallelProfile:
        """The profile of the pass so far. Where no divided layer has computed anything, ``whole`` is 0."""
        done = self._flops()
        whole = 1 - self._divided / done if self._divided and done else 0.0
        return TensorParallelProfile(max(0.0, whole), self._sums, float(self._bytes))

    def _enter(self, layer: nn.Module, args: Any) -> None:
        self._start_flops.append(self._flops())

    def _leaver(self, takes: bool, gives: bool) -> Callable[..., None]:
        def leave(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._divided += self._flops() - self._start_flops.pop()
            for counts, values in ((takes and not isinstance(layer, nn.Embedding), (args, kwargs)), (gives, output)):
                first = next((each for each in tree_iter(values) if isinstance(each, torch.Tensor)), None)
                if counts and first is not None:
                    self._sums += 1
                    self._bytes += first.numel() * first.element_size()

        return leave


def main() -> int:
    """The process: read the request from the file of its first argument, write the reply to that of its second."""
    request, reply = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    program = Program(Path(request["path"]), request["train"], arguments=tuple(request["arguments"]))
    config, seed = request["config"], request["seed"]
    try:
        answer = asdict(rehearse(load(program, seed, config), program, config, seed))
    except UserError as error:
        answer = {"error": error.parts}
    reply.write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
