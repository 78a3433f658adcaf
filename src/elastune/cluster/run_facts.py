"""What a controller knows of a run and of its workers: the state of ``cluster.judgement``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elastune.cluster.base import NOBODY, Exited, how_it_ended
from elastune.cluster.launcher import ProcessEnded
from elastune.journal.records import RunFinished

NO_END = Exited(NOBODY, 0, "")
UNKNOWN = 1  # the code of a process of which nobody knows how it ended


@dataclass(frozen=True)
class WorkerFacts:
    """What is known of one worker.

    Its process, its connection and its coordinator are heard of in any order, so none of these facts follows from
    another one.

    Attributes:
        number: Which it is.
        phase: "running" from its start until its end is told, "gone" then; "apart" as long as it is none of this run's,
            as those are that have outlived a controller until the next one takes them over.
        trained: It has been a member.
        parted: Its connection has ended.
        code: The exit code of its entry point, as it said when it parted; None where it has not, or without a word.
        explains_until: It has parted without a word: until when the end of its process is awaited, which tells why.
        doomed: Why it was ended, where the reason was not its own.
        lost: It counts as lost; else it was not needed any more.
        fatal: Its loss was one too many: what to say of that.
        end: How its process has ended; perhaps not all that it had said is here yet.
    """

    number: int
    phase: Literal["apart", "running", "gone"] = "apart"
    trained: bool = False
    parted: bool = False
    code: int | None = None
    explains_until: float | None = None
    doomed: str | None = None
    lost: bool = False
    fatal: str | None = None
    end: ProcessEnded | None = None

    @property
    def how(self) -> str:
        """How its process has ended, in words; "" where it has not."""
        if self.end is None:
            return ""
        return self.end.why or f"worker {self.number} {how_it_ended(self.end.code, self.end.log)}"

    @property
    def exited(self) -> Exited:
        """How its process has ended, for the driver."""
        assert self.end is not None
        return Exited(self.number, UNKNOWN if self.end.code is None else self.end.code, self.end.log)


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run.

    Attributes:
        first: So many workers began it: those with higher numbers came later.
        workers: All there ever were, by number.
        over: Nothing is started any more; every worker that ends is the driver's concern.
        failed: By its program's own doing.
        finished: A worker has said so.
        noticed: It was to stop because its machines are taken away.
        last_lost: Who was lost last.
        last_end: The end that was told last.
        withheld: What workers said of the run's end while somebody's was to be explained: perhaps the program ended it.
    """

    first: int
    workers: Mapping[int, WorkerFacts] = field(default_factory=dict)
    over: bool = False
    failed: bool = False
    finished: bool = False
    noticed: bool = False
    last_lost: int = NOBODY
    last_end: Exited = NO_END
    withheld: tuple[tuple[int, RunFinished], ...] = ()

    def of(self, number: int) -> WorkerFacts:
        """What is known of worker ``number``."""
        return self.workers.get(number) or WorkerFacts(number)

    def put(self, number: int, **facts: Any) -> RunFacts:
        """As this, with these facts about worker ``number``."""
        return self.put_all((number,), **facts)

    def put_all(self, numbers: Iterable[int], **facts: Any) -> RunFacts:
        """As this, with these facts about each of ``numbers``."""
        changed = {number: replace(self.of(number), **facts) for number in numbers}
        return replace(self, workers={**self.workers, **changed}) if changed else self

    def seen(self, members: Iterable[int]) -> RunFacts:
        """As this, with ``members`` seen to train together."""
        return self.put_all((number for number in members if not self.of(number).trained), trained=True)

    @property
    def running(self) -> list[int]:
        """The workers whose ends are still to be told."""
        return [number for number, worker in self.workers.items() if worker.phase == "running"]

    @property
    def unexplained(self) -> list[WorkerFacts]:
        """Those that have parted without a word and may still end in a way that tells why."""
        return [worker for worker in self.workers.values() if worker.explains_until is not None]

    def came_later(self, number: int) -> bool:
        """Whether worker ``number`` was started after the run's first ones."""
        return number >= self.first

    def never_joined(self, number: int) -> bool:
        """Whether worker ``number`` came later than the first ones and has never trained with the others."""
        return self.came_later(number) and not self.of(number).trained
