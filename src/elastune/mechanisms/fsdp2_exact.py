"""``fully_shard`` whose gradients are added up in canonical order. Imported where it is used, as ``fsdp2_replica``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from elastune.comm.comms import Comms
from elastune.comm.group import Group, Work
from elastune.comm.slot_sums import SlotSums
from elastune.comm.units import clip_factor, global_norm, squares_of_rows
from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.core.slots import cut, subtrees, tree_sum
from elastune.mechanisms.engine import SlotEngine
from elastune.mechanisms.fsdp2_replica import Fsdp2Replica, local, rows_of


class OrderedScatter(ReduceScatter):
    """Of one block: takes the gradients of slots as they come and adds them up along the canonical tree.

    FSDP calls it once in each pass that ends a slot, with a flat vector in which each worker's rows lie together, and
    makes gradients of views of ``output_tensor``. These have the step's sums once ``finish`` has returned.
    """

    def __init__(self, group: Group, num_slots: int) -> None:
        runs = cut(num_slots, group.size)
        self._group, self._num_slots, self._run = group, num_slots, runs[group.rank]
        self._nodes = [node for run in runs for node in subtrees(run, num_slots)]
        self._parts_of = [len(subtrees(run, num_slots)) for run in runs]
        self._sums: SlotSums | None = None
        self._part: BatchSlice | None = None
        self._under_way: tuple[Work, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def begin_step(self) -> None:
        """Forget the last step."""
        self._under_way = None
        if self._sums is not None:
            self._sums.begin(self._run, self._num_slots, (0,))

    def begin_pass(self, part: BatchSlice) -> None:
        """The next gradients are of the slot that ``part`` ends, or of none where it has no weight."""
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
        """To each worker the parts of its rows."""
        group, length = self._group, rows.numel()
        sent = parts[0] if len(parts) == 1 else torch.stack([p.view(group.size, -1) for p in parts], dim=1).view(-1)
        sent = sent.to(group.wire)
        received = torch.empty(len(self._nodes) * length, dtype=sent.dtype, device=group.wire)
        sizes = [count * length for count in self._parts_of]
        work = group.all_to_all(received, sent, sizes, [len(parts) * length] * group.size)
        self._under_way = work, sent, received, rows

    def finish(self) -> None:
        """Wait for all workers' parts of this one's rows, and add them up."""
        if self._under_way is None:
            return
        work, _, received, rows = self._under_way
        work.wait()
        parts = zip(self._nodes, received.view(len(self._nodes), -1).unbind(0), strict=True)
        rows.copy_(tree_sum(list(parts), self._num_slots, lambda a, b: a.add_(b)))
        self._under_way = None


class ExactFsdp2Replica(Fsdp2Replica, SlotEngine):
    """Two workers or more: FSDP sums nothing on one."""

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
        """From here on ``used`` has the parameters of ``block`` that passes give gradients: FSDP makes up zeros."""
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
        self.guard([p.grad if told else None for p, told in zip(self.params, used, strict=True)])

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
