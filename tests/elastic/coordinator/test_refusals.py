"""A flood of refusals is a few lines, and costs bounded memory."""

from __future__ import annotations

from elastune.core.journal.records import ConnectionsRefused
from elastune.elastic.wire.server import EVERY_S, KNOWN_LIMIT, OTHERS, Refusals, refusal_line


def test_the_first_is_told_at_once_and_the_others_by_the_minute() -> None:
    refusals = Refusals()
    for at in range(1000):
        refusals.note("10.0.0.9", "why", at / 100)
    assert refusals.due(10.0) == [ConnectionsRefused("10.0.0.9", "why", 1)]
    assert refusals.due(EVERY_S - 0.1) == []
    assert refusals.due(EVERY_S) == [ConnectionsRefused("10.0.0.9", "why", 999)]
    refusals.note("10.0.0.9", "why", EVERY_S + 1)
    assert refusals.due(EVERY_S + 1) == []
    assert refusals.due(2 * EVERY_S) == [ConnectionsRefused("10.0.0.9", "why", 1)]
    assert refusals.due(4 * EVERY_S) == []
    refusals.note("10.0.0.9", "why", 5 * EVERY_S)
    assert len(refusals.due(5 * EVERY_S)) == 1


def test_however_many_hosts_come_few_are_known() -> None:
    refusals = Refusals()
    for number in range(10_000):
        refusals.note(f"host{number}", "why", 0.0)
    result = refusals.due(0.0)
    assert len(result) == KNOWN_LIMIT + 1
    assert result[-1].host == OTHERS
    assert refusals.due(EVERY_S) == [ConnectionsRefused(OTHERS, "why", 10_000 - KNOWN_LIMIT - 1)]


def test_in_words() -> None:
    once, often = (refusal_line(ConnectionsRefused("10.0.0.9", "it has another token", times)) for times in (1, 7))
    assert once == "a connection from 10.0.0.9 was not let in: it has another token"
    assert often == once + ", 7 times within a minute"
