"""The collectives of a policy's hook. The hook runs, stops where a result is missing, and runs again with it.

Nothing is suspended. An attempt at a hook asks for collectives by name. What earlier exchanges have brought is answered
at once; the rest is collected for the next exchange. ``Future.result`` of a missing value raises ``Missing``, which
ends the attempt: the policy's state is as it was, and after the exchange another attempt begins at the hook's start.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from elastune.core.errors import UserError
from elastune.policies.json_values import copied
from elastune.policies.runtime.exchange import Name, Op, Result, Round, Submission, Value

T = TypeVar("T")


class CollectiveFailed(RuntimeError):
    """A policy's collective cannot be completed: workers called it differently, or some did not call it at all."""


class Missing(BaseException):
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
            raise Missing
        if isinstance(self._found, CollectiveFailed):
            raise CollectiveFailed(*self._found.args)
        value: T = copied(self._found)  # lest what a hook does to a list be there when it is run again
        return value


class Collectives(Protocol):
    """Carries a hook's collectives to the other workers."""

    def submit(self, op: Op, value: Value, root: int, name: str | None) -> Future[Any]:
        """Give ``value`` to the collective ``name`` (None: the hook's next one of this ``op``)."""


@dataclass(frozen=True)
class _Asked:
    given: Submission
    text: str
    future: Future[Any]


class Attempts:
    """The attempts at one call of a hook. ``scope`` names the call, equally on every worker."""

    def __init__(self, policy: str, scope: str) -> None:
        self._policy, self._scope = policy, scope
        self._found: dict[Name, Result | CollectiveFailed] = {}
        self._asked: dict[Name, _Asked] = {}
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
        self._asked[given.name] = _Asked(given, text, future)
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
        """Whether this attempt has wanted a result that is not there, even if the hook has not let ``Missing`` pass."""
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
