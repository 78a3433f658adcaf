"""What an exception says, in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from elastune.train.program.errors import DEEPEST_TRACE, cause_of, text_of, trace_of

HERE = Path(__file__).name


def caught(raised: BaseException) -> BaseException:
    try:
        raise raised
    except BaseException as error:  # noqa: BLE001
        return error


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("two\nlines"), "ValueError: two lines ("),
        (KeyError(), "KeyError ("),
        (GeneratorExit("x"), "GeneratorExit: x ("),
        (SystemExit(0), "the program called sys.exit(0) ("),
        (SystemExit(Mute()), "the program called sys.exit((its text cannot be had: SystemExit)) ("),
        (Mute(), "Mute: (its text cannot be had: SystemExit) ("),
        (ExceptionGroup("both", [ValueError(1), KeyError(2)]), "ExceptionGroup: both (2 sub-exceptions) ("),
    ],
)
def test_one_line_with_its_place(error: BaseException, says: str) -> None:
    result = cause_of(caught(error))
    assert result.startswith(says)
    assert f"({HERE}:" in result
    assert "\n" not in result


def test_an_endless_text_keeps_its_ends_and_its_place() -> None:
    error = caught(ValueError("begin" + "x" * 10**7 + "end"))
    result = cause_of(error)
    assert result.startswith("ValueError: begin")
    assert f"end ({HERE}:" in result
    assert len(result) < 3000
    assert len(trace_of(error)) < 10_000
    assert len(text_of(error)) > 10**7


def test_an_endless_recursion_is_told_by_its_newest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million calls each took 100 microseconds to look up."""

    def endless(depth: int) -> int:
        return endless(depth + 1)

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        with pytest.raises(RecursionError) as caught:
            endless(0)
    finally:
        sys.setrecursionlimit(before)
    looked_up: list[str] = []
    monkeypatch.setattr("linecache.lazycache", lambda name, names: bool(looked_up.append(name)))
    assert cause_of(caught.value, __file__).startswith("RecursionError: maximum recursion depth exceeded (")
    assert f"({HERE}:" in cause_of(caught.value, __file__)
    assert not looked_up
    assert "in endless" in trace_of(caught.value)
    assert len(looked_up) <= DEEPEST_TRACE


def test_the_programs_line_goes_over_a_librarys() -> None:
    with pytest.raises(ValueError, match="Expecting") as error:
        json.loads("{")
    assert f"({HERE}:" in cause_of(error.value, __file__)
    assert f"({HERE}:" not in cause_of(error.value)


def test_what_a_data_loader_hands_on_is_told_without_its_traceback() -> None:
    text = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/lib/worker.py", line 374, in loop\n    data = fetch()\n'
        '  File "/mine.py", line 18, in __getitem__\n    raise ValueError("odd")\nValueError: odd\nwords\n'
    )
    result = cause_of(ValueError(text), "/mine.py")
    assert result == "ValueError: Caught ValueError in DataLoader worker process 0. ValueError: odd words (mine.py:18)"
