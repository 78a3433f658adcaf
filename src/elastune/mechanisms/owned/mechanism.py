"""Mechanisms whose state is held in shares, by how they divide the arithmetic and what they leave in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elastune.comm.comms import Comms
from elastune.core.errors import UserError
from elastune.core.leaves import gathered_in
from elastune.core.mesh import AXES, Axis, Mesh
from elastune.core.run import Means
from elastune.mechanisms.base import Mechanism, Replica
from elastune.mechanisms.division import Divide, Division
from elastune.mechanisms.owned.blocks import blocks_of
from elastune.mechanisms.owned.gathering import ShardedReplica
from elastune.mechanisms.owned.guard import refuse_copies
from elastune.mechanisms.owned.probe import refuse_unless_elementwise
from elastune.mechanisms.owned.replica import OwnedReplica, ProgramModel
from elastune.mechanisms.owned.store import LeafStore


class Owned(Mechanism):
    """State in shares: the batch group's workers each add up, hold and update a part of what they compute with.

    With the axis shard this is ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models"), stage 2: gradients and optimizer state are divided, values lie with all that compute with them.

    ``axes``: the axes that it divides a replica along. ``divides``: what divides the arithmetic, in order.
    ``frees``: parameters lie with their holders, too, and are gathered when they are used (stage 3).
    """

    exact = True

    def __init__(self, name: str, axes: Sequence[Axis], divides: Sequence[Divide] = (), *, frees: bool = False) -> None:
        self.name = name  # type: ignore[misc]  # of this one: what it is made of decides
        self._axes = ("data", *axes)
        self._divides = divides
        self._frees = frees

    def check(self, means: Means, mesh: Mesh) -> None:
        for axis in AXES:
            if mesh.size(axis) > 1 and axis not in self._axes:
                rule = f"{self.name} has no workers along the axis {axis}"
                raise UserError(rule, str(mesh), f"use {axis}=1, or another mechanism")
        if self._frees and "pipeline" in self._axes:
            rule = "the stages of a pipeline keep their parameters: each goes through its layers many times a step"
            raise UserError(rule, self.name, f"use --mechanism {means.parts.serving(mesh)}")
        if means.copies is not None and means.copies < 1:
            raise UserError("each share is held by at least one worker", f"copies={means.copies}", "use 1 or 2")

    def examine(self, model: nn.Module, optimizer: torch.optim.Optimizer, means: Means) -> None:
        self._divided(model, optimizer, means)

    def _divided(self, model: nn.Module, optimizer: torch.optim.Optimizer, means: Means) -> Division:
        refuse_unless_elementwise(optimizer)  # shares are flat, and a part of a parameter
        division = Division(model)
        for divide in self._divides:
            division = divide(division, means)
        return division

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, means: Means) -> Replica:
        program = ProgramModel(model)
        division = self._divided(model, optimizer, means)
        if self._frees:
            blocks = blocks_of(division.model, division.parameters)
            division.split = gathered_in(division.split, [block.leaves for block in blocks])
        parts = division.split, division.parameters
        store = LeafStore(*parts, optimizer, program.tensor_of, frees=self._frees, offload=means.offload)
        if self._frees or self._divides:
            refuse_copies(division.model, division.parameters)
        replica = ShardedReplica if self._frees else OwnedReplica
        return replica(division, store, program, comms, means.copies or 1)
