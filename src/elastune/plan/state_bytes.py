"""What of divided state a worker has at the best: modelled, not measured."""

from __future__ import annotations


def ideal_share(whole: int, copies: int, workers: int) -> float:
    """Bytes of each of ``workers``, where ``whole`` bytes lie with ``copies`` holders each, in shares of equal size.

    With the replicated state of plain data parallelism, ``copies`` are the ``workers``.
    """
    return whole * min(copies, workers) / workers
