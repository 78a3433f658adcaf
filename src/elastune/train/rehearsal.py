"""One step of a program without workers: what it computes, keeps and holds, told before anything is launched.

The program's own function runs with a session that stands in for the real one, up to its first ``session.backward``,
on a few samples; then the backward pass and a step of its optimizer follow. It is tried with torch's fake tensors,
which have shapes and no memory, and where a program looks at values (``.item()``, a branch on a tensor) with real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from elastune.core.errors import UserError
from elastune.core.run import Config, Program
from elastune.mechanisms.owned.blocks import blocks_of
from elastune.mechanisms.tensor.plan import chosen
from elastune.train.compiling import uncompiled
from elastune.train.data.asked import asked_of
from elastune.train.data.loading import Loading, fetch, to_device
from elastune.train.live_bytes import LiveBytes
from elastune.train.program.causes import cause_of
from elastune.train.program.guest import as_guest
from elastune.train.program.load import LoadedProgram, merge
from elastune.train.several import Prepared
from elastune.train.stage_parts import StageParts
from elastune.train.tensor_parts import PartsFound, TensorParts

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
        asked = asked_of(data, batch_size, **options)
        if not train:
            return
        if self._model is None:
            raise UserError("session.prepare must come before training", "no model yet", "call session.prepare first")
        samples = asked.source(self.seed)(0).length(0, 1)
        self._asked = (samples, asked.batch_size)
        self._taken = min(self._most, len(asked.dataset), asked.batch_size)
        few = iter([list(range(self._taken))])
        plain = Loading(asked.loading.collate_fn)
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
            gathered=sum(bool(block.leaves) for block in blocks_of(model, parameters)),
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
    with as_guest(), torch.random.fork_rng(devices=[]):
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
        self._tensor = TensorParts(model, self._counter.get_total_flops)
        self.stages = StageParts(model, self._counter.get_total_flops)

    @property
    def parts(self) -> PartsFound:
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
