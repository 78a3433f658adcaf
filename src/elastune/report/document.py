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
from elastune.report.tables import COPY, Table, to_html

REPORT = "report.html"
MOST_WORDS = 12
"""The most words of a title."""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The page may load nothing: it holds all it needs, and texts of a journal cannot reach the network."""


@dataclass(frozen=True)
class Note:
    """A paragraph. ``log``: show the text unwrapped, as a log."""

    text: str
    log: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with tables and notes, in order. All sections are folded, and open on a click, but ``open`` ones."""

    title: str
    parts: tuple[Table | Note, ...]
    open: bool = False


@dataclass(frozen=True)
class Tile:
    """One value of the answer in large type. ``beside``: other trainings and what they have in its place."""

    name: str
    value: str
    beside: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Glance:
    """What a reader sees first.

    Attributes:
        title: The answer, in at most ``MOST_WORDS`` words.
        tiles: Quality, time and cost of the answer; none without an answer.
        banners: What limits the answer, one sentence each.
        table: The few numbers that the answer rests on, in at most five columns; None for no such table.
    """

    title: str
    tiles: tuple[Tile, ...] = ()
    banners: tuple[str, ...] = ()
    table: Table | None = None

    @property
    def short_title(self) -> str:
        """The title of the window: the answer without its time."""
        return self.title.partition(" in ")[0]


@dataclass(frozen=True)
class Page:
    """Everything that a report shows.

    Attributes:
        kind: "run", "study", "frontier" or "plan".
        glance: The answer at a glance.
        answer: The answer in one sentence, below the title; "" where the title has it all.
        state: How far the work got, in words.
        ended: Whether the work has ended.
        figures: The figures, in order.
        sections: The sections below the figures, in order.
        command: A command to repeat the work or to train the pick; "" for none.
        command_note: A sentence above the command.
    """

    kind: str
    glance: Glance
    answer: str
    state: str
    ended: bool
    figures: tuple[Figure, ...]
    sections: tuple[Section, ...]
    command: str = ""
    command_note: str = ""


def few_words(text: str, most: int = MOST_WORDS) -> str:
    """``text`` with at most ``most`` words."""
    words = text.split()
    return text if len(words) <= most else f"{' '.join(words[:most])}…"


def write(page: Page, out_dir: Path, *, images: bool = True) -> Path:
    """Write ``report.html`` and, with ``images``, one PNG for each figure into ``out_dir``.

    Each file appears whole or not at all.

    Returns:
        The path of the page.

    Raises:
        UserError: If the folder cannot be written.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if page.figures and images:
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
    plotly = _plotly_script() if page.figures else ""
    glance = page.glance
    lead = f"<p class=lead>{html.escape(page.answer)}</p>" if page.answer else ""
    banners = "\n".join(f"<p class=banner>{html.escape(text)}</p>" for text in glance.banners)
    tiles = f"<div class=tiles>{''.join(map(_tile, glance.tiles))}</div>" if glance.tiles else ""
    table = f"<section>{_part(glance.table, '')}</section>" if glance.table is not None else ""
    body = "\n".join([table, *map(_figure, page.figures), *map(_section, page.sections)])
    return f"""<!doctype html>
<html lang=en>
<head>
<meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="{POLICY}">
<meta name=viewport content="width=device-width, initial-scale=1">
<meta name=color-scheme content="light dark">
<title>{html.escape(glance.short_title)}</title>
<style>{_own("page.css")}</style>
{plotly}
</head>
<body>
<header>
<p class=kind>elastune · {html.escape(page.kind)}</p>
<h1>{html.escape(glance.title)}</h1>
{lead}
<p class="state{"" if page.ended else " open"}">{html.escape(page.state)}</p>
{tiles}
{banners}
{_command(page)}
</header>
<main>
{body}
</main>
<script>{_own("page.js")}</script>
</body>
</html>
"""


def _own(name: str) -> str:
    return files("elastune.report").joinpath(name).read_text()


def _tile(tile: Tile) -> str:
    beside = "".join(f"<dt>{html.escape(what)}</dt><dd>{html.escape(value)}</dd>" for what, value in tile.beside)
    others = f"<dl>{beside}</dl>" if beside else ""
    name, value = html.escape(tile.name), html.escape(tile.value)
    return f"<section class=tile><h2>{name}</h2><p class=value>{value}</p>{others}</section>"


def _command(page: Page) -> str:
    if not page.command:
        return ""
    note = f"<p class=note>{html.escape(page.command_note)}</p>" if page.command_note else ""
    return f"{note}<div class=command><code>{html.escape(page.command)}</code>{COPY}</div>"


def _plotly_script() -> str:
    from elastune.report import plotly_html

    return f"<script>{plotly_html.script()}</script>"


def _figure(figure: Figure) -> str:
    from elastune.report import plotly_html

    caption = f"<figcaption>{html.escape(figure.caption)}</figcaption>" if figure.caption else ""
    return f"<figure><h2>{html.escape(figure.title)}</h2>{plotly_html.div(figure)}{caption}</figure>"


def _section(section: Section) -> str:
    parts = "\n".join(_part(part, section.title) for part in section.parts)
    is_open = " open" if section.open else ""
    return f"<section><details{is_open}><summary>{html.escape(section.title)}</summary>{parts}</details></section>"


def _part(part: Table | Note, heading: str) -> str:
    """One part as HTML; a table whose title differs from ``heading`` shows its title."""
    if isinstance(part, Table):
        title = "" if part.title == heading else f"<h3>{html.escape(part.title)}</h3>"
        return title + to_html(part)
    if part.log:
        return f"<pre class=log>{html.escape(part.text)}</pre>"
    return f"<p>{html.escape(part.text)}</p>"
