from __future__ import annotations

from elastune.core.run import Position
from elastune.journal.entry import Entry
from elastune.journal.records import RunStarted
from elastune.report.tables.sample_ledger import ledger
from elastune.train.data.sample_log import SampleSpans, add_step, records_of


def trail_of(*sizes: int, length: int = 100) -> SampleSpans:
    """Of steps of these sizes, epoch after epoch."""
    trail: SampleSpans = []
    at = Position()
    for step, size in enumerate(sizes, 1):
        add_step(trail, at, size, length)
        offset = at.offset + size
        at = Position(at.epoch + offset // length, offset % length, step)
    return trail


def test_a_trail_has_a_piece_an_epoch_whatever_the_steps() -> None:
    assert trail_of(40, 40, 20, 50, 50, 30) == [[0, 0, 100, 100, 1, 3], [1, 0, 100, 100, 4, 5], [2, 0, 30, 100, 6, 6]]


def test_another_length_of_the_epoch_begins_another_piece() -> None:
    trail = trail_of(40, length=100)
    add_step(trail, Position(0, 40, 1), 30, 90)
    assert trail == [[0, 0, 40, 100, 1, 1], [0, 40, 70, 90, 2, 2]]


def test_the_ledger_takes_what_a_checkpoint_tells() -> None:
    """The controller before had written nothing down, and the run went on after the second epoch."""
    started = RunStarted("program.py", {}, 0, {}, resumed_step=5)
    trail = trail_of(40, 40, 20, 50, 50)
    told = ledger(Entry(0.0, record) for record in [started, *records_of(trail)])
    assert told.exact
    assert [seen.once for seen in told.epochs] == [100, 100]
    missing = ledger(Entry(0.0, record) for record in [started, *records_of(trail[1:])])
    assert not missing.exact
