"""elastune: train and tune PyTorch models on a changing set of workers, so that accuracy never pays for scale.

Names are imported when they are first used, so that ``import elastune`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastune.core.errors import Diverged as Diverged
    from elastune.core.errors import UserError as UserError
    from elastune.core.mesh import Mesh as Mesh
    from elastune.core.run import Means as Means
    from elastune.frontier.api import find_frontier as find_frontier
    from elastune.frontier.plan_api import find_plan as find_plan
    from elastune.job.run import JobFailed as JobFailed
    from elastune.policies.base import Policy as Policy
    from elastune.policies.run import Run as Run
    from elastune.recipes import datasets as datasets
    from elastune.recipes.build import make_network as make_network
    from elastune.recipes.build import make_optimizer as make_optimizer
    from elastune.recipes.build import make_scheduler as make_scheduler
    from elastune.recipes.build import step_scheduler as step_scheduler
    from elastune.recipes.means_space import suggest_means as suggest_means
    from elastune.recipes.settings import batch_defaults as batch_defaults
    from elastune.recipes.settings import network_defaults as network_defaults
    from elastune.recipes.settings import optimizer_defaults as optimizer_defaults
    from elastune.recipes.settings import scheduler_defaults as scheduler_defaults
    from elastune.recipes.spaces import suggest_batch as suggest_batch
    from elastune.recipes.spaces import suggest_network as suggest_network
    from elastune.recipes.spaces import suggest_optimizer as suggest_optimizer
    from elastune.recipes.spaces import suggest_scheduler as suggest_scheduler
    from elastune.recipes.sync_space import suggest_sync as suggest_sync
    from elastune.report.explain import explain as explain
    from elastune.reuse.class_tree import class_tree as class_tree
    from elastune.reuse.composed import composed_of as composed_of
    from elastune.reuse.composed import judge_model as judge_model
    from elastune.reuse.composed_file import load_composed as load_composed
    from elastune.reuse.composed_file import save_composed as save_composed
    from elastune.reuse.ensemble import Ensemble as Ensemble
    from elastune.reuse.ensemble import ensemble as ensemble
    from elastune.reuse.ensemble_file import load_ensemble as load_ensemble
    from elastune.reuse.ensemble_file import save_ensemble as save_ensemble
    from elastune.reuse.joined import join as join
    from elastune.reuse.learn_classes import learn_classes as learn_classes
    from elastune.reuse.members import train_members as train_members
    from elastune.reuse.predict import predict as predict
    from elastune.reuse.record import record_asset as record_asset
    from elastune.reuse.soup import soup as soup
    from elastune.reuse.stacked import stacked_parts as stacked_parts
    from elastune.reuse.transfer import rank_sources as rank_sources
    from elastune.reuse.tree_study import train_tree as train_tree
    from elastune.reuse.view import InputView as InputView
    from elastune.study.api import run as run
    from elastune.study.api import tune as tune
    from elastune.study.results.study import Study as Study
    from elastune.train.program.current import current_session as current_session
    from elastune.train.session import Session as Session

_HOMES = {
    "Diverged": "core.errors",
    "UserError": "core.errors",
    "Means": "core.run",
    "Mesh": "core.mesh",
    "JobFailed": "job.run",
    "Policy": "policies.base",
    "Run": "policies.run",
    "Session": "train.session",
    "Study": "study.results.study",
    "current_session": "train.program.current",
    "explain": "report.explain",
    "find_frontier": "frontier.api",
    "find_plan": "frontier.plan_api",
    "run": "study.api",
    "Ensemble": "reuse.ensemble",
    "ensemble": "reuse.ensemble",
    "load_ensemble": "reuse.ensemble_file",
    "save_ensemble": "reuse.ensemble_file",
    "predict": "reuse.predict",
    "record_asset": "reuse.record",
    "class_tree": "reuse.class_tree",
    "join": "reuse.joined",
    "composed_of": "reuse.composed",
    "judge_model": "reuse.composed",
    "load_composed": "reuse.composed_file",
    "save_composed": "reuse.composed_file",
    "learn_classes": "reuse.learn_classes",
    "soup": "reuse.soup",
    "stacked_parts": "reuse.stacked",
    "rank_sources": "reuse.transfer",
    "train_members": "reuse.members",
    "train_tree": "reuse.tree_study",
    "InputView": "reuse.view",
    "tune": "study.api",
    "suggest_batch": "recipes.spaces",
    "suggest_means": "recipes.means_space",
    "suggest_network": "recipes.spaces",
    "suggest_optimizer": "recipes.spaces",
    "suggest_scheduler": "recipes.spaces",
    "suggest_sync": "recipes.sync_space",
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
    if name in _HOMES:
        return getattr(import_module(f"elastune.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'elastune' has no attribute {name!r}")
