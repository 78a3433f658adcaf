"""DeepSpeed's ZeRO, by DeepSpeed's engine: stage 0 divides nothing, 1 optimizer state, 2 gradients, 3 parameters too.

The engine runs one step of the user's optimizer without clipping (DeepSpeed's own default is a norm of 1.0). No
extension is compiled: DeepSpeed's sums through shared memory on CPUs would take about a minute at the first start.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.process_groups import Comms, open_default_group
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.capabilities import ENGINE_CAPABILITIES, Capabilities
from elastune.parallel.mechanisms.engine import Engine, EngineReplica, EngineTensors


class DeepSpeed(Engine):
    """The mechanism ``deepspeed``: DeepSpeed does everything except forward and backward passes."""

    name: ClassVar[str] = "deepspeed"
    capabilities: ClassVar[Capabilities] = ENGINE_CAPABILITIES["deepspeed"]

    def examine(self, model: nn.Module, optimizer: torch.optim.Optimizer, execution: ExecutionSettings) -> None:
        if narrow := [name for name, p in model.named_parameters() if p.dtype != torch.float32]:
            fix = "use --mechanism sharded, or a model in fp32"
            raise UserError("deepspeed keeps parameters and optimizer state in fp32", f"{narrow[0]} is not", fix)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, execution: ExecutionSettings
    ) -> Replica:
        open_default_group(comms.everyone)
        self.examine(model, optimizer, execution)
        stage = self.capabilities.stages[0] if execution.zero_stage is None else execution.zero_stage
        return DeepSpeedReplica(model, optimizer, comms, stage)


_EVALUATION = -1  # stands for a module that uses a parameter; no module has this number


@dataclass(frozen=True)
class _Fragment:
    """A worker's part of a parameter: ``count`` elements from ``start`` on. They lie in ``flat`` from ``at`` on."""

    flat: torch.Tensor
    at: int
    start: int
    count: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The fragment's elements in a tensor with the layout of ``flat``."""
        return flat.detach().narrow(0, self.at, self.count)


class DeepSpeedReplica(EngineReplica):
    """One worker's part of a replica, around DeepSpeed's engine."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, stage: int) -> None:
        super().__init__(module, optimizer, comms)
        self._stage = stage
        self.gathers = stage > 0
        self.equal_passes = True
        self._engine = _engine(module, optimizer, comms, stage)
        self.model = self._engine
        self._whole = False
        self.take_over_steps(self._engine.step, self._clear)

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, parts: Sequence[BatchSlice] = ()) -> None:
        super().begin_step(parts)
        self._hold_whole(False)

    def run(self, loss: torch.Tensor, part: BatchSlice) -> None:
        self._restore()
        self._engine.set_gradient_accumulation_boundary(part.ends_step)
        self._engine.backward(loss * (part.weight * self.comms.everyone.size))  # the engine averages over workers

    def reduced(self) -> None:
        super().reduced()
        if self._stage:
            self.guard([None] * len(self.params))

    def clip(self, max_norm: float) -> float:
        if not self._stage:
            return super().clip(max_norm)
        return self.clip_divided(self._gradients(), max_norm)

    def _gradients(self) -> list[torch.Tensor]:
        """This worker's part of the step's gradients."""
        return [grad for grads in self._engine.optimizer.averaged_gradients.values() for grad in grads or ()]

    def held(self) -> EngineTensors:
        if not self._stage:
            return super().held()
        zero = self._engine.optimizer
        flat = zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        model = [tensor for p in self.module.parameters() for tensor in (p, getattr(p, "ds_tensor", None))]
        parameters = [tensor for tensor in (*model, *flat) if tensor is not None]
        return EngineTensors(parameters, self._gradients(), list(self.optimizer.state.values()))

    def _clear(self) -> None:
        for p in self.params:
            p.grad = None

    def gather(self) -> None:
        self._hold_whole(True)

    def _hold_whole(self, whole: bool) -> None:
        """In stage 3: keep parameters whole on this worker between forward passes, or stop it.

        DeepSpeed keeps a parameter as long as a module uses it. So ``_EVALUATION`` is entered as one more module.
        """
        if self._stage < 3 or whole == self._whole:
            return
        self._whole = whole
        params: list[Any] = list(self.module.parameters())
        if whole:
            params[0].all_gather(param_list=params)
        for p in params:
            (p.ds_active_sub_modules.add if whole else p.ds_active_sub_modules.discard)(_EVALUATION)
        if not whole:
            params[0].partition(param_list=params)

    # -- whole state --------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        if self._stage < 3:
            return super().model_state()
        whole = {id(p): self._sum(p, None) for p in self.module.parameters()}
        named = self.module.state_dict(keep_vars=True)
        return {name: whole.get(id(tensor), tensor.detach()) for name, tensor in named.items()}

    def load_model(self, state: Mapping[str, Any]) -> None:
        if not self._stage:
            return super().load_model(state)
        tensors = self.module.state_dict(keep_vars=True)
        if set(tensors) != set(state):
            raise ValueError(f"other tensors: {sorted(set(tensors) ^ set(state))}")
        for name, tensor in tensors.items():
            for fragment in self._fragments(tensor):
                fragment.of(fragment.flat).copy_(
                    state[name].reshape(-1)[fragment.start : fragment.start + fragment.count]
                )
            if tensor.numel():  # the whole tensor is on this worker
                tensor.detach().copy_(state[name])
        return None

    def optimizer_state(self) -> dict[str, Any]:
        if not self._stage:
            return super().optimizer_state()
        ordered = [p for group in self._order for p in group]
        state = {i: values for i, p in enumerate(ordered) if p.requires_grad and (values := self._state_of(p))}
        return {"state": state, "param_groups": self.groups()}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        if not self._stage:
            return super().load_optimizer(state)
        if [len(group["params"]) for group in state["param_groups"]] != [len(params) for params in self._order]:
            raise ValueError("the optimizer has other groups of parameters")
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        ordered = [p for group in self._order for p in group]
        for i, values in state["state"].items():
            if (fragment := self._updated(ordered[int(i)])) is None:
                continue
            target = self.optimizer.state.setdefault(fragment.flat, {})
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    tensor = target.setdefault(key, torch.zeros_like(fragment.flat.detach()))
                    fragment.of(tensor).copy_(value.reshape(-1)[fragment.start : fragment.start + fragment.count])
                else:
                    target[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return None

    def _state_of(self, p: nn.Parameter) -> dict[str, Any]:
        """The optimizer's whole state of ``p``. A worker without a part of ``p`` takes another parameter's names."""
        fragment = self._updated(p)
        state = {} if fragment is None else self.optimizer.state.get(fragment.flat, {})
        like = state or next(iter(self.optimizer.state.values()), {})
        whole = {key: self._sum(p, key) for key, v in like.items() if isinstance(v, torch.Tensor) and v.dim()}
        return {key: whole.get(key, value) for key, value in like.items()}

    def _sum(self, p: Any, key: str | None) -> torch.Tensor:
        """The whole of ``p``, or of its state ``key`` if that is not None, from all workers' fragments."""
        shape = p.ds_shape if self._stage == 3 else p.shape
        flat = torch.zeros(shape.numel(), dtype=p.dtype, device=self.comms.everyone.wire)
        for fragment in self._fragments(p) if key is None else filter(None, [self._updated(p)]):
            flat[fragment.start : fragment.start + fragment.count] = fragment.of(
                fragment.flat if key is None else self.optimizer.state[fragment.flat][key]
            )
        self.comms.everyone.all_reduce(flat).wait()
        return flat.to(p.device).view(shape)

    def _fragments(self, tensor: torch.Tensor) -> list[_Fragment]:
        """This worker's fragments of ``tensor``: the optimizer's, and in stage 3 the model's too."""
        fragments = []
        if tensor.requires_grad and (fragment := self._updated(tensor)) is not None:
            fragments.append(fragment)
        if hasattr(tensor, "ds_tensor"):
            start, count = self._part(tensor)
            fragments += [_Fragment(tensor.ds_tensor, 0, start, count)] * (count > 0)
        return fragments

    def _part(self, p: Any) -> tuple[int, int]:
        """Stage 3: the first element of this worker's part of ``p``, and how many it has."""
        length = int(p.ds_tensor.ds_numel)
        start = self.comms.rank * length
        return start, max(0, min(length, p.ds_numel - start))

    def _updated(self, p: Any) -> _Fragment | None:
        """The fragment of the trained parameter ``p`` that this worker updates; None where it has none."""
        zero = self._engine.optimizer
        if self._stage == 3:
            group, offset, _ = zero.grad_position[zero.get_param_id(p)]
            start, count = self._part(p)
            return _Fragment(zero.fp32_partitioned_groups_flat[group], offset, start, count) if count else None
        if (mapped := p._hp_mapping) is None:
            return None
        low, high = mapped.lp_fragment_address, mapped.hp_fragment_address
        flat = zero.single_partition_of_fp32_groups[mapped.param_group_index]
        return _Fragment(flat, int(high.start), int(low.start), int(low.numel))


def _engine(module: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, stage: int) -> Any:
    """DeepSpeed's engine around ``module``. From now on ``module`` and ``optimizer`` belong to the engine."""
    device = next(module.parameters()).device
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    deepspeed = importlib.import_module("deepspeed")
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # without effect: elastune makes the batches
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine
