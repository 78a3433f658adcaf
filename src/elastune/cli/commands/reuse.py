"""``elastune predict``, ``ensemble``, ``soup`` and ``transfer``: use the models that a study has kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastune.cli import options
from elastune.cli.groups import flatten
from elastune.cli.output import OK, print_error, print_json, print_lines, stopped_code, use_data
from elastune.core import notation
from elastune.core.errors import UserError
from elastune.core.formatting import plain
from elastune.runtime.settings import ClusterSettings
from elastune.tuning.study.settings import TrialWorkersSettings

if TYPE_CHECKING:
    from elastune.tuning.reuse.ensemble import Ensemble
    from elastune.tuning.reuse.soup import StudySoup
    from elastune.tuning.reuse.transfer import SourceRanking


# --- elastune predict ---

Program = Annotated[
    Path | None,
    typer.Option(
        "--program",
        metavar="FILE",
        help="Python file that defines build and predict. [default: the study's program, if it is unchanged]",
    ),
]
Trials = Annotated[
    str | None,
    typer.Option("--trials", metavar="N,N,...", help="Numbers of kept trials to use, such as 1,4,7. [default: all]"),
]


def predict(
    study: Annotated[Path, typer.Argument(help="The output folder of a study that was run with --keep.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Name of a data set, as predict knows it. May be repeated. [default: validation and test]"),
    ] = None,
    trials: Trials = None,
    program: Program = None,
    again: Annotated[bool, typer.Option("--again", help="Predict again where there are predictions already.")] = False,
    json: options.Json = False,
) -> int:
    """Store what a study's kept trials predict on data sets.

    elastune ensemble, transfer and classes read these predictions.

    The program defines build(config), which returns the model, and predict(model, name), which returns the outputs and
    targets of all samples of a data set, or None for a name that it does not know. See docs/ensembles.md.
    """
    from elastune.tuning.reuse.predictions import predict as predict_trials

    predictions = predict_trials(
        study, data or ["validation", "test"], trials=numbers_of(trials), program=program, again=again
    )
    if json:
        rows = [prediction.to_json() for prediction in predictions]
        print_json({"kind": "predictions", "study": str(study), "predictions": rows})
        return OK
    for prediction in predictions:
        outcome = f"{prediction.rows} rows" if prediction.rows else prediction.reason
        print_lines(f"trial {prediction.trial}: {prediction.data}: {outcome}")
    return OK


def numbers_of(text: str | None) -> list[int] | None:
    """The trial numbers of a text such as "1,4,7". Raises ``UserError``."""
    if text is None:
        return None
    return whole_numbers(text, "trials are named by their numbers", "such as --trials 1,4,7")


def whole_numbers(text: str, rule: str, fix: str) -> list[int]:
    """The numbers of a text such as "2,5". Raises ``UserError`` with ``rule`` and ``fix``."""
    from elastune.core.errors import UserError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise UserError(rule, repr(text)[:60], fix)
    return [int(part) for part in parts]


# --- elastune ensemble ---

_FIX = "such as --vary inputs=temperature,pressure+humidity"


@dataclass(frozen=True)
class ExtraMembersOptions(TrialWorkersSettings):
    """In what members are to differ, and who trains those that are lacking."""

    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING=VALUE,...",
            help="First train trials for each value that the study lacks, such as seed=1,2,3. a+b is one value: two "
            "views of the inputs. May be repeated.",
        ),
    ] = None
    each: Annotated[int, typer.Option(help="With --vary: number of trials for each value.")] = 1
    workers: Annotated[
        int | None,
        typer.Option(help="With --vary: worker processes for all of its trainings together. [default: the study's]"),
    ] = None

    def train(self, study: Path, where: ClusterSettings) -> bool:
        """Train the trials that the study lacks for ``--vary``.

        Returns:
            False after Ctrl-C, otherwise True.

        Raises:
            UserError: For workers without ``--vary``, and for settings that the study does not have.
        """
        if self.vary is None:
            unused = ExtraMembersOptions() != self or where != ClusterSettings()
            if unused:
                raise UserError("workers are for members that are trained", "no --vary", f"add it, {_FIX}")
            return True
        vary = self.values(self.vary)
        from elastune.cli.progress import Progress, StudyTracker, earlier_entries
        from elastune.tuning.reuse.new_members import train_members
        from elastune.tuning.study.results import Study

        data = Study.load(study).data
        use_data(None if data is None else Path(data))
        with Progress(StudyTracker(None, None, earlier_entries(study, True))) as progress:
            trained = train_members(
                study,
                vary,
                each=self.each,
                workers=self.workers,
                trial_workers=self.trial_workers,
                cluster=where.request(print_error),
                observe=progress.observe,
            )
        for trial in trained.trials:
            if trial.phase == "member" and trial.state == "infeasible" and _is_varied(trial.config, vary):
                settings = ", ".join(f"{name}={trial.config.get(name)}" for name in vary)
                print_error(f"trial {trial.number} ({plain(settings, 200)}) failed: {plain(trial.reason, 200)}")
        if trained.ending == "interrupted":
            print_error("interrupted; the same command goes on")
        return trained.ending != "interrupted"

    @staticmethod
    def values(texts: list[str]) -> dict[str, list[Any]]:
        """The values of each setting in texts such as "seed=1,2" and "inputs=a,b+c". Raises ``UserError``."""
        values_of: dict[str, list[Any]] = {}
        for text in texts:
            name, equals, rest = text.partition("=")
            name = name.strip()
            if not equals or not name.isidentifier():
                raise UserError("--vary is SETTING=VALUE,VALUE", repr(text)[:80], _FIX)
            if name in values_of:
                raise UserError("a setting is varied once", name, f"name all of its values together, {_FIX}")
            values_of[name] = [notation.value(name, part.strip()) for part in rest.split(",")]
        return values_of


def _is_varied(config: Mapping[str, Any], vary: Mapping[str, list[Any]]) -> bool:
    """Whether these settings are among the values of ``vary``: the trial is not of an earlier call."""

    def matches(setting: Any, value: Any) -> bool:
        return setting == value or (isinstance(value, str) and setting == value.split("+"))

    return all(any(matches(config.get(name), value) for value in values) for name, values in vary.items())


@flatten
def ensemble(
    study: Annotated[Path, typer.Argument(help="The output folder of a study that was run with --keep.")],
    varying: ExtraMembersOptions,
    where: ClusterSettings,
    members: Annotated[int, typer.Option(help="Most different models in the ensemble.")] = 8,
    objective: Annotated[
        str | None,
        typer.Option(
            help="Score to choose by. Of classes: accuracy, log_loss, brier; of values: mse, rmse, mae, r2. "
            "[default: accuracy or mse]"
        ),
    ] = None,
    inference_budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIMES",
            help="Most parameters of all members together, as a multiple of the best trial's: 4x. No time is "
            "measured. [default: no limit]",
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="Name of the predictions to choose by.")] = "validation",
    test: Annotated[str, typer.Option(help="Name of the predictions that judge the choice afterwards.")] = "test",
    method: Annotated[
        str,
        typer.Option(help="How to choose members and weights: greedy (with replacement, bagged), stacking or uniform."),
    ] = "greedy",
    seed: Annotated[int, typer.Option(help="Seed of the greedy method's bags, and of sampled contributions.")] = 0,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="SETTING",
            help="Also tell contributions for each value of this setting. [default: the first setting of --vary]",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the ensemble to this safetensors file.")
    ] = None,
    json: options.Json = False,
) -> int:
    """Choose trials of a study whose mean prediction is best.

    The command tells what each member contributes. It reads predictions that the trials' program recorded with
    session.predictions, or that elastune predict stored. Predictions under a name that begins with "test" are read once
    all is chosen. See docs/ensembles.md.

    With --out the ensemble is written to FILE and recorded in the study's journal, and elastune report STUDY shows it
    among single trials and soups. In Python, elastune.load_ensemble(FILE, build) makes a module of the file.

    With --vary inputs=temperature,pressure+humidity, the command first trains the trials that STUDY lacks: the best
    settings with each value, in parallel, as trials of STUDY. If the setting is a list, its values name the program's
    views of its data.
    """
    from elastune.tuning.reuse.ensemble import check_choice, parse_times
    from elastune.tuning.reuse.ensemble import ensemble as choose_ensemble
    from elastune.tuning.reuse.kept_models import check_file
    from elastune.tuning.reuse.saved_models import check_recordable, record_asset, save_ensemble

    budget = None if inference_budget is None else parse_times(inference_budget)
    check_choice(members, objective, budget, data, test, method, seed)
    if out is not None:
        check_file(out)
    if out is not None or varying.vary is not None:
        check_recordable(study)
    if not varying.train(study, where):
        return stopped_code()
    chosen = choose_ensemble(
        study,
        members=members,
        objective=objective,
        inference_budget=budget,
        data=data,
        test=test,
        method=method,
        seed=seed,
        by=by or next(iter(varying.values(varying.vary or [])), None),
    )
    file = None if out is None else str(save_ensemble(chosen, out))
    if out is not None:
        record_asset(chosen, out)
    if json:
        print_json({"kind": "ensemble", **chosen.to_json(), "file": file})
    else:
        _print_ensemble(chosen)
        if file is not None:
            print_lines(f"file    {file}")
    return OK


def _print_ensemble(chosen: Ensemble) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(chosen.members)} of {chosen.candidates} trials, by {chosen.objective} on {chosen.data}")
    for name in ("trial", "weight", "alone", "left out", "Shapley", "parameters", "worker-seconds"):
        table.add_column(name, justify="right")
    for member in chosen.members:
        contribution = member.contribution
        error = f" ± {contribution.shapley_error:.2g}" if contribution.shapley_error else ""
        table.add_row(
            str(member.trial),
            f"{member.weight:.3f}",
            f"{member.alone:.4f}",
            f"{contribution.left_out:+.4f}",
            f"{contribution.shapley:+.4f}{error}",
            f"{member.parameters:,}",
            f"{member.worker_seconds:.1f}",
        )
    Console(width=None).print(table)
    for row in chosen.settings:
        trials, worth = ", ".join(map(str, row.trials)), row.contribution
        error = f" ± {worth.shapley_error:.2g}" if worth.shapley_error else ""
        words = f"left out {worth.left_out:+.4f}, Shapley {worth.shapley:+.4f}{error}"
        print_lines(f"{chosen.by} {row.value}: {words}; trials {trials}")
    best = f"best single trial ({chosen.single})"
    print_lines(
        f"{chosen.data}: {chosen.objective} {chosen.score:.4f}, {best} {chosen.best_single:.4f}; both were chosen by it"
    )
    if chosen.test is None:
        print("test: not every member has predictions on data that no choice has seen")
    else:
        scores = f"{chosen.test.ensemble:.4f}, {best} {chosen.test.best_single:.4f}"
        print_lines(f"{chosen.test.data}: {chosen.objective} {scores}; {chosen.test.rows} rows, read after the choice")
    print(f"inference: {chosen.inference:.2f} times the parameters of trial {chosen.single}")
    diversity = chosen.diversity
    if diversity.disagreement is not None:
        alike = "not defined" if diversity.error_correlation is None else f"{diversity.error_correlation:.3f}"
        print(f"members: disagreement {diversity.disagreement:.3f}, correlation of errors {alike}")
    uncertainty = chosen.uncertainty
    print(
        f"uncertainty: aleatoric {uncertainty.aleatoric:.4g}, epistemic {uncertainty.epistemic:.4g} {uncertainty.unit}"
    )


# --- elastune soup ---


def soup(
    study: Annotated[Path, typer.Argument(help="The output folder of a study that was run with --keep.")],
    how: Annotated[
        str, typer.Option(help="greedy (add each trial that does no harm) or uniform (all trials).")
    ] = "greedy",
    objective: Annotated[
        str | None,
        typer.Option(
            help="Score to choose by. Of classes: accuracy, log_loss, brier; of values: mse, rmse, mae, r2. "
            "[default: accuracy or mse]"
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="Name of the data set to choose by.")] = "validation",
    test: Annotated[str, typer.Option(help="Name of the data set that judges the choice afterwards.")] = "test",
    statistics: Annotated[
        str, typer.Option(help="Name of the data set from which BatchNorm's statistics are estimated anew.")
    ] = "train",
    trials: Trials = None,
    program: Program = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the weights to this safetensors file, which --start-from reads."),
    ] = None,
    json: options.Json = False,
) -> int:
    """Average the weights of several trials into one model.

    The model answers at the price of one. Only trials that began with the same weights can be averaged; others are
    refused, with the reason. The program defines build(config) and predict(model, name), as for elastune predict. It is
    asked about --test once all is chosen. See docs/ensembles.md.

    With --out the soup is also recorded in the study's journal, and elastune report shows it.
    """
    from elastune.tuning.reuse.kept_models import check_file
    from elastune.tuning.reuse.saved_models import check_recordable, record_asset
    from elastune.tuning.reuse.soup import soup_of_study

    if out is not None:
        check_file(out)
        check_recordable(study)
    chosen = soup_of_study(
        study,
        how=how,
        objective=objective,
        data=data,
        test=test,
        statistics=statistics,
        trials=numbers_of(trials),
        program=program,
    )
    file = None if out is None else str(chosen.soup.save(out))
    if out is not None:
        record_asset(chosen, out)
    if json:
        print_json({"kind": "soup", **chosen.to_json(), "file": file})
    else:
        _print_soup(chosen)
        if file is not None:
            print_lines(f"file    {file}")
    return OK


def _print_soup(chosen: StudySoup) -> None:
    averaged, best = chosen.soup, f"best single trial ({chosen.single})"
    names, alone = ", ".join(map(str, averaged.trials)), averaged.singles[chosen.single]
    counts = f"{len(averaged.trials)} of {len(averaged.singles)} trials"
    print_lines(f"{chosen.how} soup of {counts}: {names}; all began with {averaged.ancestor}")
    print_lines(f"{chosen.data}: {chosen.objective} {averaged.score:.4f}, {best} {alone:.4f}; both were chosen by it")
    if chosen.test is None:
        print("test: the program knows no such data")
    else:
        scores = f"{chosen.test.soup:.4f}, {best} {chosen.test.best_single:.4f}"
        print_lines(f"{chosen.test.data}: {chosen.objective} {scores}; {chosen.test.rows} rows, read after the choice")


# --- elastune transfer ---


def transfer(
    studies: Annotated[list[Path], typer.Argument(help="Output folders of earlier studies that were run with --keep.")],
    data: Annotated[str, typer.Option(help="Name under which elastune predict stored features of the new task.")],
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="Output folder of a study that was begun with one of these trials. May be repeated."),
    ] = None,
    json: options.Json = False,
) -> int:
    """Rank kept trials as starting points for a new task.

    The rank says how well the features of a trial would serve the new task. Nothing is trained: the score is LogME.

    First store features of the new task: elastune predict STUDY --program FILE --data NAME, where predict of FILE
    returns features of the new task's samples, and its targets.

    With --measured the ranking is compared with what trainings have reached since (Kendall's tau). See
    docs/transfer.md.
    """
    from elastune.tuning.reuse.transfer import rank_sources

    ranking = rank_sources(studies, data, measured=measured or [])
    if json:
        print_json({"kind": "transfer", **ranking.to_json()})
    else:
        _print_ranking(ranking)
    return OK


def _print_ranking(ranking: SourceRanking) -> None:
    from rich.console import Console
    from rich.table import Table

    tried = any(source.measured is not None for source in ranking.sources)
    table = Table(
        title=f"{len(ranking.sources)} sources, by LogME of their features of {ranking.rows} samples of {ranking.data}"
    )
    for name in ("study", "trial", "LogME", "width", *(["measured"] if tried else [])):
        table.add_column(name, justify="left" if name == "study" else "right", overflow="fold")
    for source in ranking.sources:
        measured = "–" if source.measured is None else f"{source.measured:.4g}"
        cells = (str(source.study), str(source.trial), f"{source.score:.4f}", str(source.width))
        table.add_row(*cells, *([measured] if tried else []))
    Console(width=None).print(table)
    if tried:
        tau = "not known: it takes two that differ" if ranking.tau is None else f"{ranking.tau:+.2f}"
        print(f"Kendall's tau of estimate and measurement: {tau}")
    print_lines(f"begin with: --start-from {ranking.sources[0].start_from}")
