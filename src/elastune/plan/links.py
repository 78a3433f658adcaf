"""What a reduction travels on: the link within a host and, where there are several hosts, the one across them. Pure.

A ring all-reduce: 2(W-1) messages of latency and 2(W-1)/W of the bytes over its slowest link (Thakur, Rabenseifner,
Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005). Ranks stand host by host, so that
of a ring over several hosts one hop enters each and one leaves it: the slowest link is the one across. All that says
how long a step takes has its sums from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elastune.journal.records import LinkFitted, LinkMeasured

Some = float | NDArray[np.float64]


class RingLink(NamedTuple):
    """Seconds of one message, however small, and of each byte."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0

    def to_record(self) -> LinkFitted:
        """The serialised form."""
        return LinkFitted(self.latency_s, self.seconds_per_byte)


def ring_s(link: tuple[Some, Some], size_bytes: Some, workers: Some) -> Some:
    """Seconds of a ring all-reduce, or of many, as arrays; 0 for a lone worker. ``link``: as in ``RingLink``."""
    hop_s, seconds_per_byte = link
    return 2 * (workers - 1) * (hop_s + size_bytes * seconds_per_byte / workers)


def summed_s(
    within: tuple[Some, Some], across: tuple[Some, Some], size_bytes: Some, workers: Some, hosts: Some
) -> Some:
    """The same where workers stand on so many ``hosts``: a ring ``within`` the fullest, then one ``across`` them."""
    return ring_s(within, size_bytes, np.ceil(workers / hosts)) + ring_s(across, size_bytes, hosts)


@dataclass(frozen=True)
class Hosts:
    """Several hosts: what connects them, and how many workers fit each."""

    link: RingLink
    workers_each: int

    def __post_init__(self) -> None:
        if self.workers_each < 1:
            raise ValueError(f"a host has room for at least one worker, not {self.workers_each}")

    def needed(self, workers: int) -> int:
        """On how many of them so many workers stand."""
        return -(-workers // self.workers_each)


def fit_link(measured: Sequence[LinkMeasured]) -> RingLink | None:
    """The median over measured all-reduces, each divided by the ring's share of it; None where nobody measured any.

    What a lone worker measured says nothing and is passed over.
    """
    told = [link for link in measured if link.workers > 1]
    if not told:
        return None
    latency_s = median(max(0.0, link.latency_s) / (2 * (link.workers - 1)) for link in told)
    per_byte = median(max(0.0, link.seconds_per_byte) * link.workers / (2 * (link.workers - 1)) for link in told)
    return RingLink(latency_s, per_byte)


def fit_links(measured: Sequence[LinkMeasured], workers_each: int | None = None) -> tuple[RingLink, Hosts | None]:
    """The link within a host, and the hosts where several of them, with ``workers_each``, were measured across.

    A link that nobody measured is taken to be as the other one; without any, reducing is free.
    """
    within = fit_link([link for link in measured if link.hosts <= 1])
    across = fit_link([link for link in measured if link.hosts > 1])
    hosts = None if across is None or workers_each is None else Hosts(across, workers_each)
    return within or across or RingLink(), hosts
