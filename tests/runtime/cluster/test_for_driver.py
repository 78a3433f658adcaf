"""What a run has to tell its driver is handed out once, and counts as kept when the driver comes again."""

from __future__ import annotations

from elastune.core.journal.records import Restarted
from elastune.runtime.clusters.base import NOBODY, Exited, Message
from elastune.runtime.elastic_run import DriverQueue


def test_what_was_handed_out_is_known_by_worker() -> None:
    queue = DriverQueue()
    queue.record_taken(0, 1)
    queue.record_taken(0, 2)
    assert queue.returned == {}
    queue.hand_out()
    queue.record_taken(1, 1)
    assert queue.returned == {0: 2}
    queue.hand_out()
    assert queue.returned == {1: 1}
    queue.hand_out()
    assert queue.returned == {}


def test_nobody_is_woken_twice_for_one_event() -> None:
    queue, end = DriverQueue(), Exited(0, 0, "")
    assert not queue.pending
    queue.put(end)
    assert queue.pending
    queue.woken()
    assert not queue.pending
    queue.put_of_run([Restarted(3)])
    assert queue.pending
    assert queue.ends == 1
    assert queue.hand_out() == [end, Message(NOBODY, Restarted(3))]
    assert (queue.pending, queue.ends, queue.hand_out()) == (False, 0, [])


def test_who_has_taken_a_run_over_tells_so_first() -> None:
    queue = DriverQueue()
    queue.put_of_run([Restarted(1)])
    queue.put_first([Restarted(3), Restarted(2)])
    assert queue.hand_out() == [Message(NOBODY, Restarted(step)) for step in (2, 3, 1)]
