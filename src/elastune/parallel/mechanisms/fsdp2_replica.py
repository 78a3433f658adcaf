"""One worker's rows of a model that ``fully_shard`` divides, also with gradients summed in canonical order.

``fsdp2`` imports this module only when a model is attached: FSDP2 takes long to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from elastune.core.errors import UserError
from elastune.core.layout import FlatRange, whole_range
from elastune.core.slots import BatchSlice, cut, subtrees, tree_sum
from elastune.parallel.comm.exact import SlotSums
from elastune.parallel.comm.group import Group, Work
from elastune.parallel.comm.norms import clip_factor, global_norm, squares_of_rows
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms import torch_private
from elastune.parallel.mechanisms.engine import EngineReplica, EngineTensors, SlotEngine
from elastune.parallel.mechanisms.owned.placement import VALUES
from elastune.parallel.mechanisms.tensor_storage import PartialTensor, elements, whole


class Fsdp2Replica(EngineReplica):
    """One worker's rows of a model. The module stays the user's object, but ``fully_shard`` replaces its parameters."""

    gathers = True
    in_pieces = True

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms) -> None:
        whole = dict(module.named_parameters(remove_duplicate=False))
        super().__init__(module, optimizer, comms)
        self.equal_passes = True
        self._mesh = DeviceMesh(next(module.parameters()).device.type, list(range(comms.everyone.size)))
        for block in (*_blocks(module), module):
            fully_shard(block, mesh=self._mesh)
            assert isinstance(block, FSDPModule)
            block.set_gradient_divide_factor(1.0)
            block.set_force_sum_reduction_for_comms(True)  # else FSDP uses a reduction in fp32 that gloo lacks
        rows = {id(whole[name]): p for name, p in module.named_parameters(remove_duplicate=False)}
        for group in optimizer.param_groups:
            group["params"] = [rows[id(p)] for p in group["params"]]
        self._order = [list(group["params"]) for group in optimizer.param_groups]
        self.params = [p for p in module.parameters() if p.requires_grad]
        self._whole = False
        step, clear = optimizer.step, optimizer.zero_grad
        self.take_over_steps(lambda: _ignored(step()), clear)

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, parts: Sequence[BatchSlice] = ()) -> None:
        super().begin_step(parts)
        self._hold_whole(False)

    def run(self, loss: torch.Tensor, part: BatchSlice) -> None:
        self._restore()
        (loss * part.weight).backward()

    def clip(self, max_norm: float) -> float:
        gradients = [p.grad for p in self.params if p.grad is not None]
        return self.clip_divided([local(gradient) for gradient in gradients], max_norm)

    def held(self) -> EngineTensors:
        gradients = [local(grad) for grad in super().held().gradients if grad is not None]
        states = [
            {key: local(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
            for state in self.optimizer.state.values()
        ]
        return EngineTensors([local(p.detach()) for p in self.module.parameters()], gradients, states)

    def gather(self) -> None:
        self._hold_whole(True)

    def _hold_whole(self, whole: bool) -> None:
        """Keep parameters whole on this worker between forward passes, or stop it."""
        if whole == self._whole:
            return
        self._whole = whole
        for block in self.module.modules():
            if isinstance(block, FSDPModule):
                block.set_reshard_after_forward(not whole, recurse=False)
                block.unshard() if whole else block.reshard()

    # -- whole state --------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        self._hold_whole(False)
        return {name: _full(tensor) for name, tensor in self.module.state_dict().items()}

    def load_model(self, state: Mapping[str, Any]) -> None:
        tensors = self.module.state_dict()
        self.module.load_state_dict({name: self._rows(values, tensors.get(name)) for name, values in state.items()})

    def optimizer_state(self) -> dict[str, Any]:
        state_dict = self.optimizer.state_dict()
        state = {i: {key: _full(value) for key, value in kept.items()} for i, kept in state_dict["state"].items()}
        return {**state_dict, "state": state}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        ordered = [p for params in self._order for p in params]
        kept = {
            i: {key: self._rows(value, ordered[i] if _shaped(value, ordered[i]) else None) for key, value in of.items()}
            for i, of in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": kept})

    def written(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This worker's rows of each tensor that is divided. Rank 0 writes everything else."""
        self._hold_whole(False)
        first = {id(p): name for name, p in self.module.named_parameters()}  # the first name of tied weights
        kept = self.module.state_dict(keep_vars=True)
        model = self._pieces((name, f"{first.get(id(value), name)}:{VALUES}", value) for name, value in kept.items())
        state_dict = self.optimizer.state_dict()
        state = {
            i: self._pieces((key, f"{self.names[i]}:{key}", value) for key, value in kept.items())
            for i, kept in state_dict["state"].items()
        }
        return model, {**state_dict, "state": state}

    def _pieces(self, tensors: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
        """What this worker writes of ``tensors``, each given by its key, its name in a checkpoint and its value."""
        written: dict[str, Any] = {}
        for key, name, value in tensors:
            if isinstance(value, DTensor):
                rows = local(value.detach()).reshape(-1)
                pieces = ((self._range(value), rows),) if len(rows) else ()
                written[key] = PartialTensor(name, tuple(value.shape), value.dtype, pieces)
            elif self.comms.rank == 0:
                written[key] = value.detach() if isinstance(value, torch.Tensor) else value
        return written

    def _range(self, like: DTensor) -> FlatRange:
        """The elements of ``like`` in this worker's rows."""
        rows = rows_of(like, self.comms.everyone.size)[self.comms.rank]
        return FlatRange(whole_range(like.shape).box, rows.start, rows.stop)

    def _rows(self, values: Any, like: Any) -> Any:
        """This worker's part of ``values``: a whole tensor, or a ``Stored`` one."""
        if not isinstance(like, DTensor):
            return whole(values) if hasattr(values, "read") else values
        if tuple(values.shape) != tuple(like.shape):
            raise ValueError(f"a tensor of shape {tuple(values.shape)} in place of {tuple(like.shape)}")
        rows = elements(values, self._range(like)).to(like.device).view(local(like).shape)
        return DTensor.from_local(
            rows, self._mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def rows_of(p: torch.Tensor, workers: int) -> list[range]:
    """The elements of ``p`` on each worker. Each has as many rows as the first one; the last workers may have fewer."""
    length = p.numel() // max(1, p.shape[0])
    most = -(-p.shape[0] // workers)
    edges = [min(p.shape[0], most * worker) * length for worker in range(workers + 1)]
    return [range(low, high) for low, high in pairwise(edges)]


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The modules to gather one by one: the parts of ``module`` that share no parameter with another part."""
    blocks = [part for part in _parts(module) if any(p.requires_grad for p in part.parameters())]
    users: dict[int, int] = {}
    for part in blocks:
        for p in part.parameters():
            users[id(p)] = users.get(id(p), 0) + 1
    return [part for part in blocks if all(users[id(p)] == 1 for p in part.parameters())]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _parts(child)
        else:
            yield child


def _shaped(value: Any, p: torch.Tensor) -> bool:
    return tuple(getattr(value, "shape", ())) == tuple(p.shape)  # parameters are no scalars here


def local(tensor: Any) -> torch.Tensor:
    """This worker's part of ``tensor``."""
    rows: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return rows


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _ignored(_: object) -> None:
    """Drop the result of ``optimizer.step``."""


class OrderedScatter(torch_private.fsdp_reduce_scatter()):  # type: ignore[misc]
    """The reduce-scatter of one block in exact mode: adds up the gradients of slots along the canonical tree.

    FSDP calls it once in each pass that ends a slot, with a flat vector in which each worker's rows lie together. FSDP
    then makes gradients from views of ``output_tensor``. These have the step's sums once ``finish`` has returned.
    """

    def __init__(self, group: Group, num_slots: int) -> None:
        runs = cut(num_slots, group.size)
        self._group, self._num_slots, self._run = group, num_slots, runs[group.rank]
        self._nodes = [node for run in runs for node in subtrees(run, num_slots)]
        self._parts_of = [len(subtrees(run, num_slots)) for run in runs]
        self._sums: SlotSums | None = None
        self._part: BatchSlice | None = None
        self._pending: tuple[Work, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def begin_step(self) -> None:
        """Drop the sums of the last step."""
        self._pending = None
        if self._sums is not None:
            self._sums.begin(self._run, self._num_slots, (0,))

    def begin_pass(self, part: BatchSlice) -> None:
        """The next gradients belong to the slot that ``part`` ends. They do not count if ``part`` has no weight."""
        self._part = part

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        part, self._part = self._part, None
        if part is None:
            fix = "use --mechanism sharded, or --mode fast"
            raise UserError("fsdp2 in exact mode runs a block once a pass", "a block that ran twice", fix)
        if self._sums is None:
            self._sums = SlotSums(lambda: torch.empty_like(input_tensor), lambda flat: {0: flat})
            self._sums.begin(self._run, self._num_slots, (0,))
        if part.weight:
            self._sums.put(0, input_tensor)
            self._sums.end_slot(part.slot)
        if part.ends_step:
            self._send(self._sums.parts(), output_tensor)

    def _send(self, parts: list[torch.Tensor], rows: torch.Tensor) -> None:
        """Send to each worker this worker's partial sums of its rows."""
        group, length = self._group, rows.numel()
        sent = parts[0] if len(parts) == 1 else torch.stack([p.view(group.size, -1) for p in parts], dim=1).view(-1)
        sent = sent.to(group.wire)
        received = torch.empty(len(self._nodes) * length, dtype=sent.dtype, device=group.wire)
        sizes = [count * length for count in self._parts_of]
        work = group.all_to_all(received, sent, sizes, [len(parts) * length] * group.size)
        self._pending = work, sent, received, rows

    def finish(self) -> None:
        """Wait for all workers' partial sums of this worker's rows, and add them up."""
        if self._pending is None:
            return
        work, _, received, rows = self._pending
        work.wait()
        parts = zip(self._nodes, received.view(len(self._nodes), -1).unbind(0), strict=True)
        rows.copy_(tree_sum(list(parts), self._num_slots, lambda a, b: a.add_(b)))
        self._pending = None


class ExactFsdp2Replica(Fsdp2Replica, SlotEngine):
    """One worker's rows in exact mode, on two workers or more (FSDP sums nothing on one)."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, num_slots: int) -> None:
        super().__init__(module, optimizer, comms)
        self._blocks = [block for block in module.modules() if isinstance(block, FSDPModule)]
        self._scatters = [OrderedScatter(comms.everyone, num_slots) for _ in self._blocks]
        self.used, self._counts = [False] * len(self.params), False
        for block, scatter in zip(self._blocks, self._scatters, strict=True):
            block.set_custom_reduce_scatter(scatter)
            block.set_reduce_scatter_unused_params(
                True, recurse=False
            )  # else their number may differ from slot to slot
            self._notice_use(block)

    def _notice_use(self, block: FSDPModule) -> None:
        """Record in ``used`` which parameters of ``block`` get gradients, since FSDP makes zeros for the others."""
        places = {
            name: i for i, name in enumerate(name for name, p in self.module.named_parameters() if p.requires_grad)
        }
        block.unshard()
        for name, p in self.module.named_parameters():
            if p.requires_grad and not isinstance(p, DTensor):  # of this block
                p.register_post_accumulate_grad_hook(lambda _, i=places[name]: self._use(i))
        block.reshard()

    def _use(self, i: int) -> None:
        self.used[i] |= self._counts

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, parts: Sequence[BatchSlice] = ()) -> None:
        super().begin_step(parts)
        for scatter in self._scatters:
            scatter.begin_step()
        self.used = [False] * len(self.params)

    def run(self, loss: torch.Tensor, part: BatchSlice) -> None:
        self._counts = part.weight > 0
        for block, scatter in zip(self._blocks, self._scatters, strict=True):
            block.set_requires_gradient_sync(part.ends_slot, recurse=False)
            scatter.begin_pass(part)
        (loss * part.weight).backward()
        if not part.ends_step:
            for p in self.params:
                p.grad = None

    def settle(self, used: Sequence[bool]) -> None:
        for scatter in self._scatters:
            scatter.finish()
        self.guard([p.grad if is_used else None for p, is_used in zip(self.params, used, strict=True)])

    def clip(self, max_norm: float) -> float:
        if not self._mine:
            return 0.0
        kept = [(p, local(grad)) for p, grad in zip(self.params, self._mine, strict=True) if grad is not None]
        rows = [(rows_of(p, self.comms.everyone.size), grad.reshape(-1)) for p, grad in kept]
        norm = global_norm(squares_of_rows(rows, self.comms.everyone))
        factor = clip_factor(norm, max_norm)
        if factor != 1.0:
            for _, grad in kept:
                grad.mul_(factor)
        return norm
