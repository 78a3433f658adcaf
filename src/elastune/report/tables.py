"""Tables as data with units in their headers, shown on a terminal or in a page; and the tables of a single run."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from elastune.core.formatting import (
    bandwidth,
    byte_count,
    count,
    duration,
    flat,
    number,
    plain,
    printable,
    rate,
    settings_text,
    whole,
)
from elastune.core.journal.records import LayersDivided, TimesFitted, WorkerMemory
from elastune.core.mesh import Mesh
from elastune.core.plan.memory import ideal_share, serial_share_text
from elastune.report.overviews import RunOverview, mechanism_text
from elastune.tuning.search.objective import valued

GAP = 2  # between columns on a terminal
LONG = 14  # the least characters of text, and of a word in a header, that a column has; longer ones wrap
COPY = "<button type=button class=copy>Copy</button>"
"""A button that copies the ``code`` element beside it."""
KINDS = ("parameters", "gradients", "optimizer", "copies", "activations", "peak")
"""What fills the memory of a worker."""
ENDINGS = {
    "complete": "complete",
    "max_steps": "at its step limit",
    "policy": "by a policy",
    "program": "by the program",
    "notice": "because its machine was taken away",
}


@dataclass(frozen=True)
class Table:
    """A table of strings with units in its header. Each of ``rows`` is as long as ``header``.

    ``numeric`` columns are aligned to the right; ``note`` stands below the table.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    note: str = ""
    strong: frozenset[int] = frozenset()
    """Rows to stand out."""
    spare: tuple[int, ...] = ()
    """Columns that a narrow terminal can do without, the least needed first."""
    anchors: tuple[str, ...] = ()
    """The name of each row in a page, to which marks of figures and links of other tables lead."""
    links: tuple[str, ...] = ()
    """The name of the row elsewhere in the page to which the first cell of each row leads; "" for none."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"table {self.title!r} has {len(self.header)} columns but a row of {len(row)}")
        for names in (self.anchors, self.links):
            if names and len(names) != len(self.rows):
                raise ValueError(f"table {self.title!r} has {len(self.rows)} rows but {len(names)} names of them")


def times_table(times: TimesFitted) -> Table:
    """The fitted step-time model and how well it predicts steps that it was not fitted to."""
    within = " within a host" if times.across else ""
    rows = [
        ("fixed part of a step", duration(times.base_s)),
        ("gradient of one sample", duration(times.per_sample_s)),
        (f"latency of one message{within}", duration(times.latency_s)),
        (f"link{within}", bandwidth(times.seconds_per_byte)),
    ]
    if times.across:
        rows += [
            ("latency of one message across hosts", duration(times.across.latency_s)),
            ("link across hosts", bandwidth(times.across.seconds_per_byte)),
            ("workers that fit a host", str(times.workers_per_host)),
        ]
    rows += [
        ("gradients", f"{number(times.grad_bytes / 1e6)} MB"),
        ("worker counts measured", ", ".join(map(str, times.measured_workers))),
    ]
    rows += [(f"predicted / measured, {plain(what, 60)}", number(ratio, 3)) for what, ratio in times.errors.items()]
    return Table("Step-time model", ("what", "value"), tuple(rows))


def run_table(run: RunOverview) -> Table:
    """The program, settings and result of a run."""
    execution = run.started.execution
    rows = [
        ("program", plain(run.started.program)),
        ("settings", settings_text(run.started.config) or "–"),
        ("seed", str(run.started.seed)),
        ("workers", plain(execution.get("workers", "–"))),
        ("mode, mechanism", f"{plain(execution.get('mode', '–'))}, {mechanism_text(execution)}"),
        ("slots", plain(execution.get("num_slots", "–"))),
    ]
    end = run.finished
    if end:
        rows += [(f"final {plain(name, 40)}", valued(name, value)) for name, value in end.metrics.items()]
        rows += [
            (
                "ended",
                ENDINGS.get(end.stopped, "on request") + (f": {plain(end.stop_why, 300)}" if end.stop_why else ""),
            ),
            ("training time", duration(end.seconds)),
            ("steps", whole(end.steps)),
            ("samples", whole(end.samples)),
            ("throughput", rate(end.samples / end.seconds) if end.seconds > 0 else "–"),
            ("median step", duration(end.step_s)),
            ("of it waiting", duration(end.wait_s)),
            ("SHA-256 of the final state", plain(end.sha256)),
        ]
    if run.failed and not end:
        rows += [("failed", f"{run.failed.reason.replace('_', ' ')}: {plain(run.failed.detail, 300)}")]
        rows += [("worker", str(run.failed.rank)), ("exit code", plain(run.failed.exit_code))]
    return Table("The run", ("what", "value"), tuple(rows))


def worker_steps_table(run: RunOverview) -> Table:
    """The step times of each worker at the run's end, which show a slow worker."""
    steps = run.finished.worker_steps if run.finished else []
    rows = tuple((str(w.rank), duration(w.step_s), duration(w.busy_s), f"{100 * w.share:.0f} %") for w in steps)
    header = ("rank", "mean step", "without waiting", "of the slowest")
    return Table("Steps by worker", header, rows, frozenset(range(4)))


def reports_table(run: RunOverview) -> Table:
    """Every report of the run."""
    names = list(dict.fromkeys(name for report in run.reports for name in report.metrics))
    header = ("epoch", "step", "samples", "training time", *(plain(name, 30) for name in names))
    rows = tuple(
        (
            str(report.epoch),
            whole(report.step),
            whole(report.samples),
            duration(report.seconds),
            *(valued(name, report.metrics.get(name)) for name in names),
        )
        for report in run.reports
    )
    return Table(f"Reports ({len(rows)})", header, rows, frozenset(range(len(header))))


def context_table(context: Mapping[str, Any]) -> Table:
    """The machine and versions, as the journal holds them."""
    return Table("Machine", ("what", "value"), tuple(flat(context).items()))


def to_rich(table: Table, width: int | None = None) -> RichTable:
    """``table`` for a terminal of ``width`` columns. Cells are text, never markup.

    If the table is too wide, its spare columns are left out and the caption names them.
    """
    needed = [_width(table, i) for i in range(len(table.header))]
    left_out: list[int] = []
    for i in table.spare:
        if width is not None and sum(needed) - sum(needed[j] for j in left_out) > width - 2:
            left_out.append(i)
    notes = [table.note] if table.note else []
    if left_out:
        notes.append(f"no room for: {', '.join(table.header[i] for i in sorted(left_out))}")
    caption = Text(printable("; ".join(notes)), style="dim") if notes else None
    title = Text(printable(table.title), style="bold")
    shown = RichTable(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    kept = [i for i in range(len(table.header)) if i not in left_out]
    for i in kept:
        side: Literal["left", "right"] = "right" if i in table.numeric else "left"
        exact = needed[i] - GAP if left_out else None
        least = needed[i] - GAP
        shown.add_column(Text(printable(table.header[i])), justify=side, width=exact, min_width=least, overflow="fold")
    for k, row in enumerate(table.rows):
        shown.add_row(*(Text(printable(row[i])) for i in kept), style="bold" if k in table.strong else None)
    return shown


def to_html(table: Table) -> str:
    """``table`` as an HTML table, every cell escaped. A column "command" gets buttons that copy."""

    def cell(tag: str, column: int, text: str, link: str = "") -> str:
        shown = html.escape(text)
        if tag == "td" and table.header[column] == "command" and text:
            shown = f"<code>{shown}</code> {COPY}"
        if link:
            shown = f'<a href="#{html.escape(link)}">{shown}</a>'
        return f"<{tag}{' class=n' if column in table.numeric else ''}>{shown}</{tag}>"

    def opening(row: int) -> str:
        name = f' id="{html.escape(table.anchors[row])}"' if table.anchors else ""
        return f"<tr{' class=strong' if row in table.strong else ''}{name}>"

    head = "".join(cell("th", i, name) for i, name in enumerate(table.header))
    body = "\n".join(
        opening(i)
        + "".join(cell("td", j, text, table.links[i] if table.links and j == 0 else "") for j, text in enumerate(row))
        + "</tr>"
        for i, row in enumerate(table.rows)
    )
    note = f"<p class=note>{html.escape(table.note)}</p>" if table.note else ""
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>{note}"


def _width(table: Table, column: int) -> int:
    """The width of a column on a terminal, with the gap beside it. Headers and long texts wrap, numbers do not."""
    words = max(map(len, table.header[column].split()), default=0)
    cells = max((len(row[column]) for row in table.rows), default=0)
    return GAP + max(min(words, LONG), cells if column in table.numeric else min(cells, LONG))


def memory_table(run: RunOverview) -> Table:
    """The memory of each worker, measured in one step."""
    memory = run.finished.memory if run.finished else []
    rows = tuple((str(each.rank), *(byte_count(getattr(each, kind)) for kind in KINDS)) for each in memory)
    header = ("rank", "parameters", "gradients", "optimizer state", "of it copies", "step's activations", "whole peak")
    note = "Activations: the most that a step needed beside the others. Peak: of the whole process, or of torch's "
    divided = run.started.execution.get("mechanism", "replicated") != "replicated"
    note += f"allocator on a GPU. All measured. {_balance(memory) if divided else ''}"
    return Table("Memory by worker", header, rows, frozenset(range(7)), note=note.strip() if rows else "")


def divided_lines(divided: LayersDivided | None, mesh: Mesh | None = None) -> tuple[str, ...]:
    """How much of a model the tensor axis divides, how its workers run the rest, and how that bounds the speed-up.

    ``mesh``: the mesh to state the bound for; None: several meshes. Empty if no layers were divided.
    """
    if divided is None:
        return ()
    each = "runs it on slots of its own (DataParallelTrunk)" if divided.apart else "runs it on the same samples"
    whole = divided.whole / max(1, divided.whole + divided.divided)
    return (
        f"{divided.divided:,} of {divided.divided + divided.whole:,} trained numbers are in layers of "
        f"{count(divided.blocks, 'virtual block')}; the others lie whole on each worker along tensor, which {each}.",
        f"{serial_share_text(whole, None, mesh)}.",
    )


def memory_line(memory: Sequence[WorkerMemory]) -> str:
    """The most memory of each kind on one worker, in one line; "" if nothing was measured."""
    if not memory:
        return ""

    def most(kind: str) -> str:
        return byte_count(max((value for each in memory if (value := getattr(each, kind)) is not None), default=None))

    copies = f" ({most('copies')} of it copies)" if any(each.copies for each in memory) else ""
    return (
        f"parameters {most('parameters')}, gradients {most('gradients')}, optimizer {most('optimizer')}{copies}, "
        f"activations {most('activations')}, peak {most('peak')} on a worker at most"
    )


def _balance(memory: Sequence[WorkerMemory]) -> str:
    """The fullest worker's part of the divided optimizer state, over an equal share."""
    held, once = sum(each.optimizer for each in memory), sum(each.optimizer - each.copies for each in memory)
    if len(memory) < 2 or not once:
        return ""
    copies = round(held / once)
    share, most = ideal_share(once, copies, len(memory)), max(each.optimizer for each in memory)
    part = f"{count(copies, 'holder')} / {len(memory)} workers of the whole"
    modelled = f"{byte_count(round(share))} of optimizer state ({part})"
    return f"Modelled: {modelled}; the fullest worker has {most / share:.3g} x that."
