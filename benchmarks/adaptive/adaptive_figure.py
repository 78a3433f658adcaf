"""The figure of ``adaptive.py``: accuracy against modelled time, and how three trainings of each data set went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.adaptive.adaptive_analysis import Row, StepSeconds, batches_over_time, row, seconds
from benchmarks.adaptive.adaptive_search import Chosen
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from elastune.report import figures as palette

COLOURS = {"none": palette.BEFORE, "cosine": palette.AFTER}
WORDS = {"none": "constant rate", "cosine": "cosine decay"}
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
SHOWN_POINTS = 6.0  # what lies further below the best is left out of the upper panels


def draw(chosen: Sequence[Chosen], step_s: StepSeconds, title: str, path: Path) -> None:
    """Write it as a PNG. A column for each data set."""
    names = list(dict.fromkeys(c.method.data for c in chosen))
    canvas = Figure(figsize=(6.2 * len(names), 10.5), dpi=150, layout="constrained")
    FigureCanvasAgg(canvas)
    grid = canvas.subplots(3, len(names), squeeze=False, height_ratios=(1.25, 1, 0.7))
    for column, name in enumerate(names):
        mine = [c for c in chosen if c.method.data == name]
        _accuracy_by_time(grid[0][column], [(c, r) for c in mine if (r := row(c, step_s)) is not None])
        _courses(grid[1][column], grid[2][column], _three(mine, step_s), step_s)
        grid[0][column].set_title(name)
    canvas.suptitle(title)
    canvas.savefig(path, metadata={"Software": None})


def _accuracy_by_time(ax: Axes, pairs: Sequence[tuple[Chosen, Row]]) -> None:
    """Fixed batches as a curve for each schedule, adaptive methods as diamonds."""
    best = max(100 * r.test for _, r in pairs)
    for decay, colour in COLOURS.items():
        rows = sorted((r for _, r in pairs if not r.adaptive and r.decay == decay), key=lambda r: r.batch)
        _points(ax, rows, colour, "o-", f"fixed batch, {WORDS[decay]}")
        for r in rows:
            if 100 * r.test > best - SHOWN_POINTS:
                ax.annotate(str(r.batch), (r.seconds, 100 * r.test), (4, -11), textcoords="offset points", fontsize=8)
        rows = [r for _, r in pairs if r.adaptive and r.decay == decay]
        _points(ax, rows, colour, "D", f"adaptive, {WORDS[decay]}")
        for nth, r in enumerate(sorted(rows, key=lambda r: r.seconds)):
            ax.annotate(
                r.name,
                (r.seconds, 100 * r.test),
                (-5, (4, -11)[nth % 2]),
                textcoords="offset points",
                fontsize=8,
                ha="right",
            )
    ax.set(xlabel="modelled seconds of the whole training", ylabel="test accuracy, %")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(PLAIN)
    ax.set_ylim(best - SHOWN_POINTS, best + 1)
    _finish(ax)


def _points(ax: Axes, rows: Sequence[Row], colour: str, style: str, label: str) -> None:
    if rows:
        x, y, e = [r.seconds for r in rows], [100 * r.test for r in rows], [100 * r.test_ci for r in rows]
        ax.errorbar(x, y, yerr=e, fmt=style, color=colour, capsize=3, markersize=6, label=label)


def _three(chosen: Sequence[Chosen], step_s: StepSeconds) -> list[tuple[str, str, Chosen]]:
    """A small fixed batch, a large one, and the best adaptive method; no decay but what policies do."""
    constant = [c for c in chosen if c.method.decay == "none" and row(c, step_s)]
    fixed = [c for c in constant if not c.method.adaptive]
    adaptive = [c for c in constant if c.method.adaptive]
    if not fixed or not adaptive:
        return []
    small = min(fixed, key=lambda c: abs(c.method.batch - 64))
    large = min(fixed, key=lambda c: abs(c.method.batch - 1024))

    def accuracy(c: Chosen) -> float:
        result = row(c, step_s)
        return result.validation if result else 0.0

    best = max(adaptive, key=accuracy)
    return [
        (small.method.name, palette.BEFORE, small),
        (large.method.name, palette.AFTER, large),
        (best.method.name, palette.BEST, best),
    ]


def _courses(above: Axes, below: Axes, three: Sequence[tuple[str, str, Chosen]], step_s: StepSeconds) -> None:
    """Test accuracy over time, every seed a line, and the batch beneath."""
    for label, colour, chosen in three:
        for nth, course in enumerate(c for c in chosen.courses if not c.lost):
            looks = [look for look in course.looks if look.test is not None]
            x = [seconds(step_s, look, chosen.method.adaptive) for look in looks]
            y = [100 * look.test for look in looks if look.test is not None]
            above.plot(x, y, color=colour, linewidth=1.2, alpha=0.8, label=label if nth == 0 else None)
            times = batches_over_time(course, step_s)
            below.step([t for t, _ in times], [b for _, b in times], where="post", color=colour, linewidth=1.2)
    above.set(ylabel="test accuracy, %", xlabel="modelled seconds")
    below.set(ylabel="global batch", xlabel="modelled seconds")
    below.set_yscale("log", base=2)
    below.yaxis.set_major_formatter(PLAIN)
    if three:
        _finish(above)
        low, high = above.get_ylim()
        above.set_ylim(max(low, high - 2 * SHOWN_POINTS), high)
        below.grid(True, color=palette.GRID)


def _finish(ax: Axes) -> None:
    ax.grid(True, color=palette.GRID)
    ax.set_axisbelow(True)
    ax.legend(fontsize=8, loc="lower right")
