"""Other packages: extensions that they offer by entry points, and the optional ones that elastune itself uses.

A name is read from the metadata of installed packages, which imports nothing. Only the extension that a user names is
imported. So a package that cannot be imported harms nobody who does not use it.

``pip install elastune`` brings what a worker needs. Searches, pictures and data sets need more packages, which are
imported where they are used. A missing one ends the command in one line, which ``missing_extra`` writes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastune.core.errors import UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


@dataclass(frozen=True)
class Plugins:
    """All extensions of one kind, such as the samplers of other packages.

    Args:
        group: The group of entry points in which packages name their extensions.
        noun: What one of them is called in errors.
        built_in: elastune's own, of rooms that nobody imports: "module:name" by name. Other packages cannot replace
            them.

    Example:
        >>> SAMPLERS = Plugins("elastune.samplers", "sampler")
        >>> "halving" in SAMPLERS.names()  # imports nothing
        True
        >>> make_sampler = SAMPLERS.load("halving")  # imports the package that offers it
    """

    group: str
    noun: str
    built_in: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        """The names of all installed extensions of this kind, sorted. Imports none of them."""
        return tuple(sorted({*self.built_in, *entry_points_of(self.group).names}))

    def package(self, name: str) -> str:
        """The package that offers ``name``, as "toys 1.0"; "" where its metadata does not say."""
        dist = entry_points_of(self.group)[name].dist
        return "" if dist is None else f"{dist.name} {dist.version}"

    def load(self, name: str) -> Any:
        """Import the extension ``name``, which must be one of ``names()``.

        Returns:
            The object that the entry point names.

        Raises:
            UserError: If the import fails, or two packages offer different extensions by this name.
        """
        if name in self.built_in:
            module, _, attribute = self.built_in[name].partition(":")
            return getattr(import_module(module), attribute)
        points = entry_points_of(self.group).select(name=name)
        values = sorted({point.value for point in points})
        if len(values) > 1:
            rule = f"one installed package alone may offer the {self.noun} {name}"
            raise UserError(rule, " and ".join(values), "uninstall one of the packages")
        try:
            return points[name].load()
        except Exception as error:  # the module of another package may raise anything
            rule = f"an installed {self.noun} must load: {type(error).__name__}: {error}"
            raise UserError(rule, f"{name} = {values[0]}", self.fix(name)) from error

    def load_class(self, name: str, base: type, *, named: bool = True) -> Any:
        """Import the class ``name``, a subclass of ``base``.

        Args:
            name: One of ``names()``.
            base: The class that every extension of this kind derives from.
            named: Whether the class must have an attribute ``name`` that equals ``name``.

        Returns:
            The class.

        Raises:
            UserError: As ``load`` does, and for anything but such a class.
        """
        loaded = self.load(name)
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            rule = f"an installed {self.noun} must be a subclass of {base.__module__}.{base.__qualname__}"
            raise UserError(rule, f"{name} = {loaded!r}", self.fix(name))
        if named and getattr(loaded, "name", None) != name:
            rule = f"the class of an installed {self.noun} must have the name of its entry point"
            raise UserError(rule, repr(getattr(loaded, "name", None)), f"set name = {name!r}, or {self.fix(name)}")
        return loaded

    def fix(self, name: str) -> str:
        """What a user can do about a broken extension, for a ``UserError``."""
        return f"mend or uninstall {self.package(name) or 'its package'}"


def entry_points_of(group: str) -> EntryPoints:
    """The entry points of ``group`` in the metadata of all packages on ``sys.path``."""
    return _read_metadata(group, tuple(sys.path))


@lru_cache(maxsize=32)  # some callers ask once a step, and it reads a file of every installed package
def _read_metadata(group: str, path: tuple[str, ...]) -> EntryPoints:
    from importlib.metadata import entry_points  # takes 20 ms, which most commands can spare

    return entry_points(group=group)


# --- optional packages ---


@dataclass(frozen=True)
class Extra:
    """An optional package.

    Attributes:
        package: The name of the package on an index.
        name: The extra of elastune that brings it.
        use: What elastune uses it for.
    """

    package: str
    name: str
    use: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'elastune[{self.name}]'"


EXTRAS: Mapping[str, Extra] = {
    "optuna": Extra("optuna", "tune", "searches and search spaces"),
    "cmaes": Extra("cmaes", "tune", "the sampler cmaes"),
    "scipy": Extra("scipy", "tune", "searches, plans and frontiers"),
    "plotly": Extra("plotly", "report", "reports"),
    "starlette": Extra("starlette", "dashboard", "the dashboard"),
    "uvicorn": Extra("uvicorn", "dashboard", "the dashboard"),
    "matplotlib": Extra("matplotlib", "report", "pictures"),
    "tensorboard": Extra("tensorboard", "report", "TensorBoard's event files"),
    "sklearn": Extra("scikit-learn", "data", "the digits data set"),
    "yaml": Extra("pyyaml", "deploy", "manifests of clusters"),
    "mlflow": Extra("mlflow-skinny", "mlflow", "logs for MLflow"),
    "wandb": Extra("wandb", "wandb", "logs for Weights & Biases"),
}
"""By the name under which Python imports the package."""


def missing_extra(error: ImportError) -> str | None:
    """Return the error line for ``error`` if it is a missing optional package, else None.

    Example:
        >>> missing_extra(ModuleNotFoundError("No module named 'optuna'", name="optuna"))
        "searches and search spaces need optuna (got no such package): pip install 'elastune[tune]'"
    """
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None or not isinstance(error, ModuleNotFoundError):
        return None
    return f"{extra.use} need {extra.package} (got no such package): {extra.install}"
