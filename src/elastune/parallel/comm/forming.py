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

LOOK_S = 0.005
LAZY_LOOK_S = 1.0
STORE_WAIT_S = 0.5
CONNECT_LIMIT_S = 10.0  # after all workers have arrived; ``timeout_s`` limits how long they take to arrive

T = TypeVar("T")


class Forming(ABC):
    """The forming of the group ``name``; its workers find each other in ``store``. A subclass is one backend.

    ``result`` runs ``make`` on a thread, waits for it, and gives up when it takes too long or is superseded.
    """

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
        """Form the group; blocks. Raises ``RuntimeError``, ``OSError`` or ``ValueError`` if that fails."""

    @abstractmethod
    def break_off(self) -> None:
        """Make ``make`` fail soon; called again and again until ``make`` has ended."""

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for the group any more."""
        return self._given_up.is_set()

    def result(self, superseded: Callable[[], bool]) -> Group:
        """Return the group.

        Raises:
            GroupBroken: If no group forms in time, and at once when ``superseded`` turns true. A thread then clears
                away the half-made group.
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
        """Exchange one message at ``place`` with all workers; return every worker's message, by rank, own included.

        Each worker meets at a place once. Only the timeout limits how long the others take to arrive. From then on
        ``CONNECT_LIMIT_S`` limits what the workers do together.
        """
        self._connect_until = math.inf
        self._store.set(f"{place}/{rank}", message.encode())
        keys = [f"{place}/{other}" for other in range(size)]
        self._store.wait(keys, timedelta(seconds=self._timeout_s))
        messages = [self._store.get(key).decode() for key in keys]
        self._connect_until = time.monotonic() + CONNECT_LIMIT_S
        return messages

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
        """Make the thread end soon, and drop its result."""
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
    """A store whose ``wait`` ends when the forming is given up."""

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
                if now >= deadline or now - started < patience_s / 2:  # not a timeout: the store itself fails
                    raise


class BackgroundForming(Generic[T]):
    """Groups that form on a thread of their own while their workers go on training.

    The caller either takes the groups with ``result`` or drops them with ``discard``.

    Args:
        form: Forms the groups; blocks. It may raise ``GroupBroken``, or anything else.
        let_go: Lets go of groups that were formed and are not wanted.
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
        """Wait for the groups and return them; from now on they are the caller's. Raises what ``form`` raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        with self._lock:
            if not self._made:
                raise GroupBroken("the groups were let go of before they were wanted")
            return self._made.pop()

    def discard(self) -> None:
        """Let go of the result, now or once it is formed; no caller will ask for it. From any thread."""
        with self._lock:
            self._unwanted = True
            made, self._made = self._made, []
        for unwanted in made:
            self._let_go(unwanted)

    def _run(self) -> None:
        try:
            formed = self._form()
        except BaseException as error:  # noqa: BLE001 - ``result`` raises it again
            self._error = error
        else:
            with self._lock:
                unwanted = self._unwanted
                if not unwanted:
                    self._made.append(formed)
            if unwanted:
                self._let_go(formed)
        finally:
            self._ended.set()
