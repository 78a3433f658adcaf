"""One call of a policy's hook, in a greenlet: while it waits for other workers, training goes on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from greenlet import GreenletExit, getcurrent  # type: ignore[import-untyped]

from elastune.core.errors import UserError
from elastune.core.signals import Snapshot
from elastune.policies.base import Policy
from elastune.policies.run import Limits, Run
from elastune.policies.runtime.exchange import Name, Op, Round, Submission, Value, hashed
from elastune.policies.runtime.handle import CollectiveFailed, Handle


class Call:
    """One call of ``hook``, from its begin to its end, and the collectives it waits for.

    ``name``: the policy's place and name, the same on every worker.
    """

    def __init__(
        self,
        policy: Policy,
        name: tuple[int, str],
        hook: str,
        snapshot: Snapshot,
        limits: Limits,
        rank: int,
        known: Collection[str] | None,
    ) -> None:
        self.hook = hook
        self.run = Run(snapshot, limits, rank, self, known)
        self.pending: dict[Name, tuple[Submission, Handle[Any], str]] = {}
        self.lane: Any = None  # the greenlet that it runs in
        self.ended = self.cancelled = False
        self.error: BaseException | None = None
        self._policy, self._name = policy, name
        self._counts: dict[Op, int] = {}
        self._scope: int | None = None
        self._waits_for: Handle[Any] | None = None
        self._handles: list[Handle[Any]] = []

    def body(self) -> None:
        """The hook, to its end."""
        getattr(self._policy, self.hook)(self.run)
        for handle in self._handles:  # a hook ends when all its collectives have
            if not handle.told:
                handle.result()

    @property
    def can_go_on(self) -> bool:
        """Whether what it waits for is there."""
        return self._waits_for is not None and self._waits_for.done

    def submit(self, op: Op, value: Value, root: int, name: str | None) -> Handle[Any]:
        """``Collectives``' part of it."""
        self._check_inside()
        if self._scope is None:
            self._scope = hashed(*self._name, self.hook, self.run.step)
        if name is None:
            name = f"{self._name[1]}/{op}/{self._counts.get(op, 0)}"
            self._counts[op] = self._counts.get(op, 0) + 1
        given = Submission(self._scope, hashed(name), op, value, root)
        if given.name in self.pending:
            raise UserError("a collective of this name is under way", name, "take its result first, or another name")
        handle: Handle[Any] = Handle(self._wait)
        self.pending[given.name] = given, handle, name
        self._handles.append(handle)
        return handle

    def take(self, found: Round) -> None:
        """Give the results that an exchange has brought to those who wait for them."""
        for name in self.pending.keys() & {*found.done, *found.failed}:
            given, handle, text = self.pending.pop(name)
            why = found.failed.get(name)
            failure = None if why is None else CollectiveFailed(f"{given.op} {text!r}: {why}")
            handle.settle(found.done.get(name), failure)

    def _wait(self, handle: Handle[Any]) -> None:
        while not handle.done:
            self._check_inside()
            self._waits_for = handle
            self.lane.parent.switch()
        self._waits_for = None

    def _check_inside(self) -> None:
        if self.cancelled:
            raise GreenletExit
        if getcurrent() is not self.lane:
            rule = "collectives are for the hook itself"
            raise UserError(rule, "a call from elsewhere", "call them in the hook's own thread")


def serve(call: Call) -> None:
    """A lane's life: one hook after another, for a greenlet's begin and end cost more than most hooks."""
    while True:
        try:
            call.body()
        except BaseException as error:  # noqa: BLE001  for the host to judge
            call.error = error
        call.ended = True
        del call  # the lane keeps nothing alive while it has nothing to do
        call = getcurrent().parent.switch()
