"""elastune: train and tune PyTorch models on a changing set of workers, so that accuracy never pays for scale.

Names are imported when they are first used, so that ``import elastune`` costs nothing.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastune.parallel.comm import (
    process_exit as process_exit,  # early, so that its function of ``atexit`` is a late one
)

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent, unless the program wants to hear

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Policy as Policy
    from elastune.adapt.policies.base import Run as Run
    from elastune.core.errors import Diverged as Diverged
    from elastune.core.errors import UserError as UserError
    from elastune.core.mesh import Mesh as Mesh
    from elastune.core.run import ExecutionSettings as ExecutionSettings
    from elastune.recipes import datasets as datasets
    from elastune.recipes.build import make_network as make_network
    from elastune.recipes.build import make_optimizer as make_optimizer
    from elastune.recipes.build import make_scheduler as make_scheduler
    from elastune.recipes.build import step_scheduler as step_scheduler
    from elastune.recipes.execution_space import suggest_execution as suggest_execution
    from elastune.recipes.settings import batch_defaults as batch_defaults
    from elastune.recipes.settings import network_defaults as network_defaults
    from elastune.recipes.settings import optimizer_defaults as optimizer_defaults
    from elastune.recipes.settings import scheduler_defaults as scheduler_defaults
    from elastune.recipes.spaces import suggest_batch as suggest_batch
    from elastune.recipes.spaces import suggest_network as suggest_network
    from elastune.recipes.spaces import suggest_optimizer as suggest_optimizer
    from elastune.recipes.spaces import suggest_scheduler as suggest_scheduler
    from elastune.recipes.spaces import suggest_sync as suggest_sync
    from elastune.report.explain import explain as explain
    from elastune.runtime.job.run import JobFailed as JobFailed
    from elastune.train.program.load import current_session as current_session
    from elastune.train.session import Session as Session
    from elastune.tuning.cluster_plan.find_plan import find_plan as find_plan
    from elastune.tuning.frontier.find_frontier import find_frontier as find_frontier
    from elastune.tuning.reuse.class_tree import class_tree as class_tree
    from elastune.tuning.reuse.composed_models import composed_of as composed_of
    from elastune.tuning.reuse.composed_models import join as join
    from elastune.tuning.reuse.composed_models import judge_model as judge_model
    from elastune.tuning.reuse.composed_models import stacked_parts as stacked_parts
    from elastune.tuning.reuse.ensemble import Ensemble as Ensemble
    from elastune.tuning.reuse.ensemble import ensemble as ensemble
    from elastune.tuning.reuse.new_members import InputView as InputView
    from elastune.tuning.reuse.new_members import train_members as train_members
    from elastune.tuning.reuse.predictions import predict as predict
    from elastune.tuning.reuse.saved_models import load_composed as load_composed
    from elastune.tuning.reuse.saved_models import load_ensemble as load_ensemble
    from elastune.tuning.reuse.saved_models import record_asset as record_asset
    from elastune.tuning.reuse.saved_models import save_composed as save_composed
    from elastune.tuning.reuse.saved_models import save_ensemble as save_ensemble
    from elastune.tuning.reuse.soup import soup as soup
    from elastune.tuning.reuse.transfer import rank_sources as rank_sources
    from elastune.tuning.reuse.tree_training import learn_classes as learn_classes
    from elastune.tuning.reuse.tree_training import train_tree as train_tree
    from elastune.tuning.study.api import run as run
    from elastune.tuning.study.api import tune as tune
    from elastune.tuning.study.results import Study as Study

_HOMES = {
    "Diverged": "core.errors",
    "UserError": "core.errors",
    "ExecutionSettings": "core.run",
    "Mesh": "core.mesh",
    "JobFailed": "runtime.job.run",
    "Policy": "adapt.policies.base",
    "Run": "adapt.policies.base",
    "Session": "train.session",
    "Study": "tuning.study.results",
    "current_session": "train.program.load",
    "explain": "report.explain",
    "find_frontier": "tuning.frontier.find_frontier",
    "find_plan": "tuning.cluster_plan.find_plan",
    "run": "tuning.study.api",
    "Ensemble": "tuning.reuse.ensemble",
    "ensemble": "tuning.reuse.ensemble",
    "load_ensemble": "tuning.reuse.saved_models",
    "save_ensemble": "tuning.reuse.saved_models",
    "predict": "tuning.reuse.predictions",
    "record_asset": "tuning.reuse.saved_models",
    "class_tree": "tuning.reuse.class_tree",
    "join": "tuning.reuse.composed_models",
    "composed_of": "tuning.reuse.composed_models",
    "judge_model": "tuning.reuse.composed_models",
    "load_composed": "tuning.reuse.saved_models",
    "save_composed": "tuning.reuse.saved_models",
    "learn_classes": "tuning.reuse.tree_training",
    "soup": "tuning.reuse.soup",
    "stacked_parts": "tuning.reuse.composed_models",
    "rank_sources": "tuning.reuse.transfer",
    "train_members": "tuning.reuse.new_members",
    "train_tree": "tuning.reuse.tree_training",
    "InputView": "tuning.reuse.new_members",
    "tune": "tuning.study.api",
    "suggest_batch": "recipes.spaces",
    "suggest_execution": "recipes.execution_space",
    "suggest_network": "recipes.spaces",
    "suggest_optimizer": "recipes.spaces",
    "suggest_scheduler": "recipes.spaces",
    "suggest_sync": "recipes.spaces",
    "make_network": "recipes.build",
    "make_optimizer": "recipes.build",
    "make_scheduler": "recipes.build",
    "step_scheduler": "recipes.build",
    "batch_defaults": "recipes.settings",
    "network_defaults": "recipes.settings",
    "optimizer_defaults": "recipes.settings",
    "scheduler_defaults": "recipes.settings",
}
__all__ = [*sorted(_HOMES), "datasets"]


def __getattr__(name: str) -> Any:
    if name == "datasets":
        return import_module("elastune.recipes.datasets")
    if name == "optuna" or name in _HOMES:
        try:
            if name == "optuna":
                return import_module("elastune.optuna")
            return getattr(import_module(f"elastune.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            from elastune.core.plugins import missing_extra

            if (line := missing_extra(error)) is None:
                raise
            raise ModuleNotFoundError(line, name=error.name) from None
    raise AttributeError(f"module 'elastune' has no attribute {name!r}")
