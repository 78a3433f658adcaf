"""What ends a job before its time: somebody's wish, or the news that its machine will be taken away."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.cluster.notices import DEFAULT_S, Notice, NoticeSource
from elastune.core.clock import Clock, SystemClock
from elastune.job.signals import Interrupts
from elastune.job.supervisor import JobSupervisor

MARGIN = 0.1  # of a notice's time, kept for ending by force and for the journal


class ShutdownControl:
    """Looks out for interrupts and notices, and stops or ends the job that ``watch`` follows.

    The first interrupt, and a notice, ask for a checkpoint; the second ends the workers, and so does the time that a
    notice gives when it is nearly over: what is on the disk by then is what can go on elsewhere.
    """

    def __init__(
        self,
        watch: JobSupervisor,
        interrupts: Interrupts,
        notices: Sequence[NoticeSource] = (),
        clock: Clock | None = None,
    ) -> None:
        self.notice: Notice | None = None
        self._watch = watch
        self._interrupts = interrupts
        self._notices = notices
        self._clock = clock or SystemClock()
        self._heard = 0
        self._deadline = float("inf")

    def look(self) -> None:
        """Act on what has happened since the last call."""
        if self._interrupts.count > self._heard:
            self._heard = self._interrupts.count
            if self._heard == 1:
                self._watch.stop()
            else:
                self._watch.end("ended by a second interrupt", "interrupted")
        if self.notice is None:
            self.notice = self._told()
            if self.notice is not None:
                self._deadline = self._clock.now() + self.notice.seconds * (1 - MARGIN)
                self._watch.stop("notice")
        elif self._clock.now() > self._deadline:
            self._deadline = float("inf")
            if not self._watch.finished:
                self._watch.end(f"no step ended within the {self.notice.seconds:g} s of the notice: {self.notice.why}")

    def _told(self) -> Notice | None:
        if self._interrupts.noticed:
            return Notice(DEFAULT_S, "SIGUSR1")
        return next((notice for source in self._notices if (notice := source.poll()) is not None), None)
