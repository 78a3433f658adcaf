"""The workers that reduce together, behind one small interface over ``torch.distributed``."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from elastune.core.errors import UserError
from elastune.core.run import Place

Work = Any  # torch.distributed.Work, or None where nothing had to be started


class Group:
    """``size`` workers, of which this one is ``rank``. ``wire`` is the device that collectives want tensors on.

    A group of one needs no process group: its collectives return at once.
    """

    def __init__(self, rank: int = 0, size: int = 1, backend: str = "", device: torch.device | None = None) -> None:
        self.rank = rank
        self.size = size
        self.backend = backend
        self.wire = device if backend == "nccl" and device is not None else torch.device("cpu")

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Work:
        """Send the next ``sizes[w]`` elements of ``data`` to each worker ``w``; receive alike into ``out``.

        Started, not awaited, as the collectives below.
        """
        return dist.all_to_all_single(out, data, list(out_sizes), list(sizes), async_op=True)

    def all_gather(self, out: torch.Tensor, chunk: torch.Tensor) -> Work:
        """Every worker's ``chunk`` (equal sizes), in rank order, into ``out``.

        On gloo an all-to-all of copies takes half the time of its all-gather.
        """
        if self.backend == "gloo":
            copies = chunk.expand(self.size, -1).contiguous().view(-1)
            return dist.all_to_all_single(out, copies, async_op=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # renamed in torch 2.13, the old name serves all versions
            return dist.all_gather_into_tensor(out, chunk, async_op=True)

    def all_reduce(self, data: torch.Tensor) -> Work:
        """Sum ``data`` over workers in place (in the backend's own order)."""
        return dist.all_reduce(data, async_op=True) if self.size > 1 else None

    def broadcast(self, data: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``data`` with that of ``source``."""
        if self.size > 1:
            wire = data.to(self.wire)
            dist.broadcast(wire, source)
            data.copy_(wire)

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every worker's ``values`` (their numbers may differ), in rank order, on every worker."""
        if self.size == 1:
            return [list(values)]
        counts = torch.zeros(self.size, dtype=torch.int64, device=self.wire)
        counts[self.rank] = len(values)
        dist.all_reduce(counts)
        sizes = [int(count) for count in counts]
        width = max(1, *sizes)
        table = torch.zeros(self.size, width, dtype=torch.float64, device=self.wire)
        table[self.rank, : len(values)] = torch.tensor(values, dtype=torch.float64)
        # Adding zeros changes no value (and keeps NaN and infinities), so a sum gathers what is unequally long.
        dist.all_reduce(table)
        return [row[:size].tolist() for row, size in zip(table, sizes, strict=True)]

    def same_everywhere(self, digest: bytes) -> bool:
        """Whether every worker holds the same ``digest`` (of equal length everywhere)."""
        rows = self.gather_floats([float(byte) for byte in digest])
        return all(row == rows[0] for row in rows)


def join(place: Place, timeout_s: float = 1800.0) -> Group:
    """Meet the other workers at ``place.rendezvous``.

    The process must end by ``os._exit``: a process group that is destroyed while Python holds its lock may wait for a
    thread that waits for the lock (seen with gloo: its finished collectives free tensors on a thread of their own).
    """
    if place.world == 1:
        return Group()
    device = torch.device(place.device)
    _refuse_unknown_host(place.rendezvous)
    backend = "nccl" if device.type == "cuda" and place.own_device and dist.is_nccl_available() else "gloo"
    dist.init_process_group(
        backend,
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout_s),
    )
    return Group(place.rank, place.world, backend, device)


def _refuse_unknown_host(rendezvous: str) -> None:
    """Torch would go on trying for half an hour."""
    host = urlsplit(rendezvous).hostname if rendezvous.startswith("tcp://") else None
    if host is not None:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            fix = "set MASTER_ADDR to an address of rank 0's machine"
            raise UserError("workers must be able to look up where they meet", f"{host}: {error}", fix) from None
