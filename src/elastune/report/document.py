"""One self-contained HTML page and its PNG files. A reader never sees a file that is half written.

Plotly and matplotlib are imported only when a page with figures is written, because both take long to import.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.report.figures import Figure
from elastune.report.tables import Table, to_html

REPORT = "report.html"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The page may load nothing: it holds all it needs, and texts of a journal cannot reach the network."""


@dataclass(frozen=True)
class Note:
    """A paragraph. ``log``: show the text unwrapped, as a log."""

    text: str
    log: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with tables and notes, in order. ``folded`` sections open on a click."""

    title: str
    parts: tuple[Table | Note, ...]
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """Everything that a report shows.

    Attributes:
        kind: "run", "study", "frontier" or "plan".
        answer: The headline.
        state: How far the work got, in words.
        ended: Whether the work has ended.
        figures: The figures, in order.
        sections: The sections below the figures, in order.
        command: A command to repeat the work or to train the pick; "" for none.
        command_note: A sentence above the command.
    """

    kind: str
    answer: str
    state: str
    ended: bool
    figures: tuple[Figure, ...]
    sections: tuple[Section, ...]
    command: str = ""
    command_note: str = ""


def write(page: Page, out_dir: Path) -> Path:
    """Write ``report.html`` and one PNG for each figure into ``out_dir``. Each file appears whole or not at all.

    Returns:
        The path of the page.

    Raises:
        UserError: If the folder cannot be written.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if page.figures:
            from elastune.report import matplotlib_png

            for figure in page.figures:
                atomic_write(out_dir / f"{figure.name}.png", matplotlib_png.png(figure))
        target = out_dir / REPORT
        atomic_write(target, render(page).encode())
    except OSError as error:
        rule = "the report's folder must be writable"
        raise UserError(rule, f"{out_dir}: {error.strerror}", "free space or choose another folder") from None
    return target


def render(page: Page) -> str:
    """The page as HTML. Every string is escaped here or where its part is rendered."""
    style = files("elastune.report").joinpath("page.css").read_text()
    script = _plotly_script() if page.figures else ""
    command = f"<div class=command>{html.escape(page.command)}</div>" if page.command else ""
    if page.command_note and page.command:
        command = f"<p class=note>{html.escape(page.command_note)}</p>{command}"
    body = "\n".join([*map(_figure, page.figures), *map(_section, page.sections)])
    return f"""<!doctype html>
<html lang=en>
<head>
<meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="{POLICY}">
<meta name=viewport content="width=device-width, initial-scale=1">
<title>elastune: {html.escape(page.answer)}</title>
<style>{style}</style>
{script}
</head>
<body>
<header>
<p class=kind>elastune · {html.escape(page.kind)}</p>
<h1>{html.escape(page.answer)}</h1>
<p class="state{"" if page.ended else " open"}">{html.escape(page.state)}</p>
{command}
</header>
<main>
{body}
</main>
</body>
</html>
"""


def _plotly_script() -> str:
    from elastune.report import plotly_html

    return f"<script>{plotly_html.script()}</script>"


def _figure(figure: Figure) -> str:
    from elastune.report import plotly_html

    caption = f"<figcaption>{html.escape(figure.caption)}</figcaption>" if figure.caption else ""
    return f"<figure><h2>{html.escape(figure.title)}</h2>{plotly_html.div(figure)}{caption}</figure>"


def _section(section: Section) -> str:
    parts = "\n".join(_part(part, section.title) for part in section.parts)
    title = html.escape(section.title)
    if section.folded:
        return f"<section><details><summary>{title}</summary>{parts}</details></section>"
    return f"<section><h2>{title}</h2>{parts}</section>"


def _part(part: Table | Note, heading: str) -> str:
    """One part as HTML; a table whose title differs from ``heading`` shows its title."""
    if isinstance(part, Table):
        title = "" if part.title == heading else f"<h3>{html.escape(part.title)}</h3>"
        return title + to_html(part)
    if part.log:
        return f"<pre class=log>{html.escape(part.text)}</pre>"
    return f"<p>{html.escape(part.text)}</p>"
