"""Groups form on a thread of their own, because nothing can interrupt a backend while it forms one.

``Forming`` is the base of both backends. With ``BackgroundForming`` a group forms while its workers go on training.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from elastune.parallel.comm.group import Group, GroupBroken, drop

# [forming] Groups form on a thread of their own, since nothing in a backend's way of doing it can be interrupted.

LOOK_S = 0.005
LAZY_LOOK_S = 1.0
STORE_WAIT_S = 0.5
CONNECT_LIMIT_S = 10.0  # once all are there; how long that takes is for their timeout


class Forming(ABC):
    """The making of the group ``name``. ``store`` is where its workers find each other."""

    def __init__(self, store: Store, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._given_up = threading.Event()
        self._store = _Patient(PrefixStore(name, store), self._given_up)
        self._group: Group | None = None
        self._why = ""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._connect_until = math.inf

    @abstractmethod
    def make(self) -> Group:
        """Form the group; blocks. Raises ``RuntimeError``, ``OSError`` or ``ValueError`` where that fails."""

    @abstractmethod
    def break_off(self) -> None:
        """Make ``make`` fail soon; called again and again until it does."""

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for the group any more."""
        return self._given_up.is_set()

    def result(self, superseded: Callable[[], bool]) -> Group:
        """The group. Raises ``GroupBroken`` where none forms in time, and at once when ``superseded`` turns true; a
        half-made group is then cleared away in the background.
        """
        threading.Thread(target=self._run, name=f"form {self._name}", daemon=True).start()
        while not self._ended.wait(LOOK_S):
            if superseded():
                self._give_up()
                raise GroupBroken(f"group {self._name} was superseded while it formed")
            if time.monotonic() > self._connect_until:
                self._give_up()
                raise GroupBroken(f"group {self._name}: its workers do not reach each other in {CONNECT_LIMIT_S:g} s")
        if self._group is None:
            raise GroupBroken(self._why)
        return self._group

    def meet(self, place: str, rank: int, size: int, message: str) -> list[str]:
        """Tell the others ``message`` at ``place``, where each comes once, and hear theirs; all by rank, own included.

        How long they take to come has no bound but the timeout; what they do next together has.
        """
        self._connect_until = math.inf
        self._store.set(f"{place}/{rank}", message.encode())
        keys = [f"{place}/{other}" for other in range(size)]
        self._store.wait(keys, timedelta(seconds=self._timeout_s))
        told = [self._store.get(key).decode() for key in keys]
        self._connect_until = time.monotonic() + CONNECT_LIMIT_S
        return told

    def _run(self) -> None:
        try:
            group = self.make()
            with self._lock:
                if not self._given_up.is_set():
                    self._group = group
            if self._group is None:
                drop(group)
        except (RuntimeError, OSError, ValueError) as error:
            self._why = " ".join(str(error).split("\n", 1)[0].split()) or type(error).__name__
        finally:
            self._ended.set()

    def _give_up(self) -> None:
        """Make the thread end soon, and its result go where nobody sees it."""
        with self._lock:
            self._given_up.set()
            group, self._group = self._group, None
        if group is not None:
            drop(group)
        threading.Thread(target=self._break_off_until_ended, name="give up forming", daemon=True).start()

    def _break_off_until_ended(self) -> None:
        pause_s = LOOK_S
        while not self._ended.wait(pause_s):
            self.break_off()
            pause_s = min(2 * pause_s, LAZY_LOOK_S)  # for a worker that never connects


class _Patient(Store):
    """A store whose ``wait`` ends when nobody waits for its outcome any more."""

    def __init__(self, store: Store, given_up: threading.Event) -> None:
        super().__init__()
        self._store = store
        self._given_up = given_up

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            if self._given_up.is_set():
                raise RuntimeError("nobody waits for this group any more")
            started = time.monotonic()
            patience_s = min(STORE_WAIT_S, max(0.001, deadline - started))
            try:
                self._store.wait(keys, timedelta(seconds=patience_s))
                return
            except (RuntimeError, TimeoutError):
                now = time.monotonic()
                if now >= deadline or now - started < patience_s / 2:  # not for want of time: the store itself fails
                    raise


# [preparing] Groups that form while their workers do something else.

T = TypeVar("T")


class BackgroundForming(Generic[T]):
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
