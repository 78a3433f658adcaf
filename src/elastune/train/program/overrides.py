"""Settings by which a user replaces those of a program; wrong kinds of values are refused before a worker starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastune.core.errors import UserError
from elastune.core.run import Config, ConfigValue
from elastune.train.program.load import merge, setting_of

if TYPE_CHECKING:
    from elastune.train.program.space import Sample, Space

KINDS = {"bool": "true or false", "number": "a number", "list": "a list", "text": "a text", "null": "null"}
MOST_SHOWN = 8  # choices in an error text


def override(config: Config, changes: Config, space: Space | None = None) -> Config:
    """Return a program's ``config`` config with a user's ``changes``.

    A change must be of the same kind as the program's value: a number, a truth or a list. A text may become anything,
    and any value may become null. A text must be one of the choices of ``space``, if any, or the program's own value.
    A value that the space returns itself is allowed whatever its kind.

    Args:
        config: The program's config.
        changes: Settings by their names; ``optim.lr`` is ``lr`` of the nested config ``optim``.
        space: The program's search space.

    Raises:
        UserError: For a name that the config lacks, and for a value of a wrong kind.

    Example:
        >>> override({"lr": 0.1}, {"lr": 0.2})
        {'lr': 0.2}
    """
    merged = merge(config, changes)
    doubtful = {name: value for name, value in changes.items() if config and _doubtful(setting_of(config, name), value)}
    samples = _samples(space) if doubtful and space is not None else []
    for name, value in doubtful.items():
        default, choices = setting_of(config, name), _choices(samples, name)
        if any(_alike(value, allowed) for allowed in [*choices, *_returned(samples, name)]):
            continue
        if isinstance(value, str) and any(isinstance(choice, str) for choice in choices):
            texts = list(dict.fromkeys(map(str, choices)))
            shown = ", ".join(texts[:MOST_SHOWN]) + (", ..." if len(texts) > MOST_SHOWN else "")
            fix = f"use one of {shown}, or add it to the choices of space(trial)"
            raise UserError(f"the setting {name} must be one of the choices of the space", repr(value), fix)
        if not _fits(default, value):
            rule = f"the setting {name} must be {KINDS[_kind(default)]}, as in the program's config"
            raise UserError(rule, repr(value), f"there it is {default!r}"[:200])
    return merged


def _doubtful(default: ConfigValue, value: ConfigValue) -> bool:
    """Whether the space must allow a value: it is of another kind, or a text that is not the program's own."""
    return not _fits(default, value) or (isinstance(value, str) and value != default)


def _fits(default: ConfigValue, value: ConfigValue) -> bool:
    free = default is None or value is None or isinstance(default, str | dict)
    return free or _kind(default) == _kind(value)


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    if isinstance(value, int | float):
        return "number"
    return "list" if isinstance(value, list | tuple) else "text"


def _alike(value: object, allowed: object) -> bool:
    """Whether both are equal and of one kind; any two numbers are alike, since a space need not hold a number."""
    return _kind(value) == _kind(allowed) and (value == allowed or _kind(value) != "text")


def _samples(space: Space) -> list[Sample]:
    from elastune.train.program.space import corners  # loads Optuna, which few runs need

    try:
        return corners(space, seed=0)
    except UserError:  # a study refuses a space that fails; a run does not need one
        return []


def _choices(samples: list[Sample], name: str) -> list[Any]:
    """The choices of the space for the parameter ``name``."""
    distributions = (sample.distributions.get(name) for sample in samples)
    return [choice for each in distributions for choice in getattr(each, "choices", ())]


def _returned(samples: list[Sample], name: str) -> list[Any]:
    """The values that the space returned for the setting ``name``, which need not be a parameter."""
    return [sample.values[name] for sample in samples if name in sample.values]
