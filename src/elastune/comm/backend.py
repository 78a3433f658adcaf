"""Which backend a run's workers reduce over."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from elastune.comm.comms import GroupFactory
from elastune.comm.gloo import GlooFactory

Backend = Literal["gloo", "nccl"]


def backend_for(device: str, *, own_device: bool) -> Backend:
    """NCCL for workers that have a GPU each (``own_device``); it does not work for two on one. Else gloo."""
    nccl = device.startswith("cuda") and own_device and dist.is_nccl_available()
    return "nccl" if nccl else "gloo"


def factory_for(device: str, *, own_device: bool, interface: str, timeout_s: float) -> GroupFactory:
    """What forms the groups of a run whose workers come and go."""
    if backend_for(device, own_device=own_device) == "gloo":
        return GlooFactory(interface, timeout_s)
    from elastune.comm.nccl import NcclFactory  # a torch without CUDA has no NCCL

    return NcclFactory(torch.device(device), timeout_s)
