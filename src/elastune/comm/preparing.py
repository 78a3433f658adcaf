"""Groups that form while their workers do something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from elastune.comm.group import GroupBroken

T = TypeVar("T")


class Preparing(Generic[T]):
    """What ``form`` makes, on a thread of its own; who does not want it any more calls ``discard``.

    Args:
        form: Forms the groups; blocks. It may raise ``GroupBroken``, or anything else.
        let_go: Lets go of what was formed and is not wanted.
    """

    def __init__(self, form: Callable[[], T], let_go: Callable[[T], None]) -> None:
        self._form, self._let_go = form, let_go
        self._made: list[T] = []
        self._error: BaseException | None = None
        self._unwanted = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="prepare groups", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether ``result`` returns or raises at once."""
        return self._ended.is_set()

    def result(self) -> T:
        """What was formed, which is the caller's from now on; waits for it. Raises what ``form`` raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        with self._lock:
            if not self._made:
                raise GroupBroken("the groups were let go of before they were wanted")
            return self._made.pop()

    def discard(self) -> None:
        """Nobody will ask for the result: it is let go of now, or once it is there. From any thread."""
        with self._lock:
            self._unwanted = True
            made, self._made = self._made, []
        for each in made:
            self._let_go(each)

    def _run(self) -> None:
        try:
            found = self._form()
        except BaseException as error:  # noqa: BLE001 - it is raised again where the result is asked for
            self._error = error
        else:
            with self._lock:
                unwanted = self._unwanted
                if not unwanted:
                    self._made.append(found)
            if unwanted:
                self._let_go(found)
        finally:
            self._ended.set()
