"""A command as the program of a study: the file of its search space, and the checks before any trial starts.

The space is a Python file with ``space(trial)``, or a YAML file with a line for each setting::

    lr: {low: 0.001, high: 0.1, log: true}   # a range; of whole numbers where both ends are whole
    batch_size: {choices: [16, 32, 64]}
    epochs: 5                                # one value for all trials
    objectives: {accuracy: max}              # what trials are compared by; or --objective

A range may have a ``default``, the setting of the script itself, which a frontier scales.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastune.core.command import JSON_LINES, TrainingCommand, provided_values, text_of
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.train.program.space import Sample, Space

RANGE_KEYS = ("low", "high", "log", "step")
OBJECTIVES = "objectives"  # no setting of this name in a space file
_FORM = "a setting of a space file is a value, {low: 1, high: 8} or {choices: [1, 2]}"
_SHELL = ("|", ">", "<", "&&", "||", ";", "&", ">>", "2>&1")


def parse_command(text: str, metrics: Sequence[str] = ()) -> TrainingCommand:
    """Return the command of ``--command`` and ``--metrics``.

    Args:
        text: The command line. It is split into words as a shell does it, but no shell runs it.
        metrics: ``json``, or a ``NAME=REGEX`` for each metric.

    Raises:
        UserError: For a text that cannot be split, signs of a shell, and wrong placeholders or expressions.

    Example:
        >>> parse_command("python train.py --lr {lr}").words
        ('python', 'train.py', '--lr', '{lr}')
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError("--command must be words, with closed quotes", f"{text[:80]}: {error}", "quote it") from None
    if signs := [word for word in words if word in _SHELL]:
        fix = "put it into a script, and let --command start the script"
        raise UserError("no shell runs --command, so it has no pipes and redirections", signs[0], fix)
    patterns = tuple(each for each in metrics if each != JSON_LINES)
    if patterns and len(patterns) < len(metrics):
        raise UserError("--metrics is either json or expressions", "both", "leave json out")
    return TrainingCommand(words, patterns)


def check_executable(command: TrainingCommand) -> None:
    """Raise ``UserError`` if the command's first word names no program that can be started."""
    first = command.words[0]
    if first in ("{workers}", "{seed}") or "{" in first:
        return
    if shutil.which(first) is None:
        fix = "check the name, or activate the environment that has it"
        raise UserError("--command must begin with a program that can be started", repr(first), fix)


def check_values(
    command: TrainingCommand,
    config: Mapping[str, Any],
    samples: Iterable[Sample],
    reserved: Collection[str],
    epochs: int | None,
) -> None:
    """Check that every placeholder has a value in every trial, and that every setting has a placeholder.

    Args:
        command: The command.
        config: The settings that all trials have; None for those that the space must choose.
        samples: Configurations of the user's space.
        reserved: Names that are elastune's own in a space.
        epochs: The value of ``--epochs``.

    Raises:
        UserError: For the first contradiction.
    """
    names = command.placeholders
    length = {} if epochs is None else {"epochs": epochs}
    used = {*names, *(["batch_size"] if "batch_per_worker" in names else [])}
    for sample in samples:
        for name in sample.values:
            if name in reserved and name != "workers":
                fix = f"rename it, for example {name}_of_script"
                raise UserError("a space of --command must not use elastune's own names", name, fix)
            if name not in used and name != "workers":
                _refuse_unused(name, f"add {{{name}}} to the command, or leave it out of the space")
        values = {**config, **sample.values, **length}
        values = {**provided_values(values, 1, 0, "."), **values}
        for name in names:
            text_of(name, values.get(name))
    for name, value in config.items():
        if name not in used and value is not None:
            _refuse_unused(name, f"add {{{name}}} to the command, or leave the setting out")
    if epochs is not None and "epochs" not in names:
        _refuse_unused("epochs", "add {epochs} to the command, or leave out --epochs")


def _refuse_unused(name: str, fix: str) -> None:
    raise UserError("every setting must stand in --command", name, fix)


def files_of(command: TrainingCommand) -> list[Path]:
    """Return the Python files that the command names, in their order."""
    paths = [Path(word) for word in command.words if word.endswith(".py")]
    return [path for path in dict.fromkeys(paths) if path.is_file()]


# --- space files ---


@dataclass(frozen=True)
class SpaceFile:
    """A YAML file of a search space.

    Attributes:
        space: ``space(trial)``.
        constants: The settings with one value, and the defaults of others.
        objectives: The metrics to compare trials by, each with "max" or "min".
    """

    space: Space
    constants: dict[str, Any]
    objectives: dict[str, str]


def read_space(path: Path) -> SpaceFile:
    """Read a YAML file of a space. Raises ``UserError`` for a wrong file; it names the setting.

    Example:
        >>> read_space(Path("space.yaml")).constants
        {'epochs': 5}
    """
    import yaml  # comes with Optuna, which few commands need

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError("--space must be a file that can be read", f"{path}: {error.strerror}", "check it") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        value = f"{path}: {' '.join(str(error).split())}"[:200]
        raise UserError("a space file must be YAML", value, "lr: {low: 0.001, high: 0.1, log: true}") from None
    if not isinstance(content, dict) or not content or not all(isinstance(name, str) for name in content):
        fix = "lr: {low: 0.001, high: 0.1, log: true}"
        raise UserError("a space file has a name and a range in each line", path, fix)
    objectives = content.pop(OBJECTIVES, {})
    if not isinstance(objectives, dict) or not set(objectives.values()) <= {"max", "min"}:
        raise UserError("objectives name metrics, each max or min", repr(objectives)[:100], "objectives: {acc: max}")
    defaults = {
        name: each.pop("default") for name, each in content.items() if isinstance(each, dict) and "default" in each
    }
    ranges = {name: each for name, each in content.items() if isinstance(each, dict)}
    constants = {name: each for name, each in content.items() if not isinstance(each, dict)}
    constants |= {name: _number(value) if "low" in ranges[name] else value for name, value in defaults.items()}
    for name, value in constants.items():
        if not isinstance(value, bool | int | float | str):
            raise UserError(_FORM, f"{name}: {value!r}"[:100], f"{name}: {{choices: [...]}} for several values")
    for name, each in ranges.items():
        _check_range(name, each)

    def space(trial: Any) -> dict[str, Any]:
        return {name: _suggest(trial, name, each) for name, each in ranges.items()}

    return SpaceFile(space, constants, {str(name): str(each) for name, each in objectives.items()})


def _suggest(trial: Any, name: str, each: Mapping[str, Any]) -> Any:
    if "choices" in each:
        return trial.suggest_categorical(name, each["choices"])
    low, high, step = (_number(each.get(key)) for key in ("low", "high", "step"))
    log = bool(each.get("log", False))
    if isinstance(low, int) and isinstance(high, int) and isinstance(step, int | None):
        return trial.suggest_int(name, low, high, log=log, step=step or 1)
    return trial.suggest_float(name, low, high, log=log, step=step)


def _number(value: Any) -> Any:
    """``value``, where it is a text as the number that it writes: YAML takes 1e-3 for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_range(name: str, each: Mapping[Any, Any]) -> None:
    if "choices" in each:
        choices = each["choices"]
        good = isinstance(choices, list) and bool(choices)
        if not good or not all(isinstance(value, bool | int | float | str) for value in choices) or len(each) > 1:
            raise UserError(_FORM, f"{name}: {dict(each)!r}"[:100], f"{name}: {{choices: [16, 32]}}")
        return
    unknown = [str(key) for key in each if key not in RANGE_KEYS]
    if unknown or "low" not in each or "high" not in each:
        value = f"{name}: {unknown[0] if unknown else 'no low and high'}"
        raise UserError(_FORM, value[:100], f"{name}: {{low: 1, high: 8}}")
    low, high, step = (_number(each.get(key)) for key in ("low", "high", "step"))
    log = each.get("log", False)
    for key, value in (("low", low), ("high", high), ("step", step)):
        if key == "step" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"{key} of a range must be a finite number", f"{name}: {value!r}"[:100], "such as 0.001")
    if not isinstance(log, bool):
        raise UserError("log of a range is true or false", f"{name}: {log!r}"[:100], "log: true")
    if low > high:
        raise UserError("a range must go from low to high", f"{name}: {low} to {high}", "swap them")
    if log and low <= 0:
        raise UserError("a range with log: true must be above 0", f"{name}: {low}", "raise low, or leave log out")
    if step is not None and (step <= 0 or log):
        rule = "a step must be above 0, and goes with no log"
        raise UserError(rule, f"{name}: {step}", "leave step or log out")
