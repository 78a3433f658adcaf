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

# JSON values.

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


# Exchanges: the workers' rows, and the results that all of them derive.

Op = Literal["avg", "sum", "min", "max", "broadcast", "allgather"]
Value = float | tuple[float, ...]  # one number, or a flat list of them
Result = float | list[float] | list[float | list[float]]
Name = tuple[str, str]  # (scope, key)


@dataclass(frozen=True)
class Submission:
    """One worker's value for a collective.

    Attributes:
        scope: Names one call of a policy's hook, the same on every worker.
        key: The collective's name in it.
        op: The operation on the values.
        value: This worker's value.
        root: The rank whose value is broadcast.
    """

    scope: str
    key: str
    op: Op
    value: Value
    root: Annotated[int, Field(ge=0)] = 0

    @property
    def name(self) -> Name:
        """The name by which submissions of different workers match."""
        return self.scope, self.key


_SUBMISSIONS = TypeAdapter(list[Submission])


@dataclass(frozen=True)
class Round:
    """The result of an exchange, by name: results, and the reasons of failures. Other collectives wait for the next
    one.
    """

    done: dict[Name, Result]
    failed: dict[Name, str]


def pack(submissions: Iterable[Submission]) -> bytes:
    """Return one worker's row; empty without submissions."""
    rows = [asdict(submission) for submission in submissions]
    return json.dumps(rows).encode() if rows else b""


def unpack(row: bytes) -> dict[Name, Submission]:
    """Return the submissions in a worker's row, by name. Raises ``ValueError`` for a row that ``pack`` never makes."""
    submissions = _SUBMISSIONS.validate_python(json.loads(row)) if row else []
    by_name = {submission.name: submission for submission in submissions}
    if len(by_name) < len(submissions):
        raise ValueError("a row of collectives has a name twice")
    return by_name


def resolve(rows: Sequence[bytes]) -> Round:
    """Return the result of the workers' ``rows``, by rank. Raises ``ValueError`` for invalid rows."""
    unpacked = [unpack(row) for row in rows]
    if far := [submission.root for row in unpacked for submission in row.values() if submission.root >= len(rows)]:
        raise ValueError(f"a row of collectives has root {far[0]} of {len(rows)} workers")
    names = sorted(set().union(*unpacked))
    done: dict[Name, Result] = {}
    failed: dict[Name, str] = {}
    for name in names:
        if all(name in row for row in unpacked):
            all_of_it = [row[name] for row in unpacked]
            if why := _differ(all_of_it):
                failed[name] = why
            else:
                done[name] = _result(all_of_it)
    moved = {scope for scope, _ in (*done, *failed)}
    for name in names:
        if name[0] not in moved:
            lacking = ", ".join(str(rank) for rank, row in enumerate(unpacked) if name not in row)
            failed[name] = f"not called on rank {lacking}, or only after another one: begin both, then take results"
    return Round(done, failed)


def _differ(submissions: list[Submission]) -> str:
    """Why the workers' calls of one collective do not match; "" where they do."""
    first = submissions[0]
    for rank, other in enumerate(submissions):
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


def _result(submissions: list[Submission]) -> Result:
    op, values = submissions[0].op, [submission.value for submission in submissions]
    if op == "broadcast":
        return _plain(values[submissions[0].root])
    if op == "allgather":
        return [_plain(value) for value in values]
    if isinstance(values[0], tuple):
        return [_reduced(op, column) for column in zip(*values, strict=True)]
    return _reduced(op, values)  # type: ignore[arg-type]


def _reduced(op: Op, values: Sequence[float]) -> float:
    """``values``, by rank, as one number, added in the ranks' order; NaN where one of them is NaN."""
    if op in ("min", "max"):
        if any(map(math.isnan, values)):
            return math.nan
        return min(values) if op == "min" else max(values)
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if op == "avg" else total


# The attempts at one hook, and their collectives.

T = TypeVar("T")


class CollectiveFailed(RuntimeError):
    """A policy's collective cannot complete: workers called it differently, or some did not call it at all."""


class ResultPending(BaseException):
    """A result is missing, so this attempt at the hook ends.

    It is no ``Exception``, so that a hook does not catch it.
    """


class Future(Generic[T]):
    """A started collective; ``result`` returns its value.

    Example:
        >>> def after_step(self, run):  # of a policy
        ...     losses = run.allgather_async(run.loss())
        ...     speeds = run.allgather_async(run.throughput())
        ...     if max(losses.result()) > 1.0 and min(speeds.result()) > 100:
        ...         run.resize(run.size() + 1)
    """

    def __init__(self, outcome: Result | CollectiveFailed | None) -> None:
        self._outcome = outcome
        self.requested = False  # for the result

    @property
    def done(self) -> bool:
        """Whether the result, or the failure, is known."""
        return self._outcome is not None

    def result(self) -> T:
        """Return the result. Where it is missing, training goes on, and the hook runs again once it has arrived.

        Raises:
            CollectiveFailed: Where workers called it differently, or some did not call it.
        """
        self.requested = True
        if self._outcome is None:
            raise ResultPending
        if isinstance(self._outcome, CollectiveFailed):
            raise CollectiveFailed(*self._outcome.args)
        value: T = copied(self._outcome)  # so that a hook's changes to a list are gone when it is run again
        return value


class Collectives(Protocol):
    """Carries a hook's collectives to the other workers."""

    def submit(self, op: Op, value: Value, root: int, name: str | None) -> Future[Any]:
        """Give ``value`` to the collective ``name`` (None: the hook's next one of this ``op``)."""


@dataclass(frozen=True)
class _Request:
    submission: Submission
    text: str
    future: Future[Any]


class HookCall:
    """The attempts at one call of a hook. ``scope`` names the call, equally on every worker."""

    def __init__(self, policy: str, scope: str) -> None:
        self._policy, self._scope = policy, scope
        self._outcomes: dict[Name, Result | CollectiveFailed] = {}
        self._requests: dict[Name, _Request] = {}
        self._counts: Counter[str] = Counter()

    def begin(self) -> None:
        """Begin an attempt: the hook runs from its start."""
        self._requests, self._counts = {}, Counter()

    def submit(self, op: Op, value: Value, root: int, name: str | None) -> Future[Any]:
        """See ``Collectives``."""
        text = name or f"{self._policy}/{op}"
        count, self._counts[text] = self._counts[text], self._counts[text] + 1
        if name is None:
            text = f"{text}/{count}"
        elif count and not self._requests[self._name(text, count - 1)].future.done:
            raise UserError("a collective needs a name of its own until its result", name, "take the result first")
        submission = Submission(*self._name(text, count), op, value, root)
        future: Future[Any] = Future(self._outcomes.get(submission.name))
        self._requests[submission.name] = _Request(submission, text, future)
        return future

    def _name(self, text: str, count: int) -> Name:
        return self._scope, f"{text} {count}"

    @property
    def pending(self) -> list[Submission]:
        """The submissions for the next exchange."""
        return [request.submission for request in self._requests.values() if not request.future.done]

    def check_ended(self) -> None:
        """Raise ``CollectiveFailed`` for a failed collective whose result the hook did not take.

        A hook ends when all its collectives have ended.
        """
        for request in self._requests.values():
            if not request.future.requested:
                request.future.result()

    @property
    def missed(self) -> bool:
        """Whether this attempt requested a missing result, even if the hook caught ``ResultPending``."""
        return any(request.future.requested and not request.future.done for request in self._requests.values())

    def check_same(self) -> None:
        """Raise ``UserError`` where the hook did not call a collective that has a result: else it might never end."""
        if self._outcomes.keys() - self._requests.keys():
            rule = "a hook must call the same collectives when it is run again with their results"
            raise UserError(rule, "other ones", "let the run alone decide which collectives it calls")

    def observe(self, exchange: Round) -> bool:
        """Record the result of an exchange. Return False if it has none for this hook."""
        news = False
        for request in self._requests.values():
            name = request.submission.name
            if name in exchange.done:
                self._outcomes[name] = exchange.done[name]
            elif name in exchange.failed:
                self._outcomes[name] = CollectiveFailed(
                    f"{request.submission.op} {request.text!r}: {exchange.failed[name]}"
                )
            else:
                continue
            news = True
        return news
