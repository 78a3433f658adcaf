"""Train new members for an ensemble in parallel, with varied settings or on different views of the inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import TrialSummary, TrialTable, fold
from elastune.core.journal.records import StudyStarted
from elastune.core.run import Config
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.kind import ClusterRequest
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.run import Observe
from elastune.train.program.load import load_as_guest
from elastune.train.program.source import program_digest
from elastune.tuning.search.objective import oriented
from elastune.tuning.search.schedule import FixedTrial, FixedTrials
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.run import tune
from elastune.tuning.study.trial_results import known

# Views of a data set: named parts of a sample's inputs, so that models can see different parts.

_FIX = 'such as views = {"temperature": [0, 1], "pressure": [2]}'


class InputView(nn.Module):
    """A first layer that passes on only the columns of some views of its inputs.

    With this layer all models take the whole input, so models of different views can be members of one ensemble.

    Attributes:
        columns: The places along ``dim`` that pass, in the order of the views.
        width: How many columns pass.

    Args:
        views: The columns of each view, by its name.
        shown: The names of the views that the model sees, at least one.
        dim: The axis that views divide; by default the last.

    Raises:
        UserError: For values that are no views, and for unknown names.

    Example:
        >>> views = {"temperature": [0, 1], "pressure": [2]}
        >>> view = elastune.InputView(views, session.config["inputs"])
        >>> model = nn.Sequential(view, nn.Linear(view.width, 1))
    """

    def __init__(self, views: Mapping[str, Sequence[int]], shown: Sequence[str], dim: int = -1) -> None:
        super().__init__()
        checked = checked_views(views, "the program")
        self.columns = tuple(at for name in checked_shown(shown, checked) for at in checked[name])
        self.dim = dim

    @property
    def width(self) -> int:
        """How many columns pass."""
        return len(self.columns)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the columns of ``inputs`` that pass."""
        return inputs.index_select(self.dim, torch.tensor(self.columns, device=inputs.device))

    def extra_repr(self) -> str:
        return f"columns={list(self.columns)}, dim={self.dim}"


def checked_views(views: object, where: object) -> dict[str, tuple[int, ...]]:
    """Return the columns of each view. ``where``: the source of the views, for messages.

    Raises:
        UserError: For values that are no views.
    """
    rule = "a program whose inputs are varied names its views: the columns of each"
    if not isinstance(views, Mapping) or not views:
        raise UserError(rule, f"{'none' if views is None else repr(views)[:80]} in {where}", _FIX)
    checked = {}
    for name, columns in views.items():
        plain = isinstance(columns, list | tuple | range) and all(_is_place(place) for place in columns)
        if not isinstance(name, str) or not name or "," in name or "+" in name or not plain or not columns:
            raise UserError(f"{rule}, under a name without comma and +", f"{name!r}: {columns!r}"[:120], _FIX)
        checked[name] = tuple(columns)
    return checked


def checked_shown(shown: object, views: Mapping[str, object]) -> list[str]:
    """Return the names of the views that a model sees. Raises ``UserError`` for unknown names, and for none."""
    names = list(shown) if isinstance(shown, list | tuple) else []
    fix = f"use {', '.join(views)}"
    if not names or len({repr(name) for name in names}) < len(names):
        raise UserError("what a model is shown is a list of views, each once", repr(shown)[:80], fix)
    for name in names:
        if not isinstance(name, str) or name not in views:
            raise UserError("a view is one that the program names", repr(name)[:80], fix)
    return names


def _is_place(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# Train new members for an ensemble, in parallel: the best settings of a study, with some settings varied.

Vary = Mapping[str, Sequence[Any]]
MOST = 1000  # combinations of values


def train_members(
    study: Study | str | Path,
    vary: Vary,
    *,
    each: int = 1,
    workers: int | None = None,
    trial_workers: tuple[int, int] | None = None,
    cluster: Cluster | ClusterRequest | None = None,
    observe: Observe | None = None,
) -> Study:
    """Train the missing members of an ensemble whose members differ in ``vary``, as trials of the same study.

    For each value (with several settings: for each combination) there are then ``each`` kept trials. They have the
    settings of the best trials of the search, except for the varied ones. They train in parallel, each to its end.
    After a kill, call this again: unfinished trials go on, and finished trials are not repeated.

    Args:
        study: The study, or its folder; nothing else may write its journal now. The new trials are kept whatever the
            study's ``--keep`` is, within its ``--keep-size``.
        vary: Settings of the program and their values, such as ``{"inputs": ["temperature", "pressure+humidity"]}`` or
            ``{"seed": [1, 2, 3]}``. For a setting that is a list, each value names ``views`` of the program, joined by
            + or as a list.
        each: The number of trials of each value.
        workers: Number of workers of all trials together; None: as the study had.
        trial_workers: Share them out, as in ``tune``; None: as the study did.
        cluster: Where they run; None: on this machine.
        observe: Called with every record of the journal.

    Returns:
        The study.

    Raises:
        UserError: For an unknown setting, value or view, for a study without a result, and if its program has changed.

    Example:
        >>> elastune.train_members("out", {"inputs": ["temperature", "pressure", "humidity"]}, workers=4)
        >>> elastune.ensemble("out", by="inputs").settings
    """
    out = study.out if isinstance(study, Study) else Path(study)
    if isinstance(each, bool) or not isinstance(each, int) or each < 1:
        raise UserError("of each value there is a whole number of members, at least 1", each, "such as 1")
    entries = read(out / JOURNAL)
    results, table = Study.of(out, entries), fold(entries)
    settings = next(entry.record.settings for entry in entries if isinstance(entry.record, StudyStarted))
    request = StudyRequest.of_settings(settings, out)
    request = replace(
        request,
        keep="all",
        workers=request.workers if workers is None else workers,
        trial_workers=request.trial_workers if trial_workers is None else trial_workers,
    )
    if program_digest(request.program) != settings.get("program_digest"):
        fix = "begin another study with what it is now"
        raise UserError("a study's program trains as it did when it began", f"{results.program} has changed", fix)
    varied = _checked(vary, results.defaults, load_as_guest(request.program, request.seed).views, results.program)
    bases = _best_first(results, table)
    if not bases:
        raise UserError("what is varied are the settings of a trial with a result", f"none in {out}", "tune first")
    trials = [
        FixedTrial(config, request.seed, request.execution, "member", like=base.started)
        for base, config in _missing(varied, bases, table, each)
    ]
    cut_off = any(life.started.phase == "member" and life.state != "over" for life in table.trials.values())
    if not trials and not cut_off:
        return results
    first = known(bases[0].started)
    schedule = FixedTrials("member", trials, shares=True)
    return tune(request, space=lambda trial: dict(first), cluster=cluster, observe=observe, fixed_trials=schedule)


def _checked(vary: Vary, defaults: Config, views: object, program: str) -> list[Config]:
    """All combinations of the values in ``vary``. Raises ``UserError`` for impossible ones."""
    if not vary:
        raise UserError("members differ in a setting", "none", "such as inputs=temperature,pressure")
    columns = []
    for name, values in vary.items():
        if name not in defaults:
            fix = f"name one of {', '.join(sorted(defaults))}"[:300]
            raise UserError("what is varied is a setting in the program's config", repr(name)[:80], fix)
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise UserError("what is varied has a list of values", f"{name}={values!r}"[:80], "such as [1, 2, 3]")
        chosen = list(values)
        if isinstance(defaults[name], list):
            view_columns = checked_views(views, program)
            chosen = [
                checked_shown(item.split("+") if isinstance(item, str) else item, view_columns) for item in chosen
            ]
        _check_values(name, chosen)
        columns.append([(name, value) for value in chosen])
    count = 1
    for column in columns:
        count *= len(column)
    if count > MOST:
        raise UserError(f"there are at most {MOST} combinations of what is varied", count, "name fewer values")
    return [dict(pairs) for pairs in product(*columns)]


def _check_values(name: str, values: Sequence[Any]) -> None:
    try:
        texts = [json.dumps(value, allow_nan=False) for value in values]
    except (TypeError, ValueError, RecursionError) as error:
        rule = "what is varied has plain values: numbers, texts, true, false, null, lists"
        raise UserError(rule, f"{name}: {error}"[:120], f"such as {name}=1,2") from None
    if len(set(texts)) < 2 or len(set(texts)) < len(texts):
        rule = "members differ in two values of a setting at least, each named once"
        fix = "name another one, such as inputs=temperature,pressure"
        raise UserError(rule, f"{name}: {', '.join(texts)}"[:120], fix)


def _best_first(study: Study, table: TrialTable) -> list[TrialSummary]:
    """The complete trials of the search, sorted by its objectives."""
    done = [trial for trial in study.complete if trial.phase == "search"]
    ranked = sorted(done, key=lambda trial: tuple(oriented(trial.values, study.objectives)))
    return [table.trials[trial.number] for trial in ranked]


def _missing(
    varied: Sequence[Config], bases: Sequence[TrialSummary], table: TrialTable, each: int
) -> list[tuple[TrialSummary, Config]]:
    """The missing trainings: (the trial that gives all other settings, the configuration).

    Configurations that failed once are not tried again. Trials that ended well but were not kept do not count.
    """
    existing = [life for life in table.trials.values() if not _ended_well(life) or life.number in table.artifacts]
    counts = [
        life for life in existing if _ended_well(life) or (life.state != "over" and life.started.phase == "member")
    ]
    tried = [life.started.config for life in existing]
    lacking: list[tuple[TrialSummary, Config]] = []
    for values in varied:
        lacks = each - sum(values == {name: life.started.config.get(name) for name in values} for life in counts)
        for base in bases:
            config = {**base.started.config, **values}
            if lacks > 0 and config not in tried:
                lacking.append((base, config))
                tried.append(config)
                lacks -= 1
    return lacking


def _ended_well(life: TrialSummary) -> bool:
    return life.finished is not None and life.finished.state == "complete"
