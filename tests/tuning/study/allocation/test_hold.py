"""Which trials wait, because they would take longest; and until when."""

from __future__ import annotations

import pytest
from tests.support.studies import Telling

from elastune.core.journal.records import Reported, TrialPaused
from elastune.tuning.study.trial_progress import HeldTrials, Length, TrialProgress, is_held


def lengths(*seconds: float) -> list[Length]:
    return [Length(trial, one) for trial, one in enumerate(seconds)]


@pytest.mark.parametrize(
    ("minutes", "share", "held"),
    [
        ((1, 2, 3, 4, 5), 0.2, {4}),
        ((1, 2, 3, 4), 0.2, set()),  # of four nobody can say which is long
        ((1, 2, 3, 4, 5, 6, 7, 8, 9), 0.2, {8}),
        ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 0.2, {8, 9}),
        ((1, 2, 3, 4, 5), 0.0, set()),
        ((1, 2, 3, 4, 5), 0.19, set()),
        ((3, 3, 3, 3, 3), 0.2, set()),
        ((3, 3, 3, 3.1, 4), 0.2, set()),  # hardly longer than others
        ((3, 3, 3, 3.1, 5), 0.2, {4}),
    ],
)
def test_the_longest_part_waits(minutes: tuple[float, ...], share: float, held: set[int]) -> None:
    known = lengths(*(60 * one for one in minutes))
    assert {one.trial for one in known if is_held(one.trial, known, share)} == held
    seconds = lengths(*minutes)
    assert not any(is_held(one.trial, seconds, share) for one in seconds), "starting it again would take about as long"


def test_who_has_not_reported_counts_once_it_is_longer_for_sure() -> None:
    """Ten that began together report in the order of their lengths: the two last ones are held, not each newcomer."""
    held = []
    for now in range(1, 11):
        known = [Length(n, 60 * n) if n <= now else Length(n, 60 * now, at_least=True) for n in range(1, 11)]
        sure = [one if not one.at_least else Length(one.trial, one.seconds + 30, True) for one in known]
        held += [now] if is_held(now, sure, 0.2) else []
    assert held == [9, 10]
    unsure = [*lengths(60, 120, 180, 540), *(Length(trial, 60.0, at_least=True) for trial in (7, 8))]
    assert not is_held(3, unsure, 0.2), "of two nobody knows whether they are longer: four are placed"
    assert not is_held(7, unsure, 0.2), "its own length is not known"


def report(epoch: int) -> Reported:
    return Reported(epoch, 10 * epoch, 640 * epoch, 1.0, {}, epochs=4)


def held_study() -> tuple[Telling, HeldTrials]:
    """Five trials after their first epoch, of 1, 2, 3, 4 and 50 s; the last one is held back."""
    told, holding = Telling(), HeldTrials(TrialProgress(), 0.2, patience_s=60.0)
    for trial in range(5):
        told.start(trial, lr=0.1)
    for trial, seconds in enumerate((1.0, 2.0, 3.0, 4.0, 50.0)):
        told.wait(1.0).report(trial, 1, seconds)
    for entry in told.entries:
        holding.observe(entry)
    return told, holding


def test_each_is_asked_about_once_and_waits_as_long_as_it_would_train() -> None:
    told, holding = held_study()
    for trial in range(4):
        assert not holding.why(trial, report(1), told.now)
    assert holding.why(4, report(1), told.now) == "held back after epoch 1: among the longest 20%"
    assert not holding.why(4, report(2), told.now), "once"
    told.tell(TrialPaused(4, 1, 50.0, 50.0, "held back", cut_off=True, held=True))
    holding.observe(told.entries[-1])
    assert holding.waiting == [4]
    assert holding.waits(4, told.now + 199.0), "four epochs of 50 s"
    assert not holding.waits(4, told.now + 201.0)
    told.resume(4)
    holding.observe(told.entries[-1])
    assert holding.waiting == []
    assert not holding.waits(4, told.now)


def test_nobody_waits_who_is_at_its_end_or_has_no_share() -> None:
    told, holding = held_study()
    assert not holding.why(4, Reported(4, 40, 2560, 200.0, {}, epochs=4), told.now)
    courses = TrialProgress()
    nobody = HeldTrials(courses, 0.0, 60.0)
    for entry in told.entries:
        nobody.observe(entry)
    assert not nobody.why(4, report(1), told.now)


def test_the_shortest_goes_on_first() -> None:
    told, holding = held_study()
    for trial in (4, 3, 0):
        told.wait(1.0).tell(TrialPaused(trial, 1, 1.0, 1.0, "", cut_off=True, held=True))
        holding.observe(told.entries[-1])
    assert holding.waiting == [0, 3, 4]
