"""Collectives of policies by name, in any order: what workers submit travels in rows of numbers, and is resolved alike.

Every worker's row holds all that its hooks wait for. What is in all rows is resolved; what is missing somewhere waits
for the next exchange. A hook does nothing while it waits, so one that an exchange brought nothing on any worker would
get nothing from the next either: its collectives fail there and then, with the ranks that lack them. So whatever
workers call, in whatever order, nothing waits for ever. All of it follows from the rows alone: every worker comes to
the same result, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

Op = Literal["avg", "sum", "min", "max", "broadcast", "allgather"]
Value = float | tuple[float, ...]  # one number, or a flat list of them
Result = float | list[float] | list[float | list[float]]
Name = tuple[int, int]  # (scope, key)

_OPS: tuple[Op, ...] = get_args(Op)
_HEAD = 5  # scope, key, op, root, length
_ONE = -1  # the length of a single number
_HASH_BYTES = 6  # such whole numbers are exact in double precision


@dataclass(frozen=True, slots=True)
class Submission:
    """What one worker gives to a collective.

    ``scope`` stands for one call of a policy's hook, the same on every worker; ``key`` for the collective's name in it
    (both by ``hashed``). ``root`` counts for broadcasts only.
    """

    scope: int
    key: int
    op: Op
    value: Value
    root: int = 0

    @property
    def name(self) -> Name:
        """By what submissions of different workers find each other."""
        return self.scope, self.key


@dataclass(frozen=True)
class Round:
    """What an exchange brought: results, and why others failed, by name. What is in neither waits for the next."""

    done: dict[Name, Result]
    failed: dict[Name, str]


def hashed(*parts: str | int) -> int:
    """A whole number below 2^48 for ``parts``, the same in every process."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=_HASH_BYTES).digest(), "little")


def pack(submissions: Iterable[Submission]) -> list[float]:
    """One worker's row: for each submission scope, key, op, root and length (-1: one number), then its values."""
    row: list[float] = []
    for given in submissions:
        values = given.value if isinstance(given.value, tuple) else (given.value,)
        length = len(values) if isinstance(given.value, tuple) else _ONE
        row += map(float, (given.scope, given.key, _OPS.index(given.op), given.root, length))
        row += values
    return row


def unpack(row: Sequence[float]) -> dict[Name, Submission]:
    """The submissions in another worker's row, by name. Raises ``ValueError`` where it is none that ``pack`` makes."""
    found: dict[Name, Submission] = {}
    at = 0
    while at < len(row):
        head = row[at : at + _HEAD]
        if len(head) < _HEAD or not all(isinstance(number, (int, float)) and number % 1 == 0 for number in head):
            raise ValueError(f"a row of collectives has no whole head at {at}")
        scope, key, op, root, length = map(int, head)
        at += _HEAD
        values = tuple(map(float, row[at : at + abs(length)]))
        if not (0 <= op < len(_OPS) and root >= 0 and length >= _ONE):
            raise ValueError(f"a row of collectives has a head that cannot be before {at}")
        if not (0 <= scope < 256**_HASH_BYTES and 0 <= key < 256**_HASH_BYTES and (scope, key) not in found):
            raise ValueError(f"a row of collectives has a name that cannot be, or has it twice, before {at}")
        if len(values) < abs(length):
            raise ValueError(f"a row of collectives ends in the middle of {abs(length)} values")
        found[scope, key] = Submission(scope, key, _OPS[op], values[0] if length == _ONE else values, root)
        at += abs(length)
    return found


def resolve(rows: Sequence[Sequence[float]]) -> Round:
    """What the workers' ``rows``, by rank, come to. Raises ``ValueError`` for rubbish."""
    given = [unpack(row) for row in rows]
    if far := [submission.root for row in given for submission in row.values() if submission.root >= len(rows)]:
        raise ValueError(f"a row of collectives has root {far[0]} of {len(rows)} workers")
    names = sorted(set().union(*given))
    done: dict[Name, Result] = {}
    failed: dict[Name, str] = {}
    for name in names:
        if all(name in row for row in given):
            all_of_it = [row[name] for row in given]
            if why := _differ(all_of_it):
                failed[name] = why
            else:
                done[name] = _result(all_of_it)
    moved = {scope for scope, _ in (*done, *failed)}
    for name in names:
        if name[0] not in moved:
            lacking = ", ".join(str(rank) for rank, row in enumerate(given) if name not in row)
            failed[name] = f"not called on rank {lacking}, or only behind another one: begin both, then take results"
    return Round(done, failed)


def _differ(given: list[Submission]) -> str:
    """In what the workers' calls of one collective differ so that it cannot be done; "" where it can."""
    first = given[0]
    for rank, other in enumerate(given):
        if other.op != first.op:
            return f"rank 0 called it as {first.op}, rank {rank} as {other.op}"
        if other.root != first.root:
            return f"rank 0 called it with root {first.root}, rank {rank} with root {other.root}"
        if first.op not in ("broadcast", "allgather") and _shape(other.value) != _shape(first.value):
            return f"rank 0 gave {_shape(first.value)}, rank {rank} {_shape(other.value)}"
    return ""


def _shape(value: Value) -> str:
    return f"a list of {len(value)}" if isinstance(value, tuple) else "one number"


def _plain(value: Value) -> float | list[float]:
    return list(value) if isinstance(value, tuple) else value


def _result(given: list[Submission]) -> Result:
    op, values = given[0].op, [submission.value for submission in given]
    if op == "broadcast":
        return _plain(values[given[0].root])
    if op == "allgather":
        return [_plain(value) for value in values]
    if isinstance(values[0], tuple):
        return [_reduced(op, column) for column in zip(*values, strict=True)]
    return _reduced(op, values)  # type: ignore[arg-type]


def _reduced(op: Op, values: Sequence[float]) -> float:
    """``values``, by rank, as one number: added in the ranks' order; NaN where one of them is."""
    if op in ("min", "max"):
        if any(map(math.isnan, values)):
            return math.nan
        return min(values) if op == "min" else max(values)
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if op == "avg" else total
