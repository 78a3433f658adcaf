"""When links are measured anew: by what reductions take, not by a worker that is late or a step that was."""

from __future__ import annotations

from elastune.train.adaptation.routing import STEPS, LinkWatch


def watched(*times: float) -> LinkWatch:
    watch = LinkWatch()
    for time_s in times:
        watch.observe([time_s, 9.0, 0.0])  # one comes early and waits for long, one has had no samples
    return watch


def test_only_what_lasts_counts() -> None:
    usual = [0.1, 0.11, 0.09] * 5
    assert not watched(*usual).due
    assert not watched(*usual, 0.5, 0.5, *usual).due
    assert watched(*usual, *[0.2] * STEPS).due
    assert watched(*usual, *[0.05] * STEPS).due, "a link that is well again"


def test_what_is_small_is_noise() -> None:
    assert not watched(*[0.001] * 20, *[0.004] * 20).due


def test_a_new_usual() -> None:
    watch = watched(*[0.1] * 10, *[0.3] * 10)
    assert watch.due
    watch.begin()
    for _ in range(30):
        watch.observe([0.3])
    assert not watch.due


def test_nothing_heard_is_nothing_learned() -> None:
    watch = LinkWatch()
    for _ in range(30):
        watch.observe([0.0, 0.0])
    assert watch == LinkWatch()
