"""``elastune classes``, ``join`` and ``tree``: a model for each group of classes of a problem.

``classes`` learns the groups from what a trained model confuses. ``tree`` trains a model for each node as one study.
``join`` combines models of parts into one model.
"""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastune.cli import options
from elastune.cli.commands.reuse import Program
from elastune.cli.commands.search import print_study
from elastune.cli.groups import FastExecution, OutputOptions, flatten
from elastune.cli.output import OK, print_error, print_json, print_lines
from elastune.core import notation
from elastune.core.errors import UserError
from elastune.core.run import CommandLine
from elastune.core.settings import OutSettings, ResumeSettings, TimeoutSettings, TrainingSettings
from elastune.runtime.settings import ClusterSettings
from elastune.tuning.study.settings import TrialWorkersSettings

if TYPE_CHECKING:
    from elastune.tuning.reuse.class_tree import ClassTree
    from elastune.tuning.reuse.composed_models import ComposedModel


# --- elastune classes ---


def classes(
    study: Annotated[Path, typer.Argument(help="The output folder of a study that was run with --keep.")],
    groups: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Number of groups, such as 3. For a deeper tree the number on each level, such as 2,5.",
        ),
    ],
    data: Annotated[str, typer.Option(help="Name of the predictions to look at.")] = "validation",
    trial: Annotated[
        int | None,
        typer.Option(help="Number of the trial whose predictions are looked at. [default: the most accurate]"),
    ] = None,
    json: options.Json = False,
) -> int:
    """Group the classes that a trained model confuses.

    Classes that the model often takes for one another come into one group. The command prints the groups as a setting,
    --set tree=..., for trainings of each group. See docs/transfer.md.
    """
    from elastune.cli.commands.reuse import whole_numbers
    from elastune.tuning.reuse.tree_training import learn_classes

    levels = whole_numbers(groups, "groups are counted by whole numbers", "such as --groups 3, or 2,5")
    learnt = learn_classes(study, levels, data=data, trial=trial)
    if json:
        print_json({"kind": "classes", **learnt.to_json()})
        return OK
    shares = f"{learnt.between:.3f} between groups, {learnt.within:.3f} within"
    print_lines(f"confused by trial {learnt.trial} on {learnt.data}: {shares}")
    print_lines(f"--set tree='{json_text.dumps(learnt.tree.to_json(), separators=(',', ':'))}'")
    return OK


# --- elastune join ---


def join(
    studies: Annotated[
        list[Path],
        typer.Argument(help="Output folders of the gate's study and of its parts' studies, or of one study."),
    ],
    front: Annotated[
        Path,
        typer.Option(
            metavar="STUDY",
            help="Output folder of a study of the whole problem. The model is compared with its trials.",
        ),
    ],
    tree: Annotated[
        str | None,
        typer.Option(
            metavar="LISTS", help="The groups of classes as nested lists of class numbers: '[[0,2],[1]]', or deeper."
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="Score to judge by. Of classes: accuracy, log_loss, brier; of values: mse, rmse, mae, r2. "
            "[default: accuracy or mse]"
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="Name of the data set to judge by.")] = "validation",
    test: Annotated[str, typer.Option(help="Name of the data set for a test that nothing is chosen by.")] = "test",
    program: Program = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the model to this safetensors file.")] = None,
    json: options.Json = False,
) -> int:
    """Join trials of parts of a problem into one model.

    The best kept trials of STUDIES are joined, and the model is judged as the trials of the study --front are, which
    was trained for the whole problem.

    With --tree, STUDIES are the study of the gate and the studies of the parts, or the one study of elastune tree.
    Without --tree, STUDIES is one study whose program trains a head over stacked parts.

    The program of the last of STUDIES has build(config), and that of --front has predict(model, name), as for elastune
    predict. With --out the model is also recorded in the journal of --front, and elastune report shows it there. See
    docs/transfer.md.
    """
    from elastune.tuning.reuse.composed_models import composed_of, judge_model
    from elastune.tuning.reuse.kept_models import check_file
    from elastune.tuning.reuse.saved_models import check_recordable, record_asset, save_composed

    if out is not None:
        check_file(out)
        check_recordable(front)
    model = composed_of(studies, None if tree is None else parse_tree(tree))
    composed = judge_model(model, front, objective=objective, data=data, test=test, program=program)
    file = None if out is None else str(save_composed(composed.model, out))
    if out is not None:
        record_asset(composed, out)
    if json:
        print_json({"kind": "composed", **composed.to_json(), "file": file})
    else:
        _print(composed)
        if file is not None:
            print_lines(f"file    {file}")
    return OK


def parse_tree(text: str) -> ClassTree:
    """The tree of classes of a text such as "[[0,2],[1]]". Raises ``UserError``."""
    from elastune.tuning.reuse.class_tree import class_tree

    parsed: Any = notation.value("tree", text)
    if not isinstance(parsed, list):
        raise UserError("--tree is a list of groups of classes", repr(text)[:80], "such as --tree '[[0,2],[1]]'")
    return class_tree(parsed)


def _print(composed: ComposedModel) -> None:
    parts = ", ".join(f"{source.study.name} {source.trial}" for source in composed.source_trials)
    print_lines(f"{composed.form} ({composed.method}) of {len(composed.source_trials)} trials: {parts}")
    singles = sorted(composed.singles, key=lambda source: source.score, reverse=composed.direction == "max")
    best = f", best single trial ({singles[0].trial}) of {composed.study} {singles[0].score:.4f}" if singles else ""
    print_lines(f"{composed.data}: {composed.objective} {composed.score:.4f}{best}")
    if composed.test is None:
        print("test: the program knows no such data")
    else:
        alone = "" if composed.test.best_single is None else f", that trial {composed.test.best_single:.4f}"
        print_lines(
            f"{composed.test.data}: {composed.objective} {composed.test.model:.4f}{alone}; {composed.test.rows} rows"
        )
    print(f"inference: {composed.parameters:,} parameters")


# --- elastune tree ---


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
    training: TrainingSettings,
    execution_options: FastExecution,
    waiting: TimeoutSettings,
    going_on: ResumeSettings,
    results: OutSettings,
    output: OutputOptions,
    where: ClusterSettings,
    sharing: TrialWorkersSettings,
    command: CommandLine,
    workers: Annotated[int, typer.Option(help="Number of worker processes for all nodes together.")] = 1,
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
    """
    from elastune.cli.progress import Progress, StudyTracker, earlier_entries
    from elastune.runtime.job.output import check_out
    from elastune.tuning.reuse.tree_training import train_tree

    class_tree, cluster = parse_tree(groups), where.request(print_error)
    low, high = sharing.trial_workers or (None, None)
    out: Path = output.choose(results.out, file, "tree", resume=going_on.resume)
    check_out(out, going_on.resume)
    with Progress(StudyTracker(len(class_tree.nodes()), None, earlier_entries(out, going_on.resume))) as progress:
        train_tree(
            file,
            class_tree,
            out,
            fresh=fresh or (),
            config=training.config,
            workers=workers,
            trial_workers=sharing.trial_workers,
            execution=execution_options.execution(
                None if execution_options.mesh is not None else low, most_workers=high
            ),
            epochs=training.epochs,
            seed=training.seed,
            divergence=training.divergence,
            collective_timeout_s=waiting.collective_timeout_s,
            accept_changes=going_on.accept_changes,
            cluster=cluster,
            observe=progress.observe,
            command=command,
        )
    return print_study(out, output.json)
