"""Collectives of policies by name, in any order: what workers submit travels in rows of JSON, and is resolved alike.

Every worker's row holds all that its hooks wait for. What is in all rows is resolved; what is missing somewhere waits
for the next exchange. A hook does nothing while it waits, so a hook to which an exchange brought nothing on any worker
would get nothing from the next either: its collectives fail there and then, with the ranks that lack them. So whatever
workers call, in whatever order, nothing waits for ever. All of it follows from the rows alone: every worker comes to
the same result, to the bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

Op = Literal["avg", "sum", "min", "max", "broadcast", "allgather"]
Value = float | tuple[float, ...]  # one number, or a flat list of them
Result = float | list[float] | list[float | list[float]]
Name = tuple[str, str]  # (scope, key)


@dataclass(frozen=True)
class Submission:
    """What one worker gives to a collective.

    Attributes:
        scope: Stands for one call of a policy's hook, the same on every worker.
        key: The collective's name in it.
        op: What becomes of the values.
        value: This worker's.
        root: Whose value is broadcast.
    """

    scope: str
    key: str
    op: Op
    value: Value
    root: Annotated[int, Field(ge=0)] = 0

    @property
    def name(self) -> Name:
        """By what submissions of different workers find each other."""
        return self.scope, self.key


_SUBMISSIONS = TypeAdapter(list[Submission])


@dataclass(frozen=True)
class Round:
    """What an exchange brought: results, and why others failed, by name. What is in neither waits for the next."""

    done: dict[Name, Result]
    failed: dict[Name, str]


def pack(submissions: Iterable[Submission]) -> bytes:
    """One worker's row; empty where there are none."""
    rows = [asdict(given) for given in submissions]
    return json.dumps(rows).encode() if rows else b""


def unpack(row: bytes) -> dict[Name, Submission]:
    """The submissions in another worker's row, by name. Raises ``ValueError`` where it is none that ``pack`` makes."""
    given = _SUBMISSIONS.validate_python(json.loads(row)) if row else []
    found = {submission.name: submission for submission in given}
    if len(found) < len(given):
        raise ValueError("a row of collectives has a name twice")
    return found


def resolve(rows: Sequence[bytes]) -> Round:
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
            failed[name] = f"not called on rank {lacking}, or only after another one: begin both, then take results"
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
