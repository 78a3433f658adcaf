"""Processes for benchmarks, forked from one warm server: imports would take each of them seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

# The benchmark itself, with all that it imports; and what the first optimizer imports, for seconds.
multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", "torch._dynamo"])


def on_workers(act: Callable[..., None], world: int, *args: Any) -> None:
    """Run ``act(rank, *args)`` in ``world`` processes, to their end. They have the environment of the first call."""
    mp.start_processes(act, args, nprocs=world, start_method="forkserver")
