"""Traces of offers and prices, as text."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.cost import ON_DEMAND, SPOT
from elastune.core.errors import UserError
from elastune.core.plan.prices import parse_availability, parse_prices


def test_an_offer_holds_until_the_next() -> None:
    offer = parse_availability("time,workers\n0, 4\n\n60,2\n100,7\n", "f")
    assert [offer.at(t) for t in (0, 59, 60, 99, 100, 500)] == [4, 4, 2, 2, 7, 7]
    assert offer.end_s == 100.0
    assert offer.worker_seconds(100.0) == 4 * 60 + 2 * 40
    assert offer.worker_seconds(70.0) == 4 * 60 + 2 * 10


def test_dates_count_from_the_first() -> None:
    offer = parse_availability("time,workers\n2026-01-31T12:00:00Z,4\n2026-01-31T14:01:00+02:00,2\n", "f")
    assert offer.absolute
    assert offer.from_zero().steps == ((0.0, 4), (60.0, 2))


def test_prices_as_a_table_and_over_time() -> None:
    table = parse_prices("\ufeffkind,price\nspot,0.9\non-demand,3\n", "f")
    assert (table.at(SPOT, 5.0), table.at(ON_DEMAND, 5.0)) == (0.9, 3.0)
    trace = parse_prices("time,kind,price\n0,spot,0.9\n60,spot,1.5\n0,on-demand,3\n", "f")
    assert (trace.at(SPOT, 59.0), trace.at(SPOT, 60.0), trace.at(ON_DEMAND, 60.0)) == (0.9, 1.5, 3.0)
    assert parse_prices("time,kind,price\n2026-01-31T12:00:00Z,spot,1\n", "f").absolute


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "first line must be time,workers"),
        ("workers,time\n4,0\n", "first line must be time,workers"),
        ("time,workers\n", "a trace has 1 to"),
        ("time,workers\n0,4\n", "two times or more"),
        ("time,workers\n60,4\n0,4\n", "each later"),
        ("time,workers\n0,4\n60,four\n", "line 3: workers 'four'"),
        ("time,workers\n0,4\n60,-1\n", "line 3: workers '-1'"),
        ("time,workers\n0,4\n60\n", "line 3: 1 values"),
        ("time,workers\n0,4\nnan,1\n", "line 3: time"),
        ("time,workers\n0,4\n2026-01-31T12:00:00Z,1\n", "all seconds, or all dates"),
        ("time,workers\n2026-01-31T12:00:00,4\n2026-01-31T12:00:01,4\n", "line 2: time"),
    ],
)
def test_a_broken_offer_is_one_line(text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        parse_availability(text, "f")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("price\n3\n", "first line must be"),
        ("kind,price\nspot,-1\n", "line 2: price"),
        ("kind,price\nspot,inf\n", "line 2: price"),
        ("kind,price\nthe spot,1\n", "line 2: kind"),
        ("kind,price\nspot,1\nspot,2\n", "one price for each kind"),
        ("time,kind,price\n5,spot,1\n5,spot,2\n", "every price comes later"),
    ],
)
def test_broken_prices_are_one_line(text: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        parse_prices(text, "f")


@given(st.text(max_size=60), st.sampled_from(["", "time,workers\n", "kind,price\n", "time,kind,price\n"]))
def test_rubbish_is_a_user_error(text: str, header: str) -> None:
    for parse in (parse_availability, parse_prices):
        with contextlib.suppress(UserError):
            parse(header + text, "f")
