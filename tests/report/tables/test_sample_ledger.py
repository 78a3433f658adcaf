"""The ledger against a counter that knows every step: whoever makes claims, and however they are cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastune.core.journal.records import Entry, LearnerLeftOut, RunFinished, RunStarted, StepsCompleted
from elastune.report.sample_ledger import ledger, left_out, lines

STARTED = RunStarted("p.py", {}, 0, {})


def claim(first: int, last: int, start: int, stop: int, **more: int) -> StepsCompleted:
    fields = {"worker": 0, "version": 1, "workers": 2, "epoch": 0, "length": 100, **more}
    return StepsCompleted(start=start, stop=stop, first_step=first, last_step=last, **fields)


def finished(stopped: str = "complete", steps: int = 10) -> RunFinished:
    return RunFinished("sha", 1, steps, 100, 1.0, {}, stopped=stopped)  # type: ignore[arg-type]


def of(*records: object):
    return ledger(Entry(float(i), record) for i, record in enumerate([STARTED, *records]))  # type: ignore[arg-type]


def test_an_epoch_seen_once_by_several_workers_in_different_pieces() -> None:
    result = of(
        claim(1, 4, 0, 40),
        claim(5, 10, 40, 100),
        claim(1, 10, 0, 100, worker=1),
        claim(3, 10, 20, 100, worker=2),
        finished(),
    )
    assert result.exact
    assert result.steps == 10
    assert lines(result) == ("epoch 1: 100/100 seen once", "ledger: 100 samples in 10 steps, each seen once")


def test_a_missed_and_a_repeated_range_are_named() -> None:
    missed = of(claim(1, 4, 0, 40), claim(5, 9, 50, 100), finished())
    assert not missed.exact
    assert missed.epochs[0].missed == ((40, 50),)
    assert "10 missed (places 40..49)" in lines(missed)[0]
    twice = of(claim(1, 4, 0, 40), claim(5, 11, 30, 100), finished())
    assert twice.epochs[0].repeated == ((30, 40),)
    assert "10 seen several times (places 30..39)" in lines(twice)[0]
    assert "NOT each seen once" in lines(twice)[-1]


def test_workers_that_disagree_are_a_dispute() -> None:
    result = of(claim(1, 10, 0, 100), claim(1, 5, 0, 60, worker=1), claim(6, 10, 50, 100, worker=1), finished())
    assert not result.exact
    assert result.disputes


def test_the_last_epoch_may_be_unfinished_if_training_is() -> None:
    part = of(claim(1, 4, 0, 40))
    assert part.exact
    assert lines(part)[0] == "epoch 1: 40/100 seen once so far"
    assert of(claim(1, 4, 0, 40), finished("max_steps", 4)).exact
    assert not of(claim(1, 4, 0, 40), finished("complete", 4)).exact
    assert not of(claim(1, 4, 0, 40), claim(5, 5, 0, 10, epoch=1)).exact


def test_of_a_stream_whose_length_nobody_knows_all_that_was_used_counts() -> None:
    stream = of(claim(1, 4, 0, 40, length=0), claim(5, 10, 40, 90, length=0), finished())
    assert lines(stream) == ("epoch 1: 90/90 seen once", "ledger: 90 samples in 10 steps, each seen once")
    missed = of(claim(1, 4, 0, 40, length=0), claim(5, 9, 50, 90, length=0), finished())
    assert missed.epochs[0].missed == ((40, 50),)


def test_a_resumed_run_takes_back_what_its_checkpoint_did_not_hold() -> None:
    resumed = replace(STARTED, resumed_step=4)
    assert of(claim(1, 4, 0, 40), claim(5, 8, 40, 80), resumed, claim(5, 10, 40, 100), finished()).exact
    assert of(claim(1, 8, 0, 80), resumed, claim(5, 10, 40, 100), finished()).exact
    assert of(claim(1, 8, 0, 80), resumed).epochs[0].once == 40
    assert of(claim(1, 8, 0, 80), replace(STARTED, resumed_step=None), claim(1, 10, 0, 100), finished()).exact
    assert not of(claim(1, 4, 0, 40), claim(5, 8, 40, 80), resumed, claim(7, 10, 60, 100), finished()).exact


def test_a_later_version_takes_back_what_was_lost_with_an_earlier_one() -> None:
    again = of(claim(1, 7, 0, 70), claim(5, 10, 40, 100, version=2), finished())
    assert again.exact
    assert again.steps == 10
    # At another batch size, too: the steps that were lost are not those that were taken.
    assert of(claim(1, 7, 0, 70), claim(5, 7, 40, 100, version=2), finished()).exact


def test_steps_that_nobody_claims_are_told() -> None:
    result = of(claim(1, 4, 0, 40), claim(6, 10, 40, 100), finished())
    assert "steps 5 to 5" in " ".join(result.disputes)


def without(learner: int, first: int, last: int, *places: tuple[int, int], version: int = 1) -> LearnerLeftOut:
    return LearnerLeftOut(learner, 2, version, 0, first, last, list(places))


def test_what_a_round_ended_without_is_told_and_counts_as_not_seen() -> None:
    claims = claim(1, 5, 0, 50), claim(6, 10, 50, 100, version=2)
    outcome = without(3, 6, 10, (65, 75), (90, 100), version=2)
    result = of(*claims, outcome, outcome, finished())  # every member says it
    assert result.exact
    assert (result.epochs[0].once, result.epochs[0].left_out) == (80, 20)
    assert "epoch 1: 80/100 seen once, 20 left out" in lines(result, all_epochs=False)[0]
    assert "20 left out with learners that were lost or late" in lines(result)[-1]
    assert "left out twice" in " ".join(of(*claims, outcome, without(1, 6, 10, (70, 72), version=2)).disputes)
    assert "not used once" in " ".join(of(*claims, without(1, 6, 10, (95, 102), version=2), finished()).disputes)
    # The round was done again, or training went on from before it.
    assert of(*claims, outcome, claim(6, 10, 50, 100, version=3), finished()).epochs[0].left_out == 0
    resumed = RunStarted("program.py", {}, 0, {}, resumed_step=5)
    assert of(*claims, outcome, resumed, claim(6, 10, 50, 100), finished()).epochs[0].left_out == 0
    # A checkpoint knows what was left out up to it, but not whose learners these were.
    after = RunStarted("program.py", {}, 0, {}, resumed_step=10)
    again = claim(1, 10, 0, 100, worker=-1, version=0), replace(outcome, worker=-1, version=0)
    story = [Entry(float(i), record) for i, record in enumerate([STARTED, *claims, outcome, after, *again, finished()])]
    assert [each.worker for each in left_out(story)] == [outcome.worker]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[StepsCompleted], dict[int, Counter[int]], dict[int, int]]:
    """Claims of a simulated training, its places counted one by one, and the epochs' lengths."""
    claims: list[StepsCompleted] = []
    counted: dict[int, Counter[int]] = {}
    lengths: dict[int, int] = {}
    step, version, workers = 0, 1, {0: 0}  # worker -> the step it has been there since
    for epoch in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 40))
        lengths[epoch], counted[epoch], place = length, Counter(), 0
        own: dict[int, StepsCompleted] = {}
        while place < length:
            if draw(st.integers(0, 3)) == 0:  # a new version, perhaps with other workers
                claims += own.values()
                own, version = {}, version + 1
                workers = dict.fromkeys(draw(st.sets(st.integers(0, 3), min_size=1, max_size=3)), step)
            stop = min(length, place + draw(st.integers(1, 9)))
            fault = draw(st.sampled_from(["", "", "", "", "skip", "again"]))
            start = {"": place, "skip": min(place + 1, stop - 1), "again": max(0, place - 2)}[fault]
            counted[epoch].update(range(start, stop))
            step += 1
            fields = {"version": version, "epoch": epoch, "length": length, "workers": len(workers)}
            for worker in workers:
                known = own.get(worker)
                if known is not None and known.stop == start and draw(st.booleans()):
                    own[worker] = replace(known, stop=stop, last_step=step)
                else:
                    claims += [known] if known is not None else []
                    own[worker] = claim(step, step, start, stop, worker=worker, **fields)
            place = stop
        claims += own.values()
    return draw(st.permutations(claims)), counted, lengths


@given(histories())
def test_it_counts_as_one_who_watched_every_step(
    history: tuple[list[StepsCompleted], dict[int, Counter[int]], dict[int, int]],
) -> None:
    claims, counted, lengths = history
    result = of(*claims, finished())
    truly_exact = all(counted[epoch] == Counter(range(length)) for epoch, length in lengths.items())
    assert result.exact == truly_exact
    if not result.disputes:
        for seen in result.epochs:
            count = counted[seen.epoch]
            assert seen.once == sum(times == 1 for times in count.values())
            assert {p for a, b in seen.missed for p in range(a, b)} == set(range(lengths[seen.epoch])) - set(count)
            assert {p for a, b in seen.repeated for p in range(a, b)} == {p for p, times in count.items() if times > 1}
