"""elastune: train and tune PyTorch models on a changing set of workers, so that accuracy never pays for scale.

Names are imported when they are first used, so that ``import elastune`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastune.core.errors import Diverged as Diverged
    from elastune.core.errors import UserError as UserError
    from elastune.core.run import Means as Means
    from elastune.drive.api import run as run
    from elastune.drive.api import tune as tune
    from elastune.drive.job import JobFailed as JobFailed
    from elastune.drive.results import Study as Study
    from elastune.policies.base import Policy as Policy
    from elastune.policies.run import Run as Run
    from elastune.train import datasets as datasets
    from elastune.train.session import Session as Session

_HOMES = {
    "Diverged": "core.errors",
    "UserError": "core.errors",
    "Means": "core.run",
    "JobFailed": "drive.job",
    "Policy": "policies.base",
    "Run": "policies.run",
    "Session": "train.session",
    "Study": "drive.results",
    "run": "drive.api",
    "tune": "drive.api",
}
__all__ = [*sorted(_HOMES), "datasets"]


def __getattr__(name: str) -> Any:
    if name == "datasets":
        return import_module("elastune.train.datasets")
    if name in _HOMES:
        return getattr(import_module(f"elastune.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'elastune' has no attribute {name!r}")
