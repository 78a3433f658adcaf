"""A run that has outlived its controller, as the next one holds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elastune.cluster import judgement
from elastune.cluster.elastic_run import ElasticRun
from elastune.cluster.judgement import WITHOUT_CONTROLLER
from elastune.cluster.launcher import Launcher, ProcessEvent, ProcessStarted
from elastune.cluster.said import Said
from elastune.elastic.coordinator.adopting import AdoptingCoordinator
from elastune.elastic.coordinator.adoption import awaited, known
from elastune.elastic.coordinator.for_controller import ForController, RecordSent
from elastune.elastic.coordinator.from_controller import CrewBounds, Entrance, Lookups, Timeouts
from elastune.elastic.protocol.client import Contact
from elastune.elastic.protocol.worker_spec import WorkerSpec
from elastune.journal.records import Adopted, MembershipEvent, Record, Regrouped, WorkerGone

AWAY = "it did not come back to the next controller"


class AdoptedRun(ElasticRun):
    """Workers come back to ``contact``, the launcher says which processes there are; ``take_over`` makes them a run.

    ``kept``: the records of this run that its controllers have kept, in order. ``options``: see ``ElasticRun``.
    """

    coordinator: AdoptingCoordinator

    def __init__(
        self, task: WorkerSpec, launcher: Launcher, contact: Contact, kept: Iterable[Record], **options: Any
    ) -> None:
        self._contact = contact
        self._kept = list(kept)
        self._again: dict[int, int] | None = None  # by worker: so many of its records were told before it came back
        self._refused = False
        super().__init__(task, launcher, **options)
        self.said = Said(self._kept)

    def _coordinate(
        self, bounds: CrewBounds, timeouts: Timeouts, entrance: Entrance, lookups: Lookups
    ) -> AdoptingCoordinator:
        port = int(self._contact.address.rpartition(":")[2])
        entrance = replace(entrance, port=port, token=self._contact.token)
        return AdoptingCoordinator(bounds, timeouts, entrance, lookups)

    @property
    def _ended(self) -> set[int]:
        return {number for number, worker in self._facts.workers.items() if worker.end is not None}

    @property
    def _living(self) -> set[int]:
        return set(self._processes.known) - self._ended

    @property
    def moved(self) -> bool:
        """Whether its workers have known it at another address."""
        return self.coordinator.address != self._contact.address

    @property
    def some_back(self) -> bool:
        """Whether anybody has come back."""
        return bool(known(self._living, self.coordinator.back))

    @property
    def all_back(self) -> bool:
        """Whether all have that train together and live."""
        back = known(self._living, self.coordinator.back)
        return bool(back) and awaited(back) <= self._ended

    @property
    def all_ended(self) -> bool:
        """Whether their launcher has told the ends of all that the journal last knew to train together."""
        views = [record.members for record in self._kept if isinstance(record, Regrouped)]
        members = set(views[-1] if views else range(self.spec.means.workers))
        return not self._living and members <= self._ended

    def take_over(self, seconds: float) -> bool:
        """Go on with those who are back, ``seconds`` after they were first looked for.

        False where they hold no state to go on with: all are sent away then, those too that come later.
        """
        living = self._living
        lost = awaited(known(living, self.coordinator.back))
        back = self.coordinator.adopt(living, self._used() + 1)
        if back is None:
            self._refused = True
            self._facts = replace(self._facts, over=True)
            self._processes.end(sorted(living), "its run begins again")
            return False
        self._free = -1  # what was told of it before was nobody's to hear
        self._again = {worker: returned.records for worker, returned in back.items()}
        self._do(judgement.take_over(self._facts, back, sorted(living - set(back)), AWAY))
        told = {record.worker for record in self._kept if isinstance(record, WorkerGone)}
        told |= {*self._processes.known, *self._ended}
        gone: list[Record] = [WorkerGone(worker, "lost", WITHOUT_CONTROLLER) for worker in sorted(lost - told)]
        grace_s = self.spec.elastic.grace_s
        adopted = Adopted(sorted(back), self.coordinator.step, seconds, sorted(lost), grace_s)
        self._queue.put_first([*gone, adopted])
        self._announce()
        return True

    def hear(self, event: ProcessEvent) -> None:
        if isinstance(event, ProcessStarted) and event.bootstrap.worker not in self._processes.known:
            self._processes.meet(event.bootstrap)
            if self._again is not None or self._refused:  # too late
                self._launcher.end([event.bootstrap], AWAY)
        super().hear(event)

    @property
    def pending(self) -> bool:
        return not self._refused and super().pending

    def kill(self) -> None:
        self._refused = False
        super().kill()

    def _close_if_over(self) -> None:
        if not self._refused:  # who comes late is to hear that it may end
            super()._close_if_over()

    def _used(self) -> int:
        """The highest number that a worker of this run ever had."""
        numbers = [r.event.get("worker", 0) for r in self._kept if isinstance(r, MembershipEvent)]
        members = [worker for r in self._kept if isinstance(r, Regrouped) for worker in r.members]
        return max([*numbers, *members, *self._processes.known], default=0)

    def _take(self, sent: RecordSent) -> None:
        again = sent.nth if self._again is None else self._again.get(sent.worker, 0)
        if sent.nth <= again and self.said.is_kept(sent.record):
            self._queue.took(sent.worker, sent.nth)
        else:
            super()._take(sent)

    def _judge(self, news: ForController) -> None:
        super()._judge(news)
        if self._refused:  # nobody has this run: what begins again has other workers
            self._queue.clear()
