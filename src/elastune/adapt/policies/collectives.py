"""Collectives of a policy's hook: a hook ends where a result is missing, and runs again once it is there.

Nothing is suspended. An attempt at a hook asks for collectives by name. Results of earlier exchanges are returned at
once, and all other requests are collected for the next exchange. ``Future.result`` of a missing value raises
``ResultPending``, which ends the attempt: the policy's state is unchanged, and after the exchange the hook starts
again.

In an exchange every worker sends a row of JSON with all that its hooks wait for. A collective that is in all rows is
resolved, any other waits for the next exchange. A hook does nothing while it waits. So if an exchange brought nothing
to a hook on any worker, the next one would not either: the hook's collectives fail at once, and the error names the
ranks that did not call them. Thus workers may call collectives in any order, and none waits forever. Everything follows
from the rows alone, so every worker comes to the same result, to the bit.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

from pydantic import Field, TypeAdapter

from elastune.core.errors import UserError

# Values that can travel as JSON.

_ATOMS = frozenset((int, float, str, bool, type(None)))


class NotJson(Exception):
    """``value``, at the place ``where`` in the state to send, is no JSON value."""

    def __init__(self, where: str, value: object) -> None:
        super().__init__(where, value)
        self.where, self.value = where, value

    def of(self, owner: str) -> UserError:
        """Return the error for the user, which names the ``owner`` of the value."""
        fix = "keep numbers, strings, lists and dicts in attributes"
        return UserError(f"{owner}: attribute {self.where} must be JSON, for it travels", repr(self.value), fix)


def copied(value: Any, where: str = "") -> Any:
    """Return a deep copy of a JSON value, in which tuples stay tuples. Raises ``NotJson``."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise NotJson(f"{where}[{key!r}]", value)
        return {key: part if type(part) in _ATOMS else copied(part, f"{where}.{key}") for key, part in value.items()}
    if kind is list or kind is tuple:
        parts = [part if type(part) in _ATOMS else copied(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return parts if kind is list else tuple(parts)
    for base in (bool, int, float, str):  # NumPy's double is a float, too
        if isinstance(value, base):
            return base(value)
    raise NotJson(where, value)


# Collectives of policies by name, in any order: what workers submit travels in rows of JSON, and is resolved alike.
#
# Every worker's row holds all that its hooks wait for. What is in all rows is resolved; what is missing somewhere waits
# for the next exchange. A hook does nothing while it waits, so a hook to which an exchange brought nothing on any
# worker would get nothing from the next either: its collectives fail there and then, with the ranks that lack them. So
# whatever workers call, in whatever order, nothing waits for ever. All of it follows from the rows alone: every worker
# comes to the same result, to the bit.

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


# The collectives of a policy's hook. The hook runs, stops where a result is missing, and runs again with it.
#
# Nothing is suspended. An attempt at a hook asks for collectives by name. What earlier exchanges have brought is
# answered at once; the rest is collected for the next exchange. ``Future.result`` of a missing value raises
# ``ResultPending``, which ends the attempt: the policy's state is as it was, and after the exchange another attempt
# begins at the hook's start.

T = TypeVar("T")


class CollectiveFailed(RuntimeError):
    """A policy's collective cannot be completed: workers called it differently, or some did not call it at all."""


class ResultPending(BaseException):
    """A result is not there yet, so this attempt at the hook ends.

    It is no ``Exception``, so that a hook lets it pass.
    """


class Future(Generic[T]):
    """A collective that was started."""

    def __init__(self, found: Result | CollectiveFailed | None) -> None:
        self._found = found
        self.asked = False  # for the result

    @property
    def done(self) -> bool:
        """Whether the result, or the failure, is there."""
        return self._found is not None

    def result(self) -> T:
        """Return the result. Where it is not there yet, training goes on, and the hook runs again once it is.

        Raises:
            CollectiveFailed: Where workers called it differently, or some did not call it.
        """
        self.asked = True
        if self._found is None:
            raise ResultPending
        if isinstance(self._found, CollectiveFailed):
            raise CollectiveFailed(*self._found.args)
        value: T = copied(self._found)  # lest what a hook does to a list be there when it is run again
        return value


class Collectives(Protocol):
    """Carries a hook's collectives to the other workers."""

    def submit(self, op: Op, value: Value, root: int, name: str | None) -> Future[Any]:
        """Give ``value`` to the collective ``name`` (None: the hook's next one of this ``op``)."""


@dataclass(frozen=True)
class _Request:
    given: Submission
    text: str
    future: Future[Any]


class HookCall:
    """The attempts at one call of a hook. ``scope`` names the call, equally on every worker."""

    def __init__(self, policy: str, scope: str) -> None:
        self._policy, self._scope = policy, scope
        self._found: dict[Name, Result | CollectiveFailed] = {}
        self._asked: dict[Name, _Request] = {}
        self._counts: Counter[str] = Counter()

    def begin(self) -> None:
        """The hook runs from its start."""
        self._asked, self._counts = {}, Counter()

    def submit(self, op: Op, value: Value, root: int, name: str | None) -> Future[Any]:
        """See ``Collectives``."""
        text = name or f"{self._policy}/{op}"
        count, self._counts[text] = self._counts[text], self._counts[text] + 1
        if name is None:
            text = f"{text}/{count}"
        elif count and not self._asked[self._name(text, count - 1)].future.done:
            raise UserError("a collective of this name is under way", name, "take its result first, or another name")
        given = Submission(*self._name(text, count), op, value, root)
        future: Future[Any] = Future(self._found.get(given.name))
        self._asked[given.name] = _Request(given, text, future)
        return future

    def _name(self, text: str, count: int) -> Name:
        return self._scope, f"{text} {count}"

    @property
    def pending(self) -> list[Submission]:
        """What the next exchange is to bring."""
        return [asked.given for asked in self._asked.values() if not asked.future.done]

    def check_ended(self) -> None:
        """A hook ends when all its collectives have: raises ``CollectiveFailed`` for one whose result nobody wanted."""
        for asked in self._asked.values():
            if not asked.future.asked:
                asked.future.result()

    @property
    def missed(self) -> bool:
        """Whether this attempt asked for a missing result, even if the hook caught ``ResultPending``."""
        return any(asked.future.asked and not asked.future.done for asked in self._asked.values())

    def check_same(self) -> None:
        """What was answered must be asked for again, or there would be no end: raises ``UserError``."""
        if self._found.keys() - self._asked.keys():
            rule = "a hook must ask for the same collectives when it is run again with their results"
            raise UserError(rule, "other ones", "let nothing but the run decide what it asks for")

    def hear(self, found: Round) -> bool:
        """Take in what an exchange has brought; False if there is nothing for this hook."""
        news = False
        for asked in self._asked.values():
            name = asked.given.name
            if name in found.done:
                self._found[name] = found.done[name]
            elif name in found.failed:
                self._found[name] = CollectiveFailed(f"{asked.given.op} {asked.text!r}: {found.failed[name]}")
            else:
                continue
            news = True
        return news
