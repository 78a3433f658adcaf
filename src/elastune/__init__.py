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
    from elastune.search.choices import suggest_batch as suggest_batch
    from elastune.search.choices import suggest_means as suggest_means
    from elastune.search.choices import suggest_network as suggest_network
    from elastune.search.choices import suggest_optimizer as suggest_optimizer
    from elastune.search.choices import suggest_scheduler as suggest_scheduler
    from elastune.train import datasets as datasets
    from elastune.train.build import make_network as make_network
    from elastune.train.build import make_optimizer as make_optimizer
    from elastune.train.build import make_scheduler as make_scheduler
    from elastune.train.build import step_scheduler as step_scheduler
    from elastune.train.session import Session as Session
    from elastune.train.settings import batch_defaults as batch_defaults
    from elastune.train.settings import network_defaults as network_defaults
    from elastune.train.settings import optimizer_defaults as optimizer_defaults
    from elastune.train.settings import scheduler_defaults as scheduler_defaults

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
    "suggest_batch": "search.choices",
    "suggest_means": "search.choices",
    "suggest_network": "search.choices",
    "suggest_optimizer": "search.choices",
    "suggest_scheduler": "search.choices",
    "make_network": "train.build",
    "make_optimizer": "train.build",
    "make_scheduler": "train.build",
    "step_scheduler": "train.build",
    "batch_defaults": "train.settings",
    "network_defaults": "train.settings",
    "optimizer_defaults": "train.settings",
    "scheduler_defaults": "train.settings",
}
__all__ = [*sorted(_HOMES), "datasets"]


def __getattr__(name: str) -> Any:
    if name == "datasets":
        return import_module("elastune.train.datasets")
    if name in _HOMES:
        return getattr(import_module(f"elastune.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'elastune' has no attribute {name!r}")
