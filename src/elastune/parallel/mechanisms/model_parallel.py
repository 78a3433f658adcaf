"""The contract of model parallelism: how the arithmetic of one replica is divided among its workers.

A division says which parameter blocks the model has and how a worker runs its part of a pass.
The random stream of a micro-batch travels with its activations, so that dropout draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from elastune.core.batch_slices import BatchSlice
from elastune.core.journal.records import LayersDivided, StagesDivided
from elastune.core.layout import Split, undivided_blocks
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.guards import ProcessLocal

Until = Callable[[], bool]
"""Whether the event that a worker waits for has happened. Called between two passes."""


class ModelParallel(ProcessLocal):
    """How one worker runs its part of a model's passes. This class divides nothing; ``tensor`` and ``pipeline`` do.

    It does not decide which worker holds a parameter (``owned.store.ParameterStore`` does). When ``enter`` and the
    passes are called, the parameter blocks that this worker computes with (``split.computed``) have storage and values.

    Attributes:
        split: The parameter blocks of the WHOLE model, the same on every worker and every mesh.
        parameters: One parameter object a block, which stays the same for the whole run and has the block's shape. At
            the beginning all have their values, equal on all workers. Later the storage of those that this worker does
            not compute with is empty.
        module: The module that is saved; its names are those of the user's model.
        model: The module that the user's forward pass calls.
        failure_hooks: What passes need where workers are lost; one object for all divisions of a model.
        streams: ``backward`` gives only gradients of the slice that it was called with, each once and whole. So they
            may be taken while it runs.
        waits: Other workers wait for this one also in a pass whose result does not count.
        apart: The workers of a replica run slots of their own (``core.batch_slices.apart``), and samples of their own
            in an evaluation. ``backward`` yields the slots of all of them.
        evaluates: The program evaluates: others may need this worker until it has called ``stand_in``.
    """

    split: Split
    parameters: list[nn.Parameter]
    module: nn.Module
    model: nn.Module
    failure_hooks: FailureHooks
    streams = True
    waits = False
    apart = False
    evaluates = False

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_parameters())
        self.split = undivided_blocks([(name, tuple(p.shape), str(p.dtype)[6:], p.requires_grad) for name, p in named])
        self.parameters = [p for _, p in named]
        self.module = self.model = module
        self.failure_hooks = FailureHooks()

    def enter(self, comms: Comms) -> None:
        """Take the place of worker ``comms.rank`` in ``comms.mesh`` from the next step on.

        Called at the beginning and after every change of workers or mesh. It must start no collective, because other
        workers may not have come this far.
        """

    def division_records(self, mesh: Mesh) -> tuple[LayersDivided | StagesDivided, ...]:
        """How the model is divided on ``mesh``, for the journal."""
        return ()

    def begin_step(self, parts: Sequence[BatchSlice]) -> None:
        """Begin a step. ``parts``: all slices that this worker runs in it."""

    def backward(self, loss: torch.Tensor, part: BatchSlice) -> Iterable[BatchSlice]:
        """Run the backward passes that are due with ``loss`` (the mean over the samples of ``part``) and its weight.

        A slice without weight is a copy of another one, for a worker that has no samples. Other workers may wait for
        this worker's part of it, but its gradients do not count.

        Yields:
            Every slice whose gradients have JUST been accumulated into the parameters' ``grad``, in order of slots:
            none at the first calls of a pipeline, several at the last. The caller takes the gradients away at each, so
            that they are always those of one slice. Slices that do not end their slot are yielded too, and their
            gradients stay and add up (``part.ends_slot``).
        """
        if part.weight or self.waits:
            (loss * part.weight).backward()
        yield part

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context for a part of a pass that another division runs. Raises ``GroupBroken`` if that failed."""
        yield

    def in_parts(self, called: Sequence[str]) -> frozenset[str]:
        """The modules of ``called`` (in the order of a forward pass) before which a pipeline must not cut the model.

        A value before such a module may be in parts, so that a cut would change bits.
        """
        return frozenset()

    def whole(self, value: Any) -> Any:
        """``value``, from between two layers, with tensors that are in parts made whole, so that it can be sent."""
        return value

    def begin_evaluation(self) -> None:
        """Record that the program evaluates from here on."""
        self.evaluates = True

    def stand_in(self, until: Until | None = None, *, ends: bool = False) -> None:
        """End this worker's evaluation: take part in forward passes of others until none makes any. See
        ``Replica.stand_in``, also for ``until`` and ``ends``, with which the evaluation may go on.
        """

    def abandon(self) -> None:
        """Drop all unfinished passes, and everything that they keep."""


Parallelize = Callable[[ModelParallel, ExecutionSettings], ModelParallel]
"""Makes a finer division of a given one: "tensor" replaces layers of ``division.module`` by layers of blocks, and
"pipeline" then cuts the result into stages. Called once on every worker, before any storage is freed."""


def _raised(error: GroupBroken) -> NoReturn:
    raise error


@dataclass
class FailureHooks:
    """How a pass learns of lost workers and reports them; the run sets both (``train.checkpoints.run_state``).

    Attributes:
        step_lost: Whether the newest step is lost. The program then runs on to the end of its batch, and other workers
            may not make the same passes. So no pass may wait for others, and no result counts.
        meet: Called where a group breaks in a forward pass. It returns if the pass belongs to a step: that step is
            lost, and the result of the pass does not count.
    """

    step_lost: Callable[[], bool] = lambda: False
    meet: Callable[[GroupBroken], None] = _raised


def rng_states() -> list[torch.Tensor]:
    """The states of the random streams of the CPU and of this worker's accelerator.

    A micro-batch's stream travels from stage to stage with its activations.
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def restore_rng_states(state: Sequence[torch.Tensor]) -> None:
    """Continue the random streams from ``rng_states`` of this worker or another one."""
    # Copies, because torch reads a state from the start of its storage and ignores the tensor's offset.
    torch.set_rng_state(state[0].cpu().clone())
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1].cpu().clone())
