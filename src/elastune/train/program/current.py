"""The session of the running program, for code that does not get it as an argument, such as adapters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.train.session import Session


class ProgramOver(BaseException):
    """The run is over before the program's lines are; not an ``Exception``, so that these do not swallow it."""


@dataclass
class _Entered:
    session: Any
    at_end: list[Callable[[], None]] = field(default_factory=list)


_entered: list[_Entered] = []


def current_session() -> Session:
    """Return the session of the run that this code is part of.

    Returns:
        The session that ``train(session)`` was given.

    Raises:
        UserError: Outside of a run.

    Example:
        >>> def log(loss):  # somewhere below train(session)
        ...     if elastune.current_session().rank == 0:
        ...         print(loss)
    """
    return _newest().session  # type: ignore[no-any-return]


def at_end(call: Callable[[], None]) -> None:
    """Call ``call`` once the program's lines have come to their end, or to ``end_program``."""
    _newest().at_end.append(call)


def end_program() -> NoReturn:
    """Leave the program's lines early: its training has ended."""
    _newest()
    raise ProgramOver


def in_session(train: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``train`` such that its session is the current one while it runs."""

    @wraps(train)
    def entered(session: Any) -> None:
        own = _Entered(session)
        _entered.append(own)
        try:
            with suppress(ProgramOver):
                train(session)
            for call in own.at_end:
                call()
        finally:
            _entered.remove(own)

    return entered


def _newest() -> _Entered:
    if not _entered:
        raise UserError("this belongs into a run", "no run", "start the file with 'elastune run FILE'")
    return _entered[-1]
