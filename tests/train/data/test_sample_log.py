from __future__ import annotations

from elastune.core.journal.records import Entry, LearnerLeftOut, RunStarted
from elastune.core.run import Position
from elastune.report.sample_ledger import ledger
from elastune.train.data.sample_log import SampleSpans, add_left_out, add_steps, newest_left_out, records_of


def trail_of(*sizes: int, length: int = 100) -> SampleSpans:
    """Of steps of these sizes, epoch after epoch."""
    trail: SampleSpans = []
    at = Position()
    for step, size in enumerate(sizes, 1):
        add_steps(trail, at, 1, size, length)
        offset = at.offset + size
        at = Position(at.epoch + offset // length, offset % length, step)
    return trail


def test_a_trail_has_a_piece_an_epoch_whatever_the_steps() -> None:
    assert trail_of(40, 40, 20, 50, 50, 30) == [[0, 0, 100, 100, 1, 3], [1, 0, 100, 100, 4, 5], [2, 0, 30, 100, 6, 6]]


def test_another_length_of_the_epoch_begins_another_piece() -> None:
    trail = trail_of(40, length=100)
    add_steps(trail, Position(0, 40, 1), 1, 30, 90)
    assert trail == [[0, 0, 40, 100, 1, 1], [0, 40, 70, 90, 2, 2]]


def test_the_ledger_takes_what_a_checkpoint_tells() -> None:
    """The controller before had written nothing down, and the run went on after the second epoch."""
    started = RunStarted("program.py", {}, 0, {}, resumed_step=5)
    trail = trail_of(40, 40, 20, 50, 50)
    result = ledger(Entry(0.0, record) for record in [started, *records_of(trail)])
    assert result.exact
    assert [seen.once for seen in result.epochs] == [100, 100]
    missing = ledger(Entry(0.0, record) for record in [started, *records_of(trail[1:])])
    assert not missing.exact


def test_what_was_left_out_outlives_the_controller() -> None:
    trail = trail_of(40, 40, 20)
    left = [
        LearnerLeftOut(learner, 2, 7, 0, 2, 3, [(start, start + 5), (90, 92 + learner)])
        for learner, start in ((0, 50), (1, 60))
    ]
    left[1] = LearnerLeftOut(1, 2, 7, 0, 2, 3, [(60, 65)])
    for each in left:
        add_left_out(trail, each, 100)
    add_steps(trail, Position(1, 0, 3), 1, 50, 100)
    assert trail[-1] == [1, 0, 50, 100, 4, 4]
    *again, first, second = records_of(trail)
    assert sorted((each.learner, each.places) for each in again if isinstance(each, LearnerLeftOut)) == [
        (0, [(50, 55), (90, 92)]),
        (1, [(60, 65)]),
    ]
    started = RunStarted("program.py", {}, 0, {}, resumed_step=4)
    result = ledger(Entry(0.0, record) for record in [started, *records_of(trail)])
    assert result.exact
    assert [seen.left_out for seen in result.epochs] == [12, 0]
    assert (first.first_step, second.first_step) == (1, 4)


def test_how_many_learners_the_newest_round_ended_without() -> None:
    trail = trail_of(40)
    assert newest_left_out(trail, 1) == 0
    for learner in (2, 3):
        add_left_out(trail, LearnerLeftOut(learner, 0, 1, 0, 2, 4, [(50, 60), (70, 80)]), 100)
    add_steps(trail, Position(0, 40, 1), 3, 60, 100)
    assert newest_left_out(trail, 4) == 2
    assert newest_left_out(trail, 1) == newest_left_out(trail, 7) == 0
