"""Allocations as they are written on a command line."""

from __future__ import annotations

import pytest

from elastune.core.errors import UserError
from elastune.tuning.study.rebalancer import AllocationChoice, parse_allocation
from elastune.tuning.study.throughput import BatchTable


def test_names_and_options() -> None:
    assert parse_allocation("steepest") == AllocationChoice(0.0, 0.5, by_batch=False)
    assert parse_allocation("short_first") == AllocationChoice(0.3, 0.2, by_batch=False)
    assert parse_allocation("short_first:held=0.1,by_batch=true") == AllocationChoice(0.1, 0.2, by_batch=True)
    assert parse_allocation("steepest:least_gain=0.2").least_gain == 0.2


def test_what_is_told_comes_from_the_journal() -> None:
    assert not parse_allocation("steepest").from_journal
    assert parse_allocation("steepest:by_batch=true").from_journal
    assert not parse_allocation("short_first:held=0").from_journal
    assert isinstance(parse_allocation("short_first:by_batch=true").courses().speeds, BatchTable)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("widest", "an allocation must be one that is known"),
        ("short_first:held=1.5", "held of short_first must be"),
        ("short_first:held=x", r"such as held=0\.3$"),
        ("short_first:share=0.2", "short_first has no such option"),
        ("short first", "the allocation is written"),
    ],
)
def test_what_is_wrong_is_told(text: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        parse_allocation(text)
