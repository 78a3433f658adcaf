"""Train from coarse to fine as one study: one trial for each node of a tree of classes, from the weights above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastune.cluster.base import Cluster
from elastune.cluster.kinds.kind import ClusterRequest
from elastune.core.command import CommandGiven
from elastune.core.divergence import FACTOR
from elastune.core.errors import UserError
from elastune.core.run import Config, Means, Program
from elastune.job.output_dir import JOURNAL
from elastune.job.run import Observe
from elastune.journal.reader import read
from elastune.journal.trials import TrialTable, fold
from elastune.reuse.class_tree import ROOT, ClassTree
from elastune.search.stopping.schedule import FixedTrial
from elastune.study.loop.fixed_trials import FixedTrials
from elastune.study.request import StudyRequest
from elastune.study.results.eligible import NODE, TREE
from elastune.study.results.study import Study
from elastune.study.run import tune
from elastune.train.program.load import load_as_guest


class TreeTrials(FixedTrials):
    """A trial for each of ``nodes``, once that of the node above has ended well, with its weights but for ``fresh``.

    Where a node's trial fails, the nodes below it are not begun.

    Args:
        known: The node of each trial that there is already.
        ended: Those of them that have ended well.
    """

    def __init__(
        self, nodes: Sequence[str], first: FixedTrial, fresh: Sequence[str], known: Mapping[int, str], ended: set[int]
    ) -> None:
        super().__init__("member", shares=True)
        self._first, self._fresh = first, tuple(fresh)
        self._nodes = dict(known)
        self._waiting = [node for node in nodes if node not in known.values()]
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
    means: Means | None = None,
    epochs: int | None = None,
    seed: int = 0,
    divergence: float | None = FACTOR,
    accept_changes: bool = False,
    cluster: Cluster | ClusterRequest | None = None,
    observe: Observe | None = None,
    command: CommandGiven | None = None,
) -> Study:
    """Train a model for each node of a tree of classes, as trials of one study. ``join`` makes one model of them.

    The root trains first. As soon as a node's training has ended well, the nodes below it begin with its weights, and
    train in parallel, whatever else still runs. After a kill, at any moment, call this again: the study goes on.

    Args:
        program: A file with ``train(session)`` and ``objectives``. Its config has ``tree``, as plain data, and
            ``node``, the name of the node to train: see ``ClassTree.labels``, ``rows`` and ``outputs``.
        tree: The classes in groups.
        out: The study's folder; what it has of this tree already is continued.
        fresh: Tensors that each node begins anew, such as "head.*", because it tells other things than the node above.
        config: Further settings.
        workers: Number of workers of all trials together.
        trial_workers: Share them out, as in ``tune``.
        means: The system parameters of a trial, apart from workers.
        epochs: Replaces the number of epochs that the program asks of ``session.epochs``.
        seed: The seed of everything random.
        divergence: A training has failed once its loss is this many times that of its start; None: once it is not
            finite.
        accept_changes: Go on with what is in ``out`` though the program or the data have changed.
        cluster: Where trials run; None: on this machine.
        observe: Called with every record of the journal.
        command: The command line that asks for it, for ``elastune resume``.

    Returns:
        The study. Where a node has failed, the nodes below it are missing: its reason is in ``trials``.

    Raises:
        UserError: For a program that does not know of nodes, and for the folder of another study.

    Example:
        >>> tree = elastune.class_tree([[[0, 2], [1, 3]], [[4, 5], [6]]])
        >>> elastune.train_tree("nodes.py", tree, "out", fresh=["head.*"], workers=4)
        >>> model = elastune.join("out", "out", build, tree)
    """
    path, folder = Path(program), Path(out)
    own = load_as_guest(Program(path)).config
    for name in (TREE, NODE):
        if name not in own:
            rule = "a program that is trained for a tree's nodes has tree and node in its config"
            raise UserError(rule, f"no {name} in that of {path}", 'add "tree": [[0], [1]], "node": ""')
    there = (folder / JOURNAL).exists()
    table = fold(read(folder / JOURNAL)) if there else TrialTable()
    request = StudyRequest(
        Program(path),
        folder,
        config={**(config or {}), TREE: tree.to_json()},
        trials=len(tree.nodes()),
        workers=workers,
        trial_workers=trial_workers,
        means=means or Means(mode="fast"),
        epochs=epochs,
        seed=seed,
        divergence=divergence,
        keep="all",
        resume=there,
        command=command,
        accept_changes=accept_changes,
    )
    lives = table.trials.values()
    known = {life.number: str(life.started.config.get(NODE)) for life in lives}
    ended = {life.number for life in lives if life.finished is not None and life.finished.state == "complete"}
    first = FixedTrial({**own, **request.config, NODE: ROOT}, seed, request.means, "member")
    schedule = TreeTrials(tree.nodes(), first, fresh, known, ended)
    return tune(request, space=lambda trial: {NODE: ROOT}, cluster=cluster, observe=observe, given=schedule)
