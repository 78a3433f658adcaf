"""A collective under way, and who carries it: what stands between a policy's run and its host."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from elastune.policies.runtime.exchange import Op, Value

T = TypeVar("T")


class CollectiveFailed(RuntimeError):
    """A policy's collective cannot be completed: workers called it differently, or some did not call it at all."""


class Waits(Protocol):
    """Returns when the handle is done."""

    def __call__(self, handle: Handle[Any], /) -> None: ...


class Handle(Generic[T]):
    """The result to come of a collective."""

    __slots__ = ("_value", "_wait", "done", "failure", "told")

    def __init__(self, wait: Waits) -> None:
        self._wait = wait
        self._value: Any = None
        self.done = False
        self.told = False  # somebody asked for the result
        self.failure: CollectiveFailed | None = None

    def result(self) -> T:
        """The result; the hook is suspended until it is there, training goes on. Raises ``CollectiveFailed``."""
        self.told = True
        if not self.done:
            self._wait(self)
        if self.failure is not None:
            raise self.failure
        value: T = self._value
        return value

    def settle(self, value: Any, failure: CollectiveFailed | None = None) -> None:
        """The exchange has brought ``value``, or ``failure``."""
        self._value, self.failure, self.done = value, failure, True


class Collectives(Protocol):
    """Who carries a hook's collectives to the other workers."""

    def submit(self, op: Op, value: Value, root: int, name: str | None) -> Handle[Any]:
        """Give ``value`` to the collective ``name`` (None: the hook's next of this ``op``)."""
