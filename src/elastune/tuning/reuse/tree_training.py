"""Learn a class tree from what the best kept trial of a study confuses, and train a tree from coarse to fine.

Training is one study with one trial for each node, which begins with the weights of the node above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastune.core.divergence import FACTOR
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import TrialTable, fold
from elastune.core.run import CommandLine, Config, ExecutionSettings, Program
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.kind import ClusterRequest
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.run import Observe
from elastune.train.program.load import load_as_guest
from elastune.tuning.reuse.class_tree import ROOT, ClassTree, confusions, learnt_tree
from elastune.tuning.reuse.ensemble import best_single
from elastune.tuning.reuse.kept_models import LazyPredictions, library
from elastune.tuning.reuse.predictions import judged, score_for
from elastune.tuning.search.schedule import FixedTrial, FixedTrials
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.run import tune
from elastune.tuning.study.trials import NODE, TREE


@dataclass(frozen=True)
class LearnedClasses:
    """A learnt tree of classes.

    Attributes:
        tree: The tree.
        trial: The trial whose predictions it was learnt from.
        data: The name of these predictions.
        between: The mean probability that the model takes a sample's group, of the root's groups, for another one.
        within: The mean probability that it takes the class for another one of the right group.
    """

    tree: ClassTree
    trial: int
    data: str
    between: float
    within: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**vars(self), "tree": self.tree.to_json()}


def learn_classes(
    study: Study | str | Path, groups: int | Sequence[int], *, data: str = "validation", trial: int | None = None
) -> LearnedClasses:
    """Group classes so that the classes which a trained model confuses are together.

    Args:
        study: A study with kept predictions of a classification.
        groups: The number of groups; several numbers, such as (2, 5), for a deeper tree: the groups on each level.
        data: The name of the predictions to read; no test data.
        trial: The trial to read; None: the most accurate one.

    Returns:
        The tree, and how much is confused between its groups and within them.

    Raises:
        UserError: If there are no such predictions, or fewer classes.

    Example:
        >>> elastune.learn_classes("out", 3).tree.to_json()
    """
    candidates = library(study).with_predictions(data)
    if trial is not None:
        candidates = [candidate for candidate in candidates if candidate.trial == trial]
        if not candidates:
            raise UserError("a trial that is asked has kept predictions", f"trial {trial}", "leave --trial out")
    seen = judged(LazyPredictions(candidates, lambda candidate: candidate.predictions(data)))
    if seen.task.kind != "classification":
        raise UserError("classes are learnt from a classification", seen.task.kind, "name its predictions: --data")
    best = best_single(seen, score_for("accuracy", seen.task.kind))
    probabilities, right = seen.outputs[best], seen.right
    tree = learnt_tree(confusions(probabilities, right), groups)
    group = tree.coarse(torch.arange(tree.classes)).numpy()
    in_group = float((probabilities * (group[None] == group[right][:, None])).sum(1).mean())
    hit = float(probabilities[np.arange(len(right)), right].mean())
    return LearnedClasses(tree, candidates[best].trial, data, 1 - in_group, in_group - hit)


class TreeTrials(FixedTrials):
    """The schedule of one trial for each node of a class tree.

    A trial begins once the trial of the node above has ended well. It starts with the weights of that trial, except
    for the ``fresh`` ones. If a node's trial fails, the nodes below it are not begun.

    Args:
        nodes: The nodes of the tree.
        first: The trial of the root, whose settings all trials have.
        fresh: Tensors that each node begins anew.
        begun: The node of each trial that was begun already.
        ended: The trials that have ended well.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        first: FixedTrial,
        fresh: Sequence[str],
        node_of_trial: Mapping[int, str],
        ended: set[int],
    ) -> None:
        super().__init__("member", shares=True)
        self._first, self._fresh = first, tuple(fresh)
        self._nodes = dict(node_of_trial)
        self._waiting = [node for node in nodes if node not in node_of_trial.values()]
        if ROOT in self._waiting:
            self._release(ROOT, None)
        for trial in sorted(ended):
            self._below(trial)

    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        if self._offered is not None:
            self._nodes[trial] = str(self._offered.config[NODE])
        super().started(trial, params, parent)

    def ended(self, trial: int, values: tuple[float, ...] | None, violation: float = 0.0) -> None:
        super().ended(trial, values, violation)
        if values is not None:
            self._below(trial)

    def _below(self, trial: int) -> None:
        for node in list(self._waiting):
            if above(node) == self._nodes[trial]:
                self._release(node, trial)

    def _release(self, node: str, source: int | None) -> None:
        self._waiting.remove(node)
        config = {**self._first.config, NODE: node}
        fresh = () if source is None else self._fresh
        self.todo.append(replace(self._first, config=config, source=source, fresh=fresh))


def above(node: str) -> str | None:
    """Return the name of the node above ``node``; None for the root."""
    return None if node == ROOT else node.rpartition(".")[0]


def train_tree(
    program: str | Path,
    tree: ClassTree,
    out: str | Path,
    *,
    fresh: Sequence[str] = (),
    config: Config | None = None,
    workers: int = 1,
    trial_workers: tuple[int, int] | None = None,
    execution: ExecutionSettings | None = None,
    epochs: int | None = None,
    seed: int = 0,
    divergence: float | None = FACTOR,
    collective_timeout_s: float = StudyRequest.collective_timeout_s,
    accept_changes: bool = False,
    cluster: Cluster | ClusterRequest | None = None,
    observe: Observe | None = None,
    command: CommandLine | None = None,
) -> Study:
    """Train a model for each node of a tree of classes, as trials of one study. ``join`` makes one model of them.

    The root trains first. As soon as a node's training has ended well, the nodes below it begin with its weights. They
    train in parallel with all others. After a kill at any moment, call this again: the study goes on.

    Args:
        program: A file with ``train(session)`` and ``objectives``. Its config has ``tree``, as plain data, and
            ``node``, the name of the node to train: see ``ClassTree.labels``, ``rows`` and ``outputs``.
        tree: The classes in groups.
        out: The study's folder; a study of this tree that it already holds goes on.
        fresh: Tensors that each node begins anew, such as "head.*", because its labels differ from those above.
        config: Further settings.
        workers: Number of workers of all trials together.
        trial_workers: Share them out, as in ``tune``.
        execution: The execution settings of a trial, apart from workers.
        epochs: Replaces the number of epochs that the program asks of ``session.epochs``.
        seed: The seed of everything random.
        divergence: A training has failed once its loss is this many times that of its start; None: once it is not
            finite.
        collective_timeout_s: How long workers wait for a worker that is alive but does not take part in an exchange.
        accept_changes: Whether to go on with the study in ``out`` although the program or the data have changed.
        cluster: Where trials run; None: on this machine.
        observe: Called with every record of the journal.
        command: The command line of the call, for ``elastune resume``.

    Returns:
        The study. If a node has failed, the nodes below it are missing, and ``trials`` has its reason.

    Raises:
        UserError: For a program without the settings ``tree`` and ``node``, and for the folder of another study.

    Example:
        >>> tree = elastune.class_tree([[[0, 2], [1, 3]], [[4, 5], [6]]])
        >>> elastune.train_tree("nodes.py", tree, "out", fresh=["head.*"], workers=4)
        >>> model = elastune.join("out", "out", build, tree)
    """
    path, folder = Path(program), Path(out)
    program_config = load_as_guest(Program(path)).config
    for name in (TREE, NODE):
        if name not in program_config:
            rule = "a program that is trained for a tree's nodes has tree and node in its config"
            raise UserError(rule, f"no {name} in that of {path}", 'add "tree": [[0], [1]], "node": ""')
    exists = (folder / JOURNAL).exists()
    table = fold(read(folder / JOURNAL)) if exists else TrialTable()
    request = StudyRequest(
        Program(path),
        folder,
        config={**(config or {}), TREE: tree.to_json()},
        trials=len(tree.nodes()),
        workers=workers,
        trial_workers=trial_workers,
        execution=execution or ExecutionSettings(mode="fast"),
        epochs=epochs,
        seed=seed,
        divergence=divergence,
        collective_timeout_s=collective_timeout_s,
        keep="all",
        resume=exists,
        command=command,
        accept_changes=accept_changes,
    )
    lives = table.trials.values()
    node_of = {life.number: str(life.started.config.get(NODE)) for life in lives}
    ended = {life.number for life in lives if life.finished is not None and life.finished.state == "complete"}
    first = FixedTrial({**program_config, **request.config, NODE: ROOT}, seed, request.execution, "member")
    schedule = TreeTrials(tree.nodes(), first, fresh, node_of, ended)
    return tune(request, space=lambda trial: {NODE: ROOT}, cluster=cluster, observe=observe, fixed_trials=schedule)
