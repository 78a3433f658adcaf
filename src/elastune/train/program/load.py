"""The user's file: load it once, check what it must define."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from elastune.core.errors import UserError
from elastune.core.run import Config, Program
from elastune.policies.base import Policy
from elastune.train.program.causes import cause_of
from elastune.train.program.current import in_session
from elastune.train.program.guest import as_guest
from elastune.train.program.script import training_of
from elastune.train.program.writes import FOLDER, watched

Surrogate = Callable[[Config, int], Iterable[tuple[float, Mapping[str, float]]]]


@dataclass(frozen=True)
class LoadedProgram:
    """A user's program.

    Attributes:
        train: ``train(session)``.
        space: ``space(trial)``, for tuning.
        objectives: Metric names, each with "max" or "min", for tuning.
        config: The default settings.
        policies: The policy classes that it defines, by name.
        surrogate: ``surrogate(config, workers)``, for simulation: it tells of each epoch how many seconds it takes and
            what is reported after it. A file with one may lack ``train``.
        views: What the file calls so, unchecked; None where it does not.
        constraints: Conditions that settings or metrics must fulfil, for tuning, each as a text.
    """

    train: Callable[[Any], None]
    space: Callable[[Any], dict[str, Any]] | None
    objectives: dict[str, str]
    config: Config
    policies: dict[str, type[Policy]] = field(default_factory=dict)
    surrogate: Surrogate | None = None
    trains: bool = True
    views: object = None
    constraints: tuple[str, ...] = ()


def load_as_guest(program: Program) -> LoadedProgram:
    """Do what ``load`` does in a process that is not the program's: what the import does to the process is undone."""
    with as_guest():
        return load(program)


def load(program: Program) -> LoadedProgram:
    """Import the file (without its ``__main__`` part).

    Raises:
        UserError: Names the rule that the file breaks.
    """
    path = program.path.resolve()
    module = _import(path)
    train, space, surrogate = (getattr(module, name, None) for name in (program.train, "space", "surrogate"))
    train = training_of(module, path) if train is None else train
    if space is not None and not callable(space):
        raise UserError("space must be a function of a trial", type(space).__name__, "def space(trial): return {...}")
    if surrogate is not None and not callable(surrogate):
        fix = "def surrogate(config, workers): return [(seconds, {'accuracy': ...}), ...]"
        raise UserError("surrogate must be a function of config and workers", type(surrogate).__name__, fix)
    if not callable(train) and surrogate is None:
        raise _no_train(program)
    trains = callable(train)
    if not callable(train):

        def train(session: Any) -> None:
            raise _no_train(program)

    if folder := os.environ.get(FOLDER):
        train = watched(train, path, Path(folder))
    train = in_session(train)
    found = _objectives(module), _config(module), _policies(module), surrogate, trains
    views, constraints = getattr(module, "views", None), _constraints(module)
    return LoadedProgram(train, space, *found, views=views, constraints=constraints)


def load_functions(path: Path, names: Iterable[str]) -> dict[str, Callable[..., Any] | None]:
    """Import a file and return its functions ``names``; None for a function that it lacks.

    Raises:
        UserError: As ``load``.
    """
    module = _import(path.resolve())
    found = {name: getattr(module, name, None) for name in names}
    return {name: each if callable(each) else None for name, each in found.items()}


def merge(config: Config, changes: Config) -> Config:
    """Return ``config`` with ``changes``.

    Where a program declares a config, every change must be of a name that the config has. ``optim.lr`` is the name of
    ``lr`` in ``{"optim": {"lr": 0.1}}``.

    Raises:
        UserError: For other names.
    """
    known = {*config, *flat_names(config)}
    unknown = sorted(name for name in changes if name not in known)
    if unknown and (config or any("." in name for name in unknown)):
        fix = f"known: {', '.join(sorted(flat_names(config)))}" if config else "add it to config in the program's file"
        raise UserError("a setting must be one of the program's config", ", ".join(unknown), fix)
    merged: dict[str, Any] = dict(config)
    for name, value in changes.items():
        if name in config or "." not in name:
            merged[name] = value
        else:
            _set_nested(merged, name.split("."), value)
    return merged


def flat_names(config: Mapping[str, Any], within: str = "") -> list[str]:
    """Return the names of all settings; those of a nested config with a dot: "optim.lr"."""
    found: list[str] = []
    for name, value in config.items():
        nested = isinstance(value, dict) and value
        found += flat_names(value, f"{within}{name}.") if nested else [f"{within}{name}"]
    return found


def setting_of(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of a setting by its name, such as "optim.lr"; None where there is none."""
    if name in config:
        return config[name]
    first, dot, rest = name.partition(".")
    inner = config.get(first)
    return setting_of(inner, rest) if dot and isinstance(inner, dict) else None


def _set_nested(config: dict[str, Any], path: list[str], value: Any) -> None:
    """Set what ``path`` leads to, and leave the dicts along it as they were for others."""
    first, *rest = path
    if not rest:
        config[first] = value
        return
    config[first] = dict(config[first])
    _set_nested(config[first], rest, value)


def _no_train(program: Program) -> UserError:
    rule = f"a program must define {program.train}(session)"
    return UserError(rule, program.path, f"add 'def {program.train}(session):' to it")


class _FromSource(SourceFileLoader):
    """Compiles what the file holds now. Python takes what it compiled before for it where time (to the second) and size
    are equal: an edit of one digit by a script.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError("a program must be an existing Python file", path, "check the path")
    if path.suffix != ".py":
        raise UserError("a program must be a Python file", path, "give it the ending .py")
    name = f"elastune_program_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as running the file would
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the user's file raises is the user's to see
        value = f"{path}: {cause_of(error, str(path))}"
        raise UserError("a program must import without errors", value, "fix that line") from None
    return module


def _objectives(module: ModuleType) -> dict[str, str]:
    found = getattr(module, "objectives", {})
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in found.items()):
        raise UserError("objectives must map names to 'max' or 'min'", found, "objectives = {'accuracy': 'max'}")
    return dict(found)


def _constraints(module: ModuleType) -> tuple[str, ...]:
    found = getattr(module, "constraints", ())
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise UserError("constraints must be a list of texts", found, "constraints = ['seconds <= 60']")
    return tuple(found)


def _policies(module: ModuleType) -> dict[str, type[Policy]]:
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return {name: kind for name, kind in found.items() if issubclass(kind, Policy) and kind is not Policy}


def _config(module: ModuleType) -> Config:
    found = getattr(module, "config", {})
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UserError("config must be a dict with text keys", type(found).__name__, "config = {'lr': 0.1}")
    try:
        return dict(json.loads(json.dumps(found, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            "config values must be numbers, text, booleans or lists", error, "keep objects out of it"
        ) from None
