"""Options out of texts, by annotations."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.core.options import Option, Range, check, options_of, parse, read, split


@dataclass(frozen=True)
class Tea:
    """What a text may be about."""

    cups: Annotated[int, Range(2, 64)] = 2
    sugar: Annotated[float, Range(0, 1, open_high=True)] = 0.5
    kind: Literal["green", "black"] = "green"
    hot: bool = True
    friends: tuple[str, ...] = ()
    minutes: Annotated[int, Range(1)] | None = None
    pot: object = None


@pytest.mark.parametrize(
    ("text", "tea"),
    [
        ("", Tea()),
        ("cups=64, sugar = 0,kind=black,hot=FALSE", Tea(64, 0.0, "black", hot=False)),
        ("friends=ann/bob,cups=3", Tea(3, friends=("ann", "bob"))),
        ("friends=ann,bob, eve,cups=3", Tea(3, friends=("ann", "bob", "eve"))),
        ("minutes=3", Tea(minutes=3)),
        ("minutes=None", Tea()),
    ],
)
def test_options_are_read_by_their_annotations(text: str, tea: Tea) -> None:
    assert parse("tea", text, Tea) == tea


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cups=1", r"cups of tea must be a whole number from 2 to 64 \(got '1'\): such as cups=2"),
        ("cups=2.0", "a whole number from 2 to 64"),
        ("cups=", "an option of tea is written OPTION=VALUE .*: such as tea:cups=2,sugar=0.5"),
        ("cups=2,,hot=true", "is written OPTION=VALUE"),
        ("cups=2,three", "is written OPTION=VALUE"),
        ("cups=2,cups=3", "given once .got cups."),
        ("sugar=1", r"sugar of tea must be a number in \[0, 1\)"),
        ("sugar=nan", r"a number in \[0, 1\)"),
        ("kind=red", "kind of tea must be one of green, black"),
        ("hot=1", "hot of tea must be true or false .*: such as hot=true"),
        ("minutes=0", "a whole number of at least 1 or none .*: such as minutes=64"),
        ("pot=blue", "tea has no such option .got pot.: known: cups, friends, hot"),
    ],
)
def test_what_is_wrong_is_told(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse("tea", text, Tea)


@given(st.text(max_size=40))
def test_any_text_is_options_or_a_user_error(text: str) -> None:
    for start in ("", "cups=", "friends=a,", "minutes="):
        with contextlib.suppress(UserError):
            check("tea", parse("tea", start + text, Tea))


def test_what_is_fixed_cannot_be_named() -> None:
    assert parse("tea", "cups=4", Tea, hot=False) == Tea(4, hot=False)
    with pytest.raises(UserError, match="no such option"):
        parse("tea", "hot=true", Tea, hot=False)


def test_an_instance_is_checked_too() -> None:
    check("tea", Tea(friends=("ann",), minutes=5))
    for wrong in (Tea(cups=1), Tea(cups=2.0), Tea(cups=True), Tea(sugar="0"), Tea(kind="red"), Tea(friends=["ann"])):  # type: ignore[arg-type]
        with pytest.raises(UserError, match="of tea must be"):
            check("tea", wrong)


def test_what_has_no_default_is_needed() -> None:
    class Coffee:
        def __init__(self, beans: int, *rest: int, milk=0.5, **more: int) -> None:  # type: ignore[no-untyped-def]
            self.given = beans, milk

    assert options_of(Coffee) == {"beans": Option(int), "milk": Option(float, default=0.5)}
    assert parse("coffee", "beans=3,milk=1", Coffee).given == (3, 1.0)
    with pytest.raises(UserError, match="coffee needs beans .*: write coffee:beans="):
        parse("coffee", "milk=1", Coffee)


@pytest.mark.parametrize("annotation", [bytes, list[int], int | str, tuple[int, int], tuple[tuple[int, ...], ...], Any])
def test_other_annotations_are_no_options(annotation: Any) -> None:
    assert Option.of(annotation) is None


def test_a_text_is_a_name_and_options() -> None:
    assert split(" tea : cups=2, hot = true ", "a drink", "tea") == ("tea", "cups=2, hot = true")
    assert split("earl-grey", "a drink", "tea") == ("earl-grey", "")
    for text in ("", ":cups=2", "tea:", "1tea", "te a", "x" * 2000, 3):
        with pytest.raises(UserError, match="a drink"):
            split(text, "a drink", "tea")  # type: ignore[arg-type]


def test_nothing_is_known_of_what_has_no_options() -> None:
    assert read("water", "", {}) == {}
    with pytest.raises(UserError, match="water has no such option .got hot.: known: none"):
        read("water", "hot=true", {})
