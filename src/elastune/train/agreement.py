"""Whether all workers take the same step.

Each worker adds its marks to the step's reduction: a few small numbers that follow from place, batch, data and
settings of its step. The sums show whether all workers had the same. Only where they had not, workers gather their
``StepSettings`` and end with an error that names the difference.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.elastic.stragglers import lines_by_rank

_MODULI = (61, 59, 53)  # of marks: sums of 4096 workers' squares of smaller numbers are exact in single precision
NO_MARKS = (0.0,) * (1 + 2 * len(_MODULI))
_PLAIN_TYPES = {float, int, bool, str, tuple, type(None)}  # of settings that compare as they are


def marks(step_hash: int) -> list[float]:
    """One worker's part of the sums: 1, the remainders of ``step_hash``, and the squares of these remainders."""
    remainders = [step_hash % modulus for modulus in _MODULI]
    return [1.0, *map(float, remainders), *(float(x * x) for x in remainders)]


def alike(sums: Sequence[float]) -> bool:
    """Whether all workers had the same, from the sums of their ``marks``.

    By Cauchy and Schwarz n times the sum of squares is the square of the sum only where all are equal. A difference is
    missed in one step of 190,000.
    """
    if not any(sums):  # of a lone worker; of several workers the first sum is their number
        return True
    count, n = sums[0], len(_MODULI)
    return all(count * square == mark * mark for mark, square in zip(sums[1 : 1 + n], sums[1 + n :], strict=True))


class OptimizerSettings:
    """The numbers beside tensors that an optimizer steps by: learning rates, momenta, weight decay."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._checksum = 0

    def checksum(self, optimizer: torch.optim.Optimizer) -> int:
        """A number that differs where any of the settings does."""
        values = [
            value if type(value) in _PLAIN_TYPES else _plain(value)
            for group in optimizer.param_groups
            for name, value in group.items()
            if name != "params"
        ]
        if values != self._values:  # settings rarely change: their text is made only then
            self._values, self._checksum = values, zlib.crc32(repr([_plain(value) for value in values]).encode())
        return self._checksum

    @staticmethod
    def by_name(optimizer: torch.optim.Optimizer) -> dict[str, str]:
        """The settings as text, by name, for an error that a user reads."""
        return {
            f"{name} of group {number}": repr(_plain(value))
            for number, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }


def _plain(value: Any) -> Any:
    """``value`` as it is after a checkpoint too, which keeps neither tuples nor numpy's numbers."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    return float(value) if isinstance(value, float) else type(value).__name__


@dataclass(frozen=True)
class StepSettings:
    """All that one worker takes a step with, gathered where workers' marks differ.

    Attributes:
        epoch: The epoch of the step.
        offset: The place in the epoch where the batch begins.
        size: Samples in the batch.
        length: Samples in the pass.
        order: The sum of the samples' numbers.
        content: The checksum of a few samples, see ``data.fingerprint.content``.
        settings: The optimizer's settings and the frozen parameters, by name.
        line: The line of the program that this worker is at.
    """

    epoch: int
    offset: int
    size: int
    length: int
    order: int
    content: int
    settings: dict[str, str]
    line: str

    def encode(self) -> bytes:
        """As JSON, which ``differences`` reads."""
        return json.dumps(asdict(self)).encode()


_PHRASES = {
    "epoch": "epoch {}",
    "offset": "place {} of the epoch",
    "size": "a batch of {} samples",
    "length": "a pass of {} samples",
    "order": "samples whose numbers add up to {}",
    "content": "data with checksum {}",
}


def differences(rows: Sequence[bytes]) -> dict[str, list[str]]:
    """The settings in which workers differ: by name, the value of each worker. ``rows``: encoded ``StepSettings``."""
    workers = [json.loads(row) for row in rows]
    tables = [
        {
            **{name: phrase.format(fields[name]) for name, phrase in _PHRASES.items()},
            **{name: f"{name} {value}" for name, value in fields["settings"].items()},
        }
        for fields in workers
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    columns = {name: [table.get(name, f"no {name}") for table in tables] for name in names}
    return {name: column for name, column in columns.items() if len(set(column)) > 1}


def steps_differ(step: int, columns: dict[str, list[str]], rows: Sequence[bytes]) -> UserError:
    """The error where workers took step ``step`` with the ``differences`` ``columns`` of ``rows``."""
    lines = [json.loads(row)["line"] for row in rows]
    values = {
        rank: f"has {', '.join(column[rank] for column in columns.values())}" + (f" ({line})" if line else "")
        for rank, line in enumerate(lines)
    }
    rule = "all ranks must take a step with the same data and settings"
    fix = "let them follow from config, seed and session.step; a variable of your own is lost with its worker"
    return UserError(rule, f"in step {step}, {lines_by_rank(values)}", fix)
