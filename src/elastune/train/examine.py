"""A program's model before any worker starts: would its mechanism take it?

The program's own function runs with a session that stands in for the real one, up to ``session.prepare``, with torch's
fake tensors, which have shapes and no memory. What the mechanism would refuse at that place on every worker is then
known. A refusal that fake tensors brought is told once real ones have brought it, too: a model that looks at values
while it is traced would be refused without reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.core.run import Config, Means
from elastune.mechanisms.parked import built_in_parts
from elastune.mechanisms.registry import Plans, note_plan
from elastune.sync.registry import refuse_unfit
from elastune.train.program.guest import as_guest
from elastune.train.program.load import LoadedProgram, merge
from elastune.train.rehearsal import Rehearsal
from elastune.train.several import Prepared


class _Handed(BaseException):
    """The program has given its models; not an ``Exception``, so that its lines do not swallow it."""

    def __init__(self, given: tuple[Any, ...], plan: Plans | None) -> None:
        super().__init__()
        self.given = given
        self.plan = plan


class _UpToPrepare(Rehearsal):
    """Stands in for a session up to ``prepare``."""

    def __init__(self, config: Config, seed: int, workers: int, context: AbstractContextManager[None]) -> None:
        super().__init__(config, seed, torch.device("cpu"), most=1)
        self.size = workers
        self._context = context

    def model_context(self) -> AbstractContextManager[None]:
        """As ``Session.model_context``."""
        return self._context

    def prepare(self, *given: Any, plan: Plans | None = None) -> tuple[Any, ...]:
        """The end."""
        raise _Handed(given, plan)


def refusal_of(loaded: LoadedProgram, config: Config, means: Means, folder: Path, seed: int = 0) -> UserError | None:
    """Why ``session.prepare`` of ``loaded``, with ``config`` over its own, would refuse what the program gives it.

    Args:
        folder: For the parameters of a model that is built under ``session.model_context()``.

    Returns:
        None where it would not, and where nobody can tell: the program fails, or ends, before it comes there.
    """
    whole = merge(loaded.config, config)

    def found(fake: bool) -> UserError | None:
        context = nullcontext() if fake else built_in_parts(means, folder)
        session = _UpToPrepare(dict(whole), seed, means.workers, context)
        handed = _handed(loaded.train, session, fake)
        try:
            prepared = Prepared.of(handed.given)
            prepared.check(means.mechanism)
            note_plan(prepared.model, handed.plan)
            refuse_unfit(prepared.model, prepared.optimizer, means)
        except UserError as error:
            return error
        return None

    with suppress(Exception, SystemExit):  # a program that looks at values: real ones tell
        if found(fake=True) is None:
            return None
    with suppress(Exception, SystemExit):  # then workers tell: the program's own error, at its own place
        return found(fake=False)
    return None


def _handed(train: Callable[[Any], None], session: _UpToPrepare, fake: bool) -> _Handed:
    """What the program gives to ``session.prepare``. Raises whatever it does on the way."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as stack:
        stack.enter_context(as_guest())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        torch.manual_seed(session.seed)
        try:
            train(session)
        except _Handed as handed:
            return handed
    raise UserError("a program must train", "session.prepare was not called", "call it with model and optimizer")
