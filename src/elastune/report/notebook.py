"""Results as a notebook shows them below a cell: the answer at a glance, as a piece of HTML.

The results call these functions by name (``_repr_html_``): the rooms that have them come before this one.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elastune.core.formatting import differing, plain, settings_text
from elastune.core.journal.files import read
from elastune.core.journal.records import FrontierFound
from elastune.report.document import Glance, few_words
from elastune.report.glance import front_short_table, frontier_glance, run_glance, study_glance
from elastune.report.overviews import front_trials, gather_run, gather_study
from elastune.report.tables import Table, to_html
from elastune.runtime.job.output import JOURNAL
from elastune.tuning.search.objective import valued
from elastune.tuning.study.results import Study
from elastune.tuning.study.trials import Trial

_TILE = "display:inline-block;margin:0 2em 0.5em 0;vertical-align:top"
_LARGE = "font-size:1.6em;line-height:1.3"
_SMALL = "font-size:0.85em;opacity:0.75"


def of_run(out: Path) -> str:
    """The run in the folder ``out``. Raises ``UserError`` if its journal cannot be read."""
    run = gather_run(read(out / JOURNAL))
    return "" if run is None else _html(run_glance(run, out.name), out)


def of_study(study: Study) -> str:
    """A study: its pick and its front. Raises ``UserError`` if its journal cannot be read."""
    overview = gather_study(read(study.out / JOURNAL))
    if overview is None:
        return ""
    if study.tasks:
        return _html(Glance(few_words(f"{len(study.complete)} trials of {len(study.tasks)} tasks")), study.out)
    choices = () if study.no_choice_reason() else study.choices()
    table = front_short_table(overview, front_trials(overview), choices)
    return _html(study_glance(overview, study, choices, table), study.out)


def of_front(trials: Sequence[Trial]) -> str:
    """The trials of a front, with the settings in which they differ."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.values))
    settings = differing([trial.config for trial in trials]) if len(trials) > 1 else tuple(trials[0].config)
    rows = tuple(
        (
            str(trial.number),
            *(valued(name, trial.values[name]) if name in trial.values else "–" for name in names),
            plain(trial.execution.get("workers", "–")),
            settings_text({name: trial.config[name] for name in settings if name in trial.config}),
        )
        for trial in trials
    )
    header = ("trial", *(plain(name, 30) for name in names), "workers", "settings that differ")
    return to_html(Table("The front", header, rows, frozenset(range(2 + len(names)))))


def of_frontier(found: FrontierFound) -> str:
    """A frontier: its pick and its rows."""
    return _html(frontier_glance(found), None)


def _html(glance: Glance, out: Path | None) -> str:
    """A piece without style sheet and script, which a notebook may show beside any other."""
    tiles = []
    for tile in glance.tiles:
        beside = "<br>".join(f"{html.escape(what)}: {html.escape(value)}" for what, value in tile.beside)
        name, value = html.escape(tile.name), html.escape(tile.value)
        tiles.append(
            f'<div style="{_TILE}">{name}<div style="{_LARGE}">{value}</div><div style="{_SMALL}">{beside}</div></div>'
        )
    banners = [f'<div style="{_SMALL}">{html.escape(text)}</div>' for text in glance.banners]
    # names and links of rows are those of a page, and would meet those of other cells here
    table = "" if glance.table is None else to_html(replace(glance.table, anchors=(), links=()))
    where = "" if out is None else f'<div style="{_SMALL}">{html.escape(str(out))}</div>'
    return f"<div><b>{html.escape(glance.title)}</b></div>{''.join(tiles)}{''.join(banners)}{table}{where}"
