"""A frontier as lines, tables and figures: its answer, its rows, the trade-off against the worker count, the front.

All comes from one record, ``FrontierFound``. Its ``answer`` names rows by their number, and the rows give the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from elastune.core.formatting import (
    cost,
    count,
    duration,
    estimate,
    modelled,
    number,
    plain,
    plus_minus,
    rate,
    settings_text,
    whole,
)
from elastune.core.journal.records import FrontierAnswer, FrontierFound, FrontierRow, Gain
from elastune.report import figures as palette
from elastune.report.figures import Axis, Figure, Level, Marker, Panel, Series, without_outliers
from elastune.report.tables import Table

What = Literal["quality", "seconds", "throughput"]
NAIVE = "before: naive rule (batch and learning rate × workers)"
TUNED = "after: tuned"
ELSEWHERE = "the pick's settings, time alone"
OWN_COLUMNS = ("lr", "batch_size")
"""Settings that have columns of their own."""


# --- the answer in lines ---


def answer_lines(frontier: FrontierFound) -> list[tuple[str, str]]:
    """The lines under the headline, most important first: (topic, line).

    The topics: what settings buy, what workers buy, the price, this machine, the naive rule, what was not done.
    """
    answer = frontier.answer
    if answer.pick is not None and not answer.settings_name:
        return []  # the record of an older version, without these fields
    lines = [
        ("settings", _settings(frontier, answer)),
        ("workers", _workers(frontier, answer)),
        ("more", _more(answer)),
        ("price", _price(frontier, answer)),
        ("faster", _faster(frontier, answer)),
        ("seeds", _seeds(frontier, answer)),
        ("here", _here(frontier, answer)),
        ("rule", plain(answer.naive_rule, 1000)),
        *(("not done", plain(each, 400)) for each in answer.not_done),
    ]
    return [(name, line) for name, line in lines if line]


def answer_table(frontier: FrontierFound) -> Table:
    """The lines of the answer as a table."""
    return Table("What earned it", ("what", "answer"), tuple(answer_lines(frontier)))


def _settings(frontier: FrontierFound, answer: FrontierAnswer) -> str:
    if answer.pick is None or answer.settings_name == "the program's own settings":
        return ""
    if answer.settings is None:
        return "what they buy was not measured: there is no row of the program's own settings on the fewest workers"
    on = count(answer.settings.workers, "worker")
    line = f"{answer.settings_name} instead of the program's own, on {on}: {_gain(answer.settings)}"
    if answer.naive is None or answer.naive.workers == answer.settings.workers:
        return line
    rule = (
        "" if answer.naive.beside is None else f", which reaches {_value(frontier, frontier.rows[answer.naive.beside])}"
    )
    more = count(answer.naive.workers, "worker")
    return f"{line}; instead of the naive rule{rule}, on {more}: {_gain(answer.naive)}"


def _workers(frontier: FrontierFound, answer: FrontierAnswer) -> str:
    if answer.pick is None:
        return ""
    if answer.workers is None:
        most = frontier.rows[answer.pick].workers
        return (
            "" if answer.more_workers is not None else f"what more or fewer than {most} buy was not asked or measured"
        )
    gain = answer.workers
    line = f"{gain.workers} instead of {gain.beside_workers}, with the same settings: {_gain(gain)}"
    line += "" if gain.pays else ", less than their price or than the model's error"
    untrained = f"; on {gain.beside_workers} these settings were not trained, so that only the time there is known"
    return line if gain.beside is not None else line + untrained


def _more(answer: FrontierAnswer) -> str:
    gain = answer.more_workers
    if gain is None:
        return ""
    pays = "" if gain.pays else ", less than their price or than the model's error"
    trained = "; not trained there, so its quality is not known" if gain.pays else ""
    with_more = f"{gain.workers} instead of {gain.beside_workers} workers, with the same settings"
    return f"{with_more}: {_gain(gain)}{pays}{trained}"


def _price(frontier: FrontierFound, answer: FrontierAnswer) -> str:
    if answer.pick is None or frontier.rows[answer.pick].verdict != "holds":
        return ""
    gain, does = answer.cheapest, _does(frontier)
    if gain is None:
        return f"no row that {does} is cheaper than the pick"
    beside = "" if gain.beside is None else f", {_row(frontier, frontier.rows[gain.beside])}"
    speed = f"{number(gain.times_as_fast, 3)} times as fast{_reach(gain)}"
    return f"{number(gain.times_the_cost, 3)} times the cost of the cheapest row that {does}{beside}; {speed}"


def _faster(frontier: FrontierFound, answer: FrontierAnswer) -> str:
    gain = answer.fastest
    if gain is None or answer.fastest_row is None:
        return ""
    command = f": {plain(answer.fastest_command, 4000)}" if answer.fastest_command else ""
    row = _row(frontier, frontier.rows[answer.fastest_row])
    return f"the fastest row that {_does(frontier)}, {row}, is {_gain(gain)}{command}"


def _seeds(frontier: FrontierFound, answer: FrontierAnswer) -> str:
    if answer.shown is None or answer.pick is None:
        return ""
    row, pick = frontier.rows[answer.shown], frontier.rows[answer.pick]
    seeds = pick.seeds + (answer.more_seeds or 0)
    return (
        f"{_row(frontier, row)}, are shown to: {_value(frontier, row)}, and are no faster and no cheaper than the "
        f"pick, {_value(frontier, pick)}; --seeds {seeds} would show the pick, if its mean and spread stay"
    )


def _here(frontier: FrontierFound, answer: FrontierAnswer) -> str:
    machine = answer.this_machine
    if machine is None:
        return ""
    has = f"this machine has {count(machine.cores, 'core')}"
    has += f" and {count(machine.gpus, 'GPU')}" if machine.gpus else ""
    if machine.row is None:
        return f"{has}: no row with so few workers {_does(frontier)}"
    if machine.row == answer.pick:
        return f"{has}, enough for the pick"
    command = f": {plain(machine.command, 4000)}" if machine.command else ""
    row = frontier.rows[machine.row]
    return f"{has}; of the rows with so few workers use {_row(frontier, row)}, in {duration(row.seconds)}{command}"


def _gain(gain: Gain) -> str:
    cost = f"at {number(gain.times_the_cost, 3)} times the cost"
    return f"{number(gain.times_as_fast, 3)} times as fast ({_how(gain)}), {cost}"


def _how(gain: Gain) -> str:
    """Whether the gain was measured or modelled, with its interval if it has one."""
    if gain.low is not None and gain.high is not None:
        return f"{gain.label}, {number(gain.low, 3)} to {number(gain.high, 3)}"
    return "measured" if gain.label == "measured" else "modelled, unchecked"


def _reach(gain: Gain) -> str:
    return "" if gain.label == "measured" and gain.low is None else f" ({_how(gain)})"


def _row(frontier: FrontierFound, row: FrontierRow) -> str:
    """The settings and the workers of ``row`` in a few words."""
    on = ", ".join(word for word in (count(row.workers, "worker"), plain(row.apart, 200)) if word)
    own_settings = row.role == "naive" and row.workers == min(each.workers for each in frontier.rows)
    which = (
        "the program's own settings" if own_settings else "the naive rule" if row.role == "naive" else "tuned settings"
    )
    return f"{which} (batch {row.batch_size}, lr {number(row.lr, 3)}) on {on}"


def _value(frontier: FrontierFound, row: FrontierRow) -> str:
    return f"{plain(frontier.quality, 40)} {estimate(row.quality, row.ci)}"


def _does(frontier: FrontierFound) -> str:
    return f"reaches {number(frontier.target)}" if frontier.target is not None else "holds"


# --- tables ---


def frontier_table(frontier: FrontierFound) -> Table:
    """The quality, time and cost of each row of the frontier; the pick stands out."""
    free = frontier.price_per_worker_hour == 1.0
    at_first = " at first" if frontier.prices_change else ""
    divided, moved = any(row.division for row in frontier.rows), any(row.differences for row in frontier.rows)
    wide = divided or moved
    header = (
        "rule",
        *(("workers", "execution" if moved else "mesh, mechanism") if wide else ("workers",)),
        f"{plain(frontier.quality, 60)} (95 % interval)",
        "by",
        "reaches target" if frontier.target is not None else "holds",
        "training time",
        "time to target (95 % interval)",
        "worker time" if free else f"cost (${number(frontier.price_per_worker_hour)} a worker-hour{at_first})",
    )
    execution = [
        (plain(row.apart, 200) or "as asked for",) if moved else (_stands(row),) if divided else ()
        for row in frontier.rows
    ]
    rows = tuple(_cells(row, frontier, i == frontier.pick, execution[i]) for i, row in enumerate(frontier.rows))
    numeric = frozenset({1, 6, 8} if wide else {1, 5, 7})
    return Table("The frontier", header, rows, numeric, _note(frontier), _strong(frontier))


def settings_table(frontier: FrontierFound) -> Table:
    """The settings, seeds and throughput of each row."""
    scaled = any(row.scaling_efficiency is not None for row in frontier.rows)
    rate = "samples/s (scaling efficiency)" if scaled else "samples/s"
    header = ("rule", "workers", "batch size", "lr (rule)", "seeds", "worse by (bound)", rate, "noise scale")
    execution = {f"{plain(row.mechanism, 40)}, {plain(row.mode, 20)}" for row in frontier.rows}
    rows = tuple(
        (
            row.role,
            whole(row.workers),
            whole(row.batch_size),
            f"{number(row.lr)} ({plain(row.lr_rule, 20)})",
            f"{row.seeds}, {row.diverged} diverged" if row.diverged else str(row.seeds),
            "–" if row.loss is None else f"{number(row.loss, 2)} (≤ {number(row.loss_bound, 2)})",
            f"{_per_second(row)}{_efficiency(row)}",
            plus_minus(row.noise_scale, row.noise_scale_error),
            settings_text(row.config, without=OWN_COLUMNS),
        )
        for row in frontier.rows
    )
    note = f"All: {execution.pop()}. " if len(execution) == 1 else ""
    note += "Worse by: than the smallest worker count with the program's own settings, seed by seed; in brackets the "
    note += "one-sided 95 % bound. "
    if scaled:
        note += "Scaling efficiency: how many times as fast as the same settings on the fewest workers, over how many "
        note += "times as many workers"
        note += ", ≈: modelled. " if any(row.scaling_label == "modelled" for row in frontier.rows) else ". "
    note += "Noise scale: samples, at the end of training."
    return Table(
        "Settings of the rows", (*header, "other settings"), rows, frozenset({1, 2, 6}), note, _strong(frontier)
    )


def volumes_table(frontier: FrontierFound) -> Table:
    """The hypervolumes that the naive rule, the tuned rule and the search reached with equal budgets."""
    spent = ("trainings", "worker time", "scoring", "against the naive rule")
    header, volumes = ("found by", "hypervolume (95 % interval)", "seeds", "points", *spent), frontier.volumes
    rows = tuple(
        (
            plain(each.side, 200),
            estimate(each.volume, each.ci),
            str(each.seeds),
            str(each.points),
            str(each.of) if each.trainings == each.of else f"first {each.trainings} of {each.of}",
            duration(each.spent_s) + ("" if each.equal else ", all there was"),
            duration(each.scoring_s) if each.scoring_s else "–",
            plain(each.against, 200) or "–",
        )
        for each in volumes.sides
    )
    return Table("Hypervolume at equal budget", header, rows, frozenset({2, 3}), _of_volumes(frontier))


def _of_volumes(frontier: FrontierFound) -> str:
    """The note that defines hypervolume and budget."""
    volumes, corner = frontier.volumes, ""
    if (worst := volumes.reference) is not None:
        price = cost(worst.cost, frontier.price_per_worker_hour)
        corner = f"whose worst corner is {plain(frontier.quality, 60)} {number(worst.quality)}, "
        corner += f"{duration(worst.seconds)} and {price}; "
    return (
        f"More is better: the part that each side's own points cover of one box, {corner}time and cost by their "
        f"logarithm. Budget: {duration(volumes.budget_s)} of one worker, which the naive rule's trainings took. "
        "What was chosen after one seed is then trained with fresh ones, if there is time: that scoring is in no "
        "budget. Intervals are over seeds"
    )


def reasons_table(frontier: FrontierFound) -> Table:
    """The reasons for the answer, each with its weight."""
    return Table("Why", ("weight", "reason"), tuple((each.weight, plain(each.text, 1000)) for each in frontier.reasons))


def _stands(row: FrontierRow) -> str:
    return f"{plain(row.mesh, 60)}, {plain(row.mechanism, 40)}"


def _cells(row: FrontierRow, frontier: FrontierFound, picked: bool, execution: tuple[str, ...]) -> tuple[str, ...]:
    data = "" if row.held_out else " (validation)"
    factor = number(row.seconds_factor, 3) if row.seconds_factor is not None else "?"
    price = frontier.price_per_worker_hour
    return (
        f"{row.role}, pick" if picked else f"{row.role}, front" if row.on_front else row.role,
        whole(row.workers),
        *execution,
        f"{estimate(row.quality, row.ci)}{data}",
        row.quality_label,
        _verdict(row, frontier),
        duration(row.seconds) if row.seconds_label == "measured" else f"{duration(row.seconds)} ×÷ {factor}",
        _to_target(row, frontier),
        _follows(row, duration(row.cost * 3600) if price == 1.0 else cost(row.cost, price)),
    )


def _per_second(row: FrontierRow) -> str:
    rate = row.throughput
    if rate is None:
        return "–"
    return _follows(row, whole(round(rate)) if rate >= 1000 else number(rate, 3))


def _efficiency(row: FrontierRow) -> str:
    """The scaling efficiency of ``row``; blank if no row has fewer workers."""
    if row.scaling_efficiency is None:
        return ""
    base_modelled = row.scaling_label == "modelled" and row.seconds_label == "measured"
    return f" ({'≈ ' if base_modelled else ''}{100 * row.scaling_efficiency:.0f} %)"


def _follows(row: FrontierRow, text: str) -> str:
    """``text``, marked with ≈ if it derives from a modelled training time."""
    return f"≈ {text}" if row.seconds_label == "modelled" else text


def _verdict(row: FrontierRow, frontier: FrontierFound) -> str:
    if row.verdict == "falls":
        return "no" if frontier.target is not None else "falls" if frontier.direction == "max" else "rises"
    return "yes" if row.verdict == "holds" else "not shown"


def _to_target(row: FrontierRow, frontier: FrontierFound) -> str:
    if frontier.target is None:
        return "–"
    if row.time_to_target_s is None:
        return f"{row.reached} of {count(row.seeds, 'seed')}" if row.reached else "not reached"
    if row.time_to_target_ci is None:
        return _follows(row, duration(row.time_to_target_s))
    low, high = map(duration, row.time_to_target_ci)
    return _follows(row, f"{duration(row.time_to_target_s)} ({low} to {high})")


def _note(frontier: FrontierFound) -> str:
    """The note that explains the marks of modelled figures and what the intervals cover."""
    words = []
    if any(row.seconds_label == "modelled" for row in frontier.rows):
        ratios = frontier.model_errors.values()
        ends = list(dict.fromkeys(number(end, 2) for end in (min(ratios), max(ratios)))) if ratios else []
        span = f"predicted / measured {' to '.join(ends)}" if ends else "unchecked"
        words.append(f"×÷: modelled, and by what factor it may be off ({span}); ≈: reckoned from that")
    samples = sorted({row.test_samples for row in frontier.rows if row.test_samples is not None})
    sources = f"seeds and {' or '.join(count(n, 'test sample') for n in samples)}" if samples else "seeds alone"
    return "; ".join([*words, f"intervals: {sources}"])


def _strong(frontier: FrontierFound) -> frozenset[int]:
    return frozenset({frontier.pick}) if frontier.pick is not None else frozenset()


# --- figures ---


def tradeoff_figure(frontier: FrontierFound) -> Figure:
    """Quality, time and throughput against workers, before (naive rule) and after (tuned): Rojas and Meneses' figure.

    Lines join points of one setting: those of the naive rule, those of equal tuned settings, and the pick's settings
    on all worker counts. Where several rows of a role share a worker count, the one shown is ``shown_row``.
    """
    naive, tuned = _shown_by_workers(frontier, "naive"), _shown_by_workers(frontier, "tuned")
    alike = dict[str, list[FrontierRow]]()
    for row in tuned:
        alike.setdefault(row.settings, []).append(row)
    counts = tuple(float(w) for w in sorted({row.workers for row in frontier.rows}))
    workers = Axis("workers", log=True, ticks=counts)
    quality = plain(frontier.quality, 40)
    better = "higher is better" if frontier.direction == "max" else "lower is better"
    shown: tuple[tuple[str, Axis, What], ...] = (
        (f"Does {quality} hold?", Axis(f"{quality} ({better})"), "quality"),
        ("What does it buy?", Axis("training time (s)", log=True), "seconds"),
        ("How much is done?", Axis("throughput (samples/s)", log=True), "throughput"),
    )
    panels = tuple(
        Panel(
            title,
            workers,
            axis,
            (
                _against_workers(NAIVE, naive, frontier, what),
                *_pick_elsewhere(frontier, what),
                *(_against_workers(TUNED, rows, frontier, what) for rows in alike.values()),
                *_ring(frontier, "workers", what),
            ),
            _levels(frontier) if what == "quality" else (),
            within=_within(frontier) if what == "quality" else None,
        )
        for title, axis, what in shown
    )
    return Figure("tradeoff", f"{_capital(quality)}, time and throughput against workers", panels, _caption(frontier))


def pareto_figure(frontier: FrontierFound) -> Figure:
    """Quality against training time, worker counts in the markers; the front's points joined, the pick ringed."""
    drawn = [row for row in frontier.rows if math.isfinite(row.quality)]
    naive = [row for row in drawn if row.role == "naive"]
    tuned = [row for row in drawn if row.role == "tuned"]
    joined = _in_the_picture([row for row in drawn if row.on_front], frontier)
    series = [
        Series(
            "Pareto front" if frontier.target is None else "Pareto front of what may reach the target",
            tuple(row.seconds for row in joined),
            tuple(row.quality for row in joined),
            palette.QUIET,
            marker=None,
            line="solid",
            hollow=tuple(row.seconds_label == "modelled" for row in joined),
        ),
        *_by_mechanism("before: naive rule", "square", naive, palette.BEFORE, frontier),
        *_by_mechanism(TUNED, "circle", tuned, palette.AFTER, frontier),
        *_ring(frontier, "seconds", "quality"),
    ]
    quality = plain(frontier.quality, 40)
    better = "higher is better" if frontier.direction == "max" else "lower is better"
    time, value = Axis("training time (s)", log=True), Axis(f"{quality} ({better})")
    panel = Panel("", time, value, tuple(series), _levels(frontier), within=_within(frontier))
    caption = (
        "Numbers in the markers are worker counts; a click on a marker leads to its row. The line joins rows that no "
        "other one beats in quality and time; "
    )
    caption += f"on the table's front cost counts, too. {_caption(frontier)}"
    return Figure("front", f"The front: {quality} against time", (panel,), caption)


def _in_the_picture(rows: Sequence[FrontierRow], frontier: FrontierFound) -> list[FrontierRow]:
    """The ``rows`` that no other row beats in quality and time, fastest first."""
    sign, kept = 1 if frontier.direction == "max" else -1, list[FrontierRow]()
    for row in sorted(rows, key=lambda row: (row.seconds, -sign * row.quality)):
        if not kept or sign * row.quality > sign * kept[-1].quality:
            kept.append(row)
    return kept


def _levels(frontier: FrontierFound) -> tuple[Level, ...]:
    return (Level(frontier.target, f"target {number(frontier.target)}"),) if frontier.target is not None else ()


def _within(frontier: FrontierFound) -> tuple[float, float] | None:
    """The range of the axis of quality: target, pick and front always, other rows unless they are outliers."""
    kept = [row.quality for i, row in enumerate(frontier.rows) if i == frontier.pick or row.on_front]
    kept += [] if frontier.target is None else [frontier.target]
    keep = [value for value in kept if math.isfinite(value)]
    return without_outliers([row.quality for row in frontier.rows], keep)


def _ring(frontier: FrontierFound, across: Literal["workers", "seconds"], what: What) -> list[Series]:
    """A ring around the pick. It is drawn last, so it lies on top."""
    row = frontier.rows[frontier.pick] if frontier.pick is not None else None
    value = None if row is None else getattr(row, what)
    if row is None or value is None or not math.isfinite(value) or (what != "quality" and value <= 0):
        return []
    at, label = (float(getattr(row, across)),), (describe_row(row, frontier),)
    return [Series("pick", at, (value,), palette.PICK, marker="ring", labels=label, links=_links([row], frontier))]


def _pick_elsewhere(frontier: FrontierFound, what: What) -> list[Series]:
    """The pick's settings on the other worker counts, where only times are known. It shows what workers buy."""
    row = frontier.rows[frontier.pick] if frontier.pick is not None else None
    points = [] if row is None else [point for point in row.scaling if point.seconds > 0]
    if row is None or what == "quality" or len(points) < 2 or not row.throughput:
        return []
    work, seconds = row.throughput * row.seconds, what == "seconds"
    hollow = tuple(point.seconds_label == "modelled" for point in points)
    values = tuple(point.seconds if seconds else work / point.seconds for point in points)
    labels = tuple(
        f"the pick's settings on {count(point.workers, 'worker')}; {duration(point.seconds)} "
        f"({'measured' if point.seconds_label == 'measured' else modelled(point.seconds_factor)})"
        for point in points
    )
    at = tuple(float(point.workers) for point in points)
    return [Series(ELSEWHERE, at, values, palette.PICK, marker="diamond", line="solid", hollow=hollow, labels=labels)]


def shown_row(rows: Sequence[FrontierRow], frontier: FrontierFound) -> FrontierRow:
    """The row that stands for several: the pick, or the fastest on target, or the best; of equal ones the fastest."""
    if frontier.pick is not None and frontier.rows[frontier.pick] in rows:
        return frontier.rows[frontier.pick]
    sign = 1 if frontier.direction == "max" else -1
    if frontier.target is not None:
        on_target = [row for row in rows if sign * row.quality >= sign * frontier.target]
        if on_target:
            return min(on_target, key=lambda row: row.seconds)
    return max(rows, key=lambda row: (sign * row.quality if math.isfinite(row.quality) else -math.inf, -row.seconds))


def own_settings_row(frontier: FrontierFound) -> FrontierRow | None:
    """The row of the program's own settings on the fewest workers; None if the frontier has none."""
    fewest = min((row.workers for row in frontier.rows), default=0)
    return next((row for row in frontier.rows if row.role == "naive" and row.workers == fewest), None)


def row_anchor(row: int) -> str:
    """The name of the row with the number ``row`` in a page's table."""
    return f"row-{row}"


def _links(rows: Sequence[FrontierRow], frontier: FrontierFound) -> tuple[str, ...]:
    """The table rows to which marks of ``rows`` lead."""
    numbers = {id(row): i for i, row in enumerate(frontier.rows)}
    return tuple(row_anchor(numbers[id(row)]) for row in rows)


def describe_row(row: FrontierRow, frontier: FrontierFound) -> str:
    """One row in one line, shown on hover."""
    data = "held-out data" if row.held_out else "validation data"
    parts = [
        ", ".join(word for word in (row.role, count(row.workers, "worker"), plain(row.apart, 200)) if word),
        f"batch {row.batch_size}, lr {number(row.lr)} ({plain(row.lr_rule, 20)})",
        f"{plain(frontier.quality, 40)} {estimate(row.quality, row.ci)} {row.quality_label} on {data}, "
        f"{count(row.seeds, 'seed')}: {row.verdict}",
        f"{duration(row.seconds)} ({'measured' if row.seconds_label == 'measured' else modelled(row.seconds_factor)})",
        rate(row.throughput),
    ]
    parts += [f"{row.diverged} diverged"] if row.diverged else []
    parts += [f"trial{'s' if len(row.trials) > 1 else ''} {', '.join(map(str, row.trials))}"] if row.trials else []
    return "; ".join(parts)


def _shown_by_workers(frontier: FrontierFound, role: str) -> list[FrontierRow]:
    by_workers: dict[int, list[FrontierRow]] = {}
    for row in frontier.rows:
        if row.role == role:
            by_workers.setdefault(row.workers, []).append(row)
    return [shown_row(by_workers[workers], frontier) for workers in sorted(by_workers)]


def _against_workers(name: str, rows: Sequence[FrontierRow], frontier: FrontierFound, what: What) -> Series:
    rows = sorted(rows, key=lambda row: row.workers)
    clocked = what != "quality"
    values = [getattr(row, what) for row in rows]
    return Series(
        name,
        tuple(float(row.workers) for row in rows),
        tuple(v if v is not None and math.isfinite(v) and (v > 0 or not clocked) else None for v in values),
        palette.BEFORE if name == NAIVE else palette.AFTER,
        marker="square" if name == NAIVE else "circle",
        line="solid",
        error=tuple(_interval_half_widths(row, what) for row in rows),
        hollow=tuple(clocked and row.seconds_label == "modelled" for row in rows),
        labels=tuple(describe_row(row, frontier) for row in rows),
        links=_links(rows, frontier),
    )


def _interval_half_widths(row: FrontierRow, what: What) -> tuple[float, float] | None:
    """How far error bars reach below and above: the interval of quality, or the error of a modelled figure."""
    if what == "quality":
        if row.ci is None or not math.isfinite(row.quality):
            return None
        return max(0.0, row.quality - row.ci[0]), max(0.0, row.ci[1] - row.quality)
    value, factor = getattr(row, what), row.seconds_factor
    if value is None or factor is None or factor <= 1:
        return None
    return value - value / factor, value * factor - value


def _by_mechanism(
    name: str, marker: Marker, rows: Sequence[FrontierRow], color: str, frontier: FrontierFound
) -> list[Series]:
    """The rows of one rule, in one colour for each mechanism if there are several."""
    mechanisms = sorted({row.mechanism for row in frontier.rows})
    if len(mechanisms) == 1:
        return [_against_seconds(name, marker, rows, color, frontier)]
    colors = {mechanism: palette.SEQUENCE[i % len(palette.SEQUENCE)] for i, mechanism in enumerate(mechanisms)}
    series = []
    for mechanism in dict.fromkeys(row.mechanism for row in rows):
        alike = [row for row in rows if row.mechanism == mechanism]
        series.append(_against_seconds(f"{name}, {plain(mechanism, 40)}", marker, alike, colors[mechanism], frontier))
    return series


def _against_seconds(
    name: str, marker: Marker, rows: Sequence[FrontierRow], color: str, frontier: FrontierFound
) -> Series:
    return Series(
        name,
        tuple(row.seconds for row in rows),
        tuple(row.quality for row in rows),
        color,
        marker=marker,
        error=tuple(_interval_half_widths(row, "quality") for row in rows),
        hollow=tuple(row.seconds_label == "modelled" for row in rows),
        labels=tuple(describe_row(row, frontier) for row in rows),
        inside=tuple(str(row.workers) for row in rows),
        links=_links(rows, frontier),
    )


def _caption(frontier: FrontierFound) -> str:
    fewest, quality = min((row.seeds for row in frontier.rows), default=0), plain(frontier.quality, 40)
    words = f"Bars of {quality}: 95 % confidence interval of the mean over at least {count(fewest, 'seed')}."
    if any(row.seconds_label == "modelled" for row in frontier.rows):
        factors = [
            row.seconds_factor for row in frontier.rows if row.seconds_label == "modelled" and row.seconds_factor
        ]
        words += " Hollow markers and dashed lines: time and throughput from the step-time model, "
        if factors:
            words += f"with bars as far as it was off where it could be checked (×÷ {number(max(factors), 3)})."
        else:
            words += "which could not be checked here."
    if len({(row.role, row.workers) for row in frontier.rows}) < len(frontier.rows):
        words += " Of several rows of as many workers the pick or the fastest of the best is shown."
    if emulated := sorted({row.workers for row in frontier.rows if row.quality_label == "emulated"}):
        words += f" {_capital(quality)} of {', '.join(map(str, emulated))} workers is emulated on fewer."
    if frontier.rows and len({row.settings for row in frontier.rows if row.role == "tuned"}) > 1:
        words += " Lines join points of one setting: tuned points without a line are settings of their own."
    if _within(frontier) is not None:
        words += " A triangle at the edge: beyond the axis."
    if any(not math.isfinite(row.quality) for row in frontier.rows):
        words += " A cross on the lower edge: diverged."
    return words


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
