"""Ctrl-C, SIGTERM and SIGUSR1 as counters that a loop reads."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ClassVar

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h
_ended_by: list[int] = []  # the first signal of this command that asked for its end


def terminated() -> bool:
    """Return whether SIGTERM asked this command to end.

    Batch systems and Kubernetes send it, and give the command again elsewhere. A person sends SIGINT (Ctrl-C).
    """
    return _ended_by[:1] == [signal.SIGTERM]


def note_end(number: int) -> None:
    """Note the signal that asks this command to end."""
    _ended_by.append(number)


class HandOver:
    """Ends this process at once where SIGTERM or SIGUSR1 precedes its next start, as if it were killed.

    Workers that may outlive their controller then go on, and the next controller takes them over. An end in good order
    would stop them first.
    """

    _follows: ClassVar[Callable[[], bool] | None] = None

    @classmethod
    def ask(cls, follows: Callable[[], bool] | None) -> None:
        """From now on call ``follows`` at such a signal: whether the same command is about to be started again."""
        cls._follows = follows

    @classmethod
    def signalled(cls) -> None:
        """End this process if another one follows. Its exit code asks for another try."""
        if cls._follows is not None and cls._follows():
            os._exit(TRY_AGAIN)


class Interrupted(Exception):
    """The user has interrupted a command before it had a result."""


class Interrupts:
    """Counts SIGINT and SIGTERM inside a ``with`` block, where they do not end the process.

    The first one asks for a graceful end, the second one for an immediate end. Outside of the main thread no signal can
    be caught, and ``count`` stays 0.

    Attributes:
        count: The number of these signals.
        noticed: Whether SIGUSR1 has arrived. Batch systems announce by it that they will take the machine away
            (Slurm's ``--signal=B:USR1@60``).

    Example:
        >>> with Interrupts() as interrupts:
        ...     while not interrupts.count:
        ...         work()
    """

    def __init__(self) -> None:
        self.count = 0
        self.noticed = False
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:
            HandOver.signalled()
        if number == signal.SIGUSR1:
            self.noticed = True
        else:
            self.count += 1
            note_end(number)

    def __enter__(self) -> Interrupts:
        _ended_by.clear()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
