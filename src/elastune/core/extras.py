"""Optional packages: which extra of elastune brings each, and the line for a user who lacks one.

``pip install elastune`` brings what a worker needs. Searches, pictures and data sets need more packages, which are
imported where they are used. A missing one ends the command in one line, which ``missing_extra`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    "matplotlib": Extra("matplotlib", "report", "pictures"),
    "tensorboard": Extra("tensorboard", "report", "TensorBoard's event files"),
    "sklearn": Extra("scikit-learn", "data", "the digits data set"),
    "yaml": Extra("pyyaml", "deploy", "manifests of clusters"),
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
