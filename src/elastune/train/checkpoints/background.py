"""A checkpoint that a thread of this worker writes from host memory, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.05


@dataclass(frozen=True)
class Published:
    """A complete checkpoint.

    Attributes:
        path: Its folder; None: the controller completes it, and reports that.
        dropped: The steps of the checkpoints that were deleted for it.
        low: Why there may be no room for further ones; "": there is.
    """

    path: Path | None
    dropped: tuple[int, ...] = ()
    low: str = ""


class PendingCheckpoint:
    """Writes this worker's part of the checkpoint after ``step`` steps, and publishes all of it where that is its task.

    The thread is a daemon: a process that dies leaves an incomplete draft, and the checkpoints before it.

    Args:
        step: The step.
        write: Writes the part.
        publish: Publishes the checkpoint; it returns None as long as parts of other workers are missing. None: another
            worker publishes.

    Attributes:
        at: The draft.
        publishes: Whether this worker publishes.
        published: The complete checkpoint, once this object is ``done``; None if it is not complete, or another worker
            publishes.
        error: What the thread has raised.
    """

    def __init__(
        self, step: int, at: Path, write: Callable[[], object], publish: Callable[[], Published | None] | None
    ) -> None:
        self.step, self.at, self.publishes = step, at, publish is not None
        self.published: Published | None = None
        self.error: BaseException | None = None
        self._write, self._publish = write, publish
        self._wrote, self._last_look = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
            self._wrote.set()
            while self._publish is not None and self.published is None:
                last = self._last_look.is_set()  # read before the look, so that the look comes after all parts
                self.published = self._publish()
                if last:
                    break
                if self.published is None:
                    self._last_look.wait(LOOK_S)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it, or reports it
            self.error = error
        finally:
            self._wrote.set()

    @property
    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def wait_written(self) -> None:
        """Return once this worker has written its part, or has failed to."""
        self._wrote.wait()

    def wait(self, limit_s: float) -> None:
        """Return once the thread has ended, or after ``limit_s``."""
        self._thread.join(limit_s)

    def conclude(self) -> None:
        """Return once the thread has ended. Parts that are missing now will not come any more."""
        self._last_look.set()
        self._thread.join()
