"""The words of a training command, and the lines that it reports."""

import math

import pytest

from elastune.core.command import MetricLine, TrainingCommand, match_line, read_line, text_of
from elastune.core.errors import UserError


def test_values_stand_inside_words() -> None:
    command = TrainingCommand(("python", "train.py", "--lr={lr}", "{a.b}/{lr}", "{{lr}}", "--json", '{{"x": {lr}}}'))
    assert command.placeholders == ("lr", "a.b")
    words = command.filled({"lr": 1e-5, "a.b": "x y"})
    assert words == ("python", "train.py", "--lr=1e-05", "x y/1e-05", "{lr}", "--json", '{"x": 1e-05}')
    assert TrainingCommand.from_json(command.to_json()) == command


@pytest.mark.parametrize(
    ("value", "text"), [(0.1, "0.1"), (3, "3"), (True, "True"), ("", ""), ("{lr}", "{lr}"), (10**30, "1" + "0" * 30)]
)
def test_a_value_is_written_as_python_writes_it(value: object, text: str) -> None:
    assert text_of("x", value) == text


@pytest.mark.parametrize("value", [None, [1], math.nan, math.inf, "a\0b"])
def test_a_value_that_no_word_can_hold_is_refused(value: object) -> None:
    with pytest.raises(UserError):
        text_of("x", value)


@pytest.mark.parametrize(
    ("words", "metrics", "says"),
    [
        ((), (), "must name a command"),
        ((" ",), (), "must name a command"),
        (("a", "{"), (), "name in braces"),
        (("a", "{}"), (), "name in braces"),
        (("a", "{lr:.3f}"), (), "name in braces"),
        (("a", "{lr!r}"), (), "name in braces"),
        (("a", "{a[0]}"), (), "name in braces"),
        (("a", "b\0"), (), "zero byte"),
        (("a",), ("accuracy",), "json or NAME=REGEX"),
        (("a",), ("accuracy=(",), "one of Python's"),
        (("a",), ("accuracy=acc",), "one group"),
        (("a",), ("accuracy=(a)(b)",), "one group"),
    ],
)
def test_a_wrong_command_is_refused(words: tuple[str, ...], metrics: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says.replace("(", "\\(")):
        TrainingCommand(words, metrics)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"accuracy": 0.9}', MetricLine({"accuracy": 0.9}, {})),
        ('  {"accuracy": 1, "epoch": 3.0, "step": 7}\r', MetricLine({"accuracy": 1.0}, {"epoch": 3, "step": 7})),
        ('{"accuracy": 0.9, "epoch": -1, "best": true, "x": "y", "z": null}', MetricLine({"accuracy": 0.9}, {})),
        ('{"accuracy": 0.9, "epoch": NaN}', MetricLine({"accuracy": 0.9}, {})),
        ('{"epoch": 3}', None),
        ("{}", None),
        ('{"accuracy": 0.9', None),
        ("accuracy 0.9", None),
        ("[0.9]", None),
        ("{" * 100_000 + "}", None),
        ('{"a":' * 100_000 + "}" * 100_000, None),
    ],
)
def test_lines_of_json(line: str, expected: MetricLine | None) -> None:
    assert read_line(line) == expected


def test_a_number_beyond_all_floats_is_infinite() -> None:
    line = read_line('{"loss": 1' + "0" * 400 + "}")
    assert line == MetricLine({"loss": math.inf}, {})


def test_lines_by_expressions() -> None:
    patterns = TrainingCommand(("a",), ("acc=acc ([^ ]+)", "epoch=ep ([0-9]+)")).patterns
    assert match_line("ep 3 acc 0.5", patterns) == MetricLine({"acc": 0.5}, {"epoch": 3})
    assert match_line("ep 4", patterns) == MetricLine({}, {"epoch": 4})
    assert match_line("acc high", patterns) is None
