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

# [streams] The random stream of a micro-batch: it goes from stage to stage as the activations do.


def rng_states() -> list[torch.Tensor]:
    """Where the streams of the CPU and of this worker's accelerator stand."""
    found = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.get_rng_state())
    return found


def restore_rng_states(state: Sequence[torch.Tensor]) -> None:
    """Go on from ``rng_states``, of this worker or another one."""
    # Copies, because torch reads a state from the beginning of its memory, whatever the tensor's place in that.
    torch.set_rng_state(state[0].cpu().clone())
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1].cpu().clone())


# [division] How the arithmetic of one replica is divided: which leaves there are, and how a worker runs its part of a pass.

Until = Callable[[], bool]
"""Whether what a worker waits for has come; asked between two passes."""


def _raised(error: GroupBroken) -> NoReturn:
    raise error


@dataclass
class FailureHooks:
    """What a pass has to know of lost workers; the run tells (``train.checkpoints.run_state``).

    Attributes:
        step_lost: Whether the newest step is lost: the program's lines run on to the end of their batch, and those of
            other workers need not come to the same passes. So none may wait for others, and none means anything.
        meet: What to do where a group breaks in a forward pass. It returns where the pass belongs to a step, which is
            lost then: what the pass returns means nothing.
    """

    step_lost: Callable[[], bool] = lambda: False
    meet: Callable[[GroupBroken], None] = _raised


class ModelParallel(ProcessLocal):
    """One worker's way through a model. This one divides nothing; ``tensor`` and ``pipeline`` override it.

    What lies where is not its business (``owned.store.ParameterStore``): the storage of the leaves that this worker computes
    with (``split.computed``) is there when ``enter`` and the passes are called, and holds the right values.

    Attributes:
        split: The leaves of the WHOLE model, the same on every worker and every mesh.
        parameters: By leaf: the one parameter object that it has on this worker for the whole run, of the leaf's shape.
            At the beginning all have their values, equal on all workers; later the storage of those that this worker
            does not compute with is empty.
        module: What is saved; its names are those of the user's model.
        model: What the user's forward pass calls.
        streams: ``backward`` brings the gradients of nothing but the slice that it was called with, and each at once
            and whole: they may be taken while it runs.
        waits: Others wait for this worker in a pass that counts for nothing, too.
        apart: The workers of a replica run slots of their own (``core.batch_slices.apart``), and samples of their own
            in an evaluation; the slots that ``backward`` yields are those of all of them.
        rescue: Where workers are lost; one object for all divisions of a model.
        evaluates: The program evaluates: others may need this worker until it has come to ``stand_in``.
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
        """Be worker ``comms.rank`` of ``comms.mesh`` from the next step on: at the beginning, and after every change of
        workers or mesh. No collective may be started here: others may not have come as far.
        """

    def told(self, mesh: Mesh) -> tuple[LayersDivided | StagesDivided, ...]:
        """How it is divided on ``mesh``, for the journal."""
        return ()

    def begin_step(self, parts: Sequence[BatchSlice]) -> None:
        """The forward pass of a step's first slice comes next; ``parts`` are all that this worker runs in it."""

    def backward(self, loss: torch.Tensor, part: BatchSlice) -> Iterable[BatchSlice]:
        """Run what is due now that ``loss``, the mean over the samples of ``part``, is there, times ``part.weight``.

        Yields every slice whose gradients have JUST been accumulated into the parameters' ``grad``, in order of slots:
        none at the first calls of a pipeline, several at the last. Whoever iterates takes the gradients away at each,
        so that between two of them there are those of one slice alone. Slices that do not end their slot are yielded
        as well, and their gradients are left to add up (``part.ends_slot``).

        A slice without weight is a copy of another one, for a worker that has no samples: others may wait for what this
        worker does of it, but its gradients count for nothing.
        """
        if part.weight or self.waits:
            (loss * part.weight).backward()
        yield part

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around what a finer division runs of a pass by itself. Raises ``GroupBroken`` where that came to nothing."""
        yield

    def in_parts(self, called: Sequence[str]) -> frozenset[str]:
        """Of modules that a forward pass calls in this order: those before which a value may be in parts, so that a cut
        there would change bits.
        """
        return frozenset()

    def whole(self, value: Any) -> Any:
        """``value``, which is between two layers, of tensors that another worker can go on with."""
        return value

    def begin_evaluation(self) -> None:
        """The program evaluates from here on."""
        self.evaluates = True

    def stand_in(self, until: Until | None = None, *, ends: bool = False) -> None:
        """Where it ``evaluates``, that is over here: take part in forward passes that others make, until none does. See
        ``Replica.stand_in``, also for ``until`` and ``ends``, with which it may go on.
        """

    def abandon(self) -> None:
        """Drop what is under way: passes in flight, and what they have kept."""


Parallelize = Callable[[ModelParallel, ExecutionSettings], ModelParallel]
"""Makes a finer division of another one: "tensor" replaces layers of ``division.module`` by layers of blocks, and
"pipeline" then cuts what there is into stages. Called once on every worker, before anything is taken out of memory."""
