"""``elastune tree``: from coarse to fine, a model for each node of a tree of classes, as one study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options, parse
from elastune.cli.clusters import ClusterOptions
from elastune.cli.commands.join import parse_tree
from elastune.cli.commands.search import tell_study
from elastune.cli.flatten import flatten
from elastune.cli.groups import FastExecution, Folders, Training
from elastune.core.command import CommandGiven


@flatten
def tree(
    file: options.File,
    groups: Annotated[
        str,
        typer.Option(
            "--tree",
            metavar="LISTS",
            help="The groups of classes as nested lists of class numbers: '[[[0,2],[1]],[[3],[4,5]]]'.",
        ),
    ],
    training: Training,
    execution: FastExecution,
    folders: Folders,
    where: ClusterOptions,
    command: CommandGiven,
    workers: Annotated[int, typer.Option(help="Number of worker processes for all nodes together.")] = 1,
    trial_workers: options.TrialWorkers = None,
    fresh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Tensors that are not taken from the node above, such as 'head.*'. May be repeated."
        ),
    ] = None,
) -> int:
    """Train one model for each node of a tree of classes.

    A node's training begins with the weights of the node above it. The nodes below one node train in parallel. FILE's
    config has the settings tree and node, which this command sets.

    elastune classes STUDY --groups 2,5 learns a tree. elastune join OUT --tree LISTS --front STUDY makes one model of
    the result. See docs/transfer.md.

    --json: as of elastune tune, with kind "tune" and tasks: {trial: node}. Nodes are tasks of their own, so front and
    choices are empty and pick is null.
    """
    from elastune.cli.progress import Progress, StudyTracker, told_before
    from elastune.job.output_dir import check_out
    from elastune.reuse.tree_study import train_tree

    found, cluster = parse_tree(groups), where.request()
    bounds = parse.trial_workers(trial_workers)
    low, high = bounds or (None, None)
    out: Path = folders.choose(file, "tree")
    check_out(out, folders.resume)
    with Progress(StudyTracker(len(found.nodes()), None, told_before(out, folders.resume))) as progress:
        train_tree(
            file,
            found,
            out,
            fresh=fresh or (),
            config=training.config,
            workers=workers,
            trial_workers=bounds,
            means=execution.means(None if execution.mesh is not None else low, most_workers=high),
            epochs=training.epochs,
            seed=training.seed,
            divergence=training.factor,
            accept_changes=folders.accept_changes,
            cluster=cluster,
            observe=progress.observe,
            command=command,
        )
    return tell_study(out, folders.json)
