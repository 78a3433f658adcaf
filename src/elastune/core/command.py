"""A training command: the words of ``--command``, in which placeholders such as ``{lr}`` stand for settings.

A value replaces a placeholder inside one word, after the command line was split. No shell reads the words, so a value
can never become a second word, an option or another command.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastune.core.errors import UserError

PROVIDED = ("workers", "seed", "folder", "batch_per_worker")
"""Placeholders that need no setting: the trial's processes, its seed, its folder, which stays after a stop, and
``batch_size`` over ``workers``."""
JSON_LINES = "json"
POSITIONS = ("epoch", "epochs", "step", "samples")
"""Keys of a line that say where the training is. All other numbers of the line are metrics."""
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_RULE = "a placeholder of --command is a name in braces, such as {lr}"


@dataclass(frozen=True)
class TrainingCommand:
    """A command that trains once, and reports its metrics as lines of text.

    Attributes:
        words: The command and its arguments, with placeholders.
        metrics: How lines of its output become metrics, each as ``NAME=REGEX``. Empty: by lines of JSON.

    Raises:
        UserError: For a command without words, a wrong placeholder, and a wrong regular expression.

    Example:
        >>> command = TrainingCommand(("python", "train.py", "--lr", "{lr}"))
        >>> command.filled({"lr": 0.1})
        ('python', 'train.py', '--lr', '0.1')
    """

    words: tuple[str, ...]
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.words or not self.words[0].strip():
            raise UserError("--command must name a command", repr(" ".join(self.words)), '"python train.py --lr {lr}"')
        if any("\0" in word for word in self.words):
            raise UserError("a command's words must be text", "a zero byte", "leave it out")
        _ = self.placeholders, self.patterns

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The names of all placeholders, each once, in their order."""
        return tuple(dict.fromkeys(name for word in self.words for name in _names(word)))

    @property
    def patterns(self) -> dict[str, re.Pattern[str]]:
        """The regular expression of each metric."""
        return dict(_pattern(text) for text in self.metrics)

    def filled(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the words with ``values`` in place of their placeholders. Raises ``UserError`` for a missing one."""

        def value_of(match: re.Match[str]) -> str:
            name = match[1]
            if name is None:
                return match[0][0]  # doubled braces stand for one
            return text_of(name, values.get(name))

        return tuple(_PLACEHOLDER.sub(value_of, word) for word in self.words)

    def to_json(self) -> dict[str, list[str]]:
        """Return plain values for a journal."""
        return {"words": list(self.words), "metrics": list(self.metrics)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> TrainingCommand:
        """Return what ``to_json`` described."""
        return cls(tuple(map(str, plain["words"])), tuple(map(str, plain["metrics"])))


def text_of(name: str, value: object) -> str:
    """Return a setting as a command has it: numbers, ``True`` and ``False`` as Python writes them, and text as it is.

    Raises:
        UserError: For a value that is missing, and for a list.
    """
    if isinstance(value, str) and "\0" not in value:
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if value is None:
        fix = f"give {name} a range in the space, or use --set {name}=VALUE"
        raise UserError("every placeholder of --command needs a value", f"{{{name}}}", fix)
    rule = "a placeholder stands for a finite number, a truth or a text"
    raise UserError(rule, f"{name}={value!r}"[:100], f"let the space return a text for {name}")


def _names(word: str) -> Iterator[str]:
    for match in _PLACEHOLDER.finditer(word):
        name = match[1]
        if name is None and len(match[0]) == 1:
            raise UserError(_RULE, repr(word)[:100], "write a brace that is none as {{ or }}")
        if name is not None and not _NAME.fullmatch(name):
            raise UserError(_RULE, f"{{{name}}}"[:100], "write a brace that is none as {{ or }}")
        if name is not None:
            yield name


def _pattern(text: str) -> tuple[str, re.Pattern[str]]:
    name, equals, expression = text.partition("=")
    rule, fix = "--metrics is json or NAME=REGEX", '--metrics "accuracy=acc: ([0-9.]+)"'
    if not equals or not _NAME.fullmatch(name):
        raise UserError(rule, repr(text)[:100], fix)
    try:
        pattern = re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError("the REGEX of --metrics must be one of Python's", f"{text[:80]}: {error}", fix) from None
    if pattern.groups != 1:
        raise UserError("the REGEX of --metrics has one group, around the number", text[:80], fix)
    return name, pattern


def provided_values(config: Mapping[str, Any], workers: int, seed: int, folder: str) -> dict[str, Any]:
    """Return the values of ``PROVIDED``; ``batch_per_worker`` only beside a setting ``batch_size`` that they can share.

    Args:
        config: The settings of the trial.
        workers: Its processes.
        seed: Its seed.
        folder: Its folder.

    Example:
        >>> provided_values({"batch_size": 64}, 2, 0, ".")["batch_per_worker"]
        32
    """
    batch, plain = config.get("batch_size"), {"workers": workers, "seed": seed, "folder": folder}
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < workers:
        return plain
    return {**plain, "batch_per_worker": batch // workers}


# --- lines of output ---


@dataclass(frozen=True)
class MetricLine:
    """What a command reported in one line.

    Attributes:
        metrics: The numbers, by name.
        position: The keys of ``POSITIONS`` that the line has.
    """

    metrics: dict[str, float]
    position: dict[str, int]


def read_line(line: str) -> MetricLine | None:
    """Return what a line of JSON reports; None for any other line, and for an object without numbers.

    Example:
        >>> read_line('{"epoch": 2, "accuracy": 0.9}')
        MetricLine(metrics={'accuracy': 0.9}, position={'epoch': 2})
    """
    text = line.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(plain, dict):
        return None
    numbers = {name: value for name, value in plain.items() if _is_number(value)}
    position = {name: int(numbers[name]) for name in POSITIONS if _is_position(numbers.get(name))}
    metrics = {name: _float(value) for name, value in numbers.items() if name not in POSITIONS}
    return MetricLine(metrics, position) if metrics else None


def match_line(line: str, patterns: Mapping[str, re.Pattern[str]]) -> MetricLine | None:
    """Return what a line reports by regular expressions. A match for "epoch" or "step" is a position, as in JSON."""
    numbers: dict[str, float] = {}
    for name, pattern in patterns.items():
        if (match := pattern.search(line)) is not None and match[1] is not None:
            try:
                numbers[name] = float(match[1])
            except ValueError:
                continue
    position = {name: int(numbers[name]) for name in POSITIONS if _is_position(numbers.get(name))}
    metrics = {name: value for name, value in numbers.items() if name not in POSITIONS}
    return MetricLine(metrics, position) if metrics or position else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _is_position(value: float | None) -> bool:
    return value is not None and 0 <= value < 2**53 and value == int(value)
