"""What all workers must have alike when they begin a step, and how they notice where it differs.

Each adds a few small numbers to the step's reduction that depend on all of it. From their sums every worker learns
whether all had the same; only where they had not, they tell each other what they had.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.elastic.protocol.difference import told_by_rank

_QUICK = {float, int, bool, str, tuple, type(None)}
_MODULI = (61, 59, 53)  # sums of 4096 workers' squares of smaller numbers are exact in single precision
NO_MARKS = (0.0,) * (1 + 2 * len(_MODULI))
_WORDS = {
    "epoch": "epoch {}",
    "offset": "place {} of the epoch",
    "size": "a batch of {} samples",
    "length": "a pass of {} samples",
    "order": "samples whose numbers add up to {}",
    "content": "data with checksum {}",
}


def marks(facts: int) -> list[float]:
    """One worker's part of the sums: 1, and remainders of ``facts`` with their squares."""
    small = [facts % modulus for modulus in _MODULI]
    return [1.0, *map(float, small), *(float(x * x) for x in small)]


def alike(sums: Sequence[float]) -> bool:
    """Whether all had the same, from the sums of their ``marks``.

    By Cauchy and Schwarz n times the sum of squares is the square of the sum only where all are equal. What differs is
    missed in one step of 190,000.
    """
    if not any(sums):  # a lone worker's: of several, the first is their number
        return True
    count, own = sums[0], len(_MODULI)
    return all(count * square == mark * mark for mark, square in zip(sums[1 : 1 + own], sums[1 + own :], strict=True))


class Settings:
    """The numbers beside tensors that an optimizer steps by: learning rates, momenta, weight decay."""

    def __init__(self) -> None:
        self._known: list[Any] = []
        self._checksum = 0

    def checksum(self, optimizer: torch.optim.Optimizer) -> int:
        """A number that tells them apart."""
        found = [
            value if type(value) in _QUICK else _plain(value)
            for group in optimizer.param_groups
            for name, value in group.items()
            if name != "params"
        ]
        if found != self._known:  # hardly ever: what costs time is done once
            self._known, self._checksum = found, zlib.crc32(repr([_plain(value) for value in found]).encode())
        return self._checksum

    @staticmethod
    def told(optimizer: torch.optim.Optimizer) -> dict[str, str]:
        """The same to be read, by name."""
        return {
            f"{name} of group {at}": repr(_plain(value))
            for at, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }


def _plain(value: Any) -> Any:
    """``value`` as it is after a checkpoint too, which knows neither tuples nor numpy's numbers."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    return float(value) if isinstance(value, float) else type(value).__name__


@dataclass(frozen=True)
class StepFacts:
    """One worker's, to be told. ``content``: see ``data.content``; ``line``: where its program is."""

    epoch: int
    offset: int
    size: int
    length: int
    order: int
    content: int
    settings: dict[str, str]
    line: str

    def encode(self) -> bytes:
        """For ``differences``."""
        return json.dumps(asdict(self)).encode()


def differences(rows: Sequence[bytes]) -> dict[str, list[str]]:
    """What differs between the workers whose ``StepFacts`` are ``rows``: by name, what each has of it."""
    told = [json.loads(row) for row in rows]
    tables = [{**{name: words.format(of[name]) for name, words in _WORDS.items()}, **_named(of)} for of in told]
    names = dict.fromkeys(name for table in tables for name in table)
    columns = {name: [table.get(name, f"no {name}") for table in tables] for name in names}
    return {name: column for name, column in columns.items() if len(set(column)) > 1}


def _named(of: dict[str, Any]) -> dict[str, str]:
    return {name: f"{name} {value}" for name, value in of["settings"].items()}


def steps_differ(step: int, found: dict[str, list[str]], rows: Sequence[bytes]) -> UserError:
    """What to raise where workers had what is ``found`` to differ when they took step ``step``."""
    lines = [json.loads(row)["line"] for row in rows]
    told = {
        rank: f"has {', '.join(column[rank] for column in found.values())}" + (f" ({line})" if line else "")
        for rank, line in enumerate(lines)
    }
    rule = "all ranks must take a step with the same data and settings"
    fix = "let them follow from config, seed and session.step; a variable of your own is lost with its worker"
    return UserError(rule, f"in step {step}, {told_by_rank(told)}", fix)
