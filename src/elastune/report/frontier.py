"""Tables, figures and answer of a frontier: the trade-off against the worker count, the front.

The lines of the answer are read from the one record ``FrontierFound.answer``; the rows that it names give the values.
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

# [frontier answer] The answer of a frontier in lines: what settings buy, what workers buy, the price, this machine, what was not done.
#
# All of it is read from the one record, ``FrontierFound.answer``; the rows that it names give the values beside.


def answer_lines(found: FrontierFound) -> list[tuple[str, str]]:
    """What stands under the headline, most important first: a word for what it is about, and the line."""
    answer = found.answer
    if answer.pick is not None and not answer.settings_name:
        return []  # an older journal, which says nothing of all this
    lines = [
        ("settings", _settings(found, answer)),
        ("workers", _workers(found, answer)),
        ("more", _more(answer)),
        ("price", _price(found, answer)),
        ("faster", _faster(found, answer)),
        ("seeds", _seeds(found, answer)),
        ("here", _here(found, answer)),
        ("rule", plain(answer.naive_rule, 1000)),
        *(("not done", plain(each, 400)) for each in answer.not_done),
    ]
    return [(name, line) for name, line in lines if line]


def answer_table(found: FrontierFound) -> Table:
    """The same as a table."""
    return Table("What earned it", ("what", "answer"), tuple(answer_lines(found)))


def _settings(found: FrontierFound, answer: FrontierAnswer) -> str:
    if answer.pick is None or answer.settings_name == "the program's own settings":
        return ""
    if answer.settings is None:
        return "what they buy was not measured: there is no row of the program's own settings on the fewest workers"
    on = count(answer.settings.workers, "worker")
    line = f"{answer.settings_name} instead of the program's own, on {on}: {_gain(answer.settings)}"
    if answer.naive is None or answer.naive.workers == answer.settings.workers:
        return line
    rule = "" if answer.naive.beside is None else f", which reaches {_value(found, found.rows[answer.naive.beside])}"
    more = count(answer.naive.workers, "worker")
    return f"{line}; instead of the naive rule{rule}, on {more}: {_gain(answer.naive)}"


def _workers(found: FrontierFound, answer: FrontierAnswer) -> str:
    if answer.pick is None:
        return ""
    if answer.workers is None:
        most = found.rows[answer.pick].workers
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


def _price(found: FrontierFound, answer: FrontierAnswer) -> str:
    if answer.pick is None or found.rows[answer.pick].verdict != "holds":
        return ""
    gain, does = answer.cheapest, _does(found)
    if gain is None:
        return f"no row that {does} is cheaper than the pick"
    beside = "" if gain.beside is None else f", {_row(found, found.rows[gain.beside])}"
    speed = f"{number(gain.times_as_fast, 3)} times as fast{_reach(gain)}"
    return f"{number(gain.times_the_cost, 3)} times the cost of the cheapest row that {does}{beside}; {speed}"


def _faster(found: FrontierFound, answer: FrontierAnswer) -> str:
    gain = answer.fastest
    if gain is None or answer.fastest_row is None:
        return ""
    command = f": {plain(answer.fastest_command, 4000)}" if answer.fastest_command else ""
    return (
        f"the fastest row that {_does(found)}, {_row(found, found.rows[answer.fastest_row])}, is {_gain(gain)}{command}"
    )


def _seeds(found: FrontierFound, answer: FrontierAnswer) -> str:
    if answer.shown is None or answer.pick is None:
        return ""
    row, pick = found.rows[answer.shown], found.rows[answer.pick]
    seeds = pick.seeds + (answer.more_seeds or 0)
    return (
        f"{_row(found, row)}, are shown to: {_value(found, row)}, and are no faster and no cheaper than the pick, "
        f"{_value(found, pick)}; --seeds {seeds} would show the pick, if its mean and spread stay"
    )


def _here(found: FrontierFound, answer: FrontierAnswer) -> str:
    here = answer.this_machine
    if here is None:
        return ""
    has = f"this machine has {count(here.cores, 'core')}"
    has += f" and {count(here.gpus, 'GPU')}" if here.gpus else ""
    if here.row is None:
        return f"{has}: no row with so few workers {_does(found)}"
    if here.row == answer.pick:
        return f"{has}, enough for the pick"
    command = f": {plain(here.command, 4000)}" if here.command else ""
    row = found.rows[here.row]
    return f"{has}; of the rows with so few workers use {_row(found, row)}, in {duration(row.seconds)}{command}"


def _gain(gain: Gain) -> str:
    cost = f"at {number(gain.times_the_cost, 3)} times the cost"
    return f"{number(gain.times_as_fast, 3)} times as fast ({_how(gain)}), {cost}"


def _how(gain: Gain) -> str:
    """The label and the interval."""
    if gain.low is not None and gain.high is not None:
        return f"{gain.label}, {number(gain.low, 3)} to {number(gain.high, 3)}"
    return "measured" if gain.label == "measured" else "modelled, unchecked"


def _reach(gain: Gain) -> str:
    return "" if gain.label == "measured" and gain.low is None else f" ({_how(gain)})"


def _row(found: FrontierFound, row: FrontierRow) -> str:
    """Its settings and its workers in a few words."""
    on = ", ".join(word for word in (count(row.workers, "worker"), plain(row.apart, 200)) if word)
    own = row.role == "naive" and row.workers == min(each.workers for each in found.rows)
    which = "the program's own settings" if own else "the naive rule" if row.role == "naive" else "tuned settings"
    return f"{which} (batch {row.batch_size}, lr {number(row.lr, 3)}) on {on}"


def _value(found: FrontierFound, row: FrontierRow) -> str:
    return f"{plain(found.quality, 40)} {estimate(row.quality, row.ci)}"


def _does(found: FrontierFound) -> str:
    return f"reaches {number(found.target)}" if found.target is not None else "holds"


# [frontier tables] Tables of a frontier: what each row reaches, with which settings, and what the answer rests on.

OWN_COLUMNS = ("lr", "batch_size")
"""Configuration that has columns of its own."""


def frontier_table(found: FrontierFound) -> Table:
    """What each row of the frontier reaches, in its order; the pick stands out."""
    free = found.price_per_worker_hour == 1.0
    begun = " at first" if found.prices_change else ""
    divided, moved = any(row.division for row in found.rows), any(row.ways for row in found.rows)
    wide = divided or moved
    header = (
        "rule",
        *(("workers", "execution" if moved else "mesh, mechanism") if wide else ("workers",)),
        f"{plain(found.quality, 60)} (95 % interval)",
        "by",
        "reaches target" if found.target is not None else "holds",
        "training time",
        "time to target (95 % interval)",
        "worker time" if free else f"cost (${number(found.price_per_worker_hour)} a worker-hour{begun})",
    )
    execution = [
        (plain(row.apart, 200) or "as asked for",) if moved else (_stands(row),) if divided else ()
        for row in found.rows
    ]
    rows = tuple(_cells(row, found, i == found.pick, execution[i]) for i, row in enumerate(found.rows))
    numeric = frozenset({1, 6, 8} if wide else {1, 5, 7})
    return Table("The frontier", header, rows, numeric, _note(found), _strong(found))


def settings_table(found: FrontierFound) -> Table:
    """With which settings, over how many seeds, and how much each row does in a second."""
    scaled = any(row.scaling_efficiency is not None for row in found.rows)
    rate = "samples/s (scaling efficiency)" if scaled else "samples/s"
    header = ("rule", "workers", "batch size", "lr (rule)", "seeds", "worse by (bound)", rate, "noise scale")
    execution = {f"{plain(row.mechanism, 40)}, {plain(row.mode, 20)}" for row in found.rows}
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
        for row in found.rows
    )
    note = f"All: {execution.pop()}. " if len(execution) == 1 else ""
    note += "Worse by: than the smallest worker count with the program's own settings, seed by seed; in brackets the "
    note += "one-sided 95 % bound. "
    if scaled:
        note += "Scaling efficiency: how many times as fast as the same settings on the fewest workers, over how many "
        note += "times as many workers"
        note += ", ≈: modelled. " if any(row.scaling_label == "modelled" for row in found.rows) else ". "
    note += "Noise scale: samples, at the end of training."
    return Table("Settings of the rows", (*header, "other settings"), rows, frozenset({1, 2, 6}), note, _strong(found))


def volumes_table(found: FrontierFound) -> Table:
    """What the naive rule, the same with settings tuned, and the search have found with as much to spend."""
    spent = ("trainings", "worker time", "scoring", "against the naive rule")
    header, told = ("found by", "hypervolume (95 % interval)", "seeds", "points", *spent), found.volumes
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
        for each in told.sides
    )
    return Table("Hypervolume at equal budget", header, rows, frozenset({2, 3}), _of_volumes(found))


def _of_volumes(found: FrontierFound) -> str:
    """What they are, and what they were found with."""
    told, corner = found.volumes, ""
    if (worst := told.reference) is not None:
        price = cost(worst.cost, found.price_per_worker_hour)
        corner = f"whose worst corner is {plain(found.quality, 60)} {number(worst.quality)}, "
        corner += f"{duration(worst.seconds)} and {price}; "
    return (
        f"More is better: the part that each side's own points cover of one box, {corner}time and cost by their "
        f"logarithm. Budget: {duration(told.budget_s)} of one worker, which the naive rule's trainings took. What was "
        "chosen after one seed is then trained with fresh ones, if there is time: that scoring is in no budget. "
        "Intervals are over seeds"
    )


def reasons_table(found: FrontierFound) -> Table:
    """What the answer rests on."""
    return Table("Why", ("weight", "reason"), tuple((each.weight, plain(each.text, 1000)) for each in found.reasons))


def _stands(row: FrontierRow) -> str:
    return f"{plain(row.mesh, 60)}, {plain(row.mechanism, 40)}"


def _cells(row: FrontierRow, found: FrontierFound, picked: bool, execution: tuple[str, ...]) -> tuple[str, ...]:
    data = "" if row.held_out else " (validation)"
    factor = number(row.seconds_factor, 3) if row.seconds_factor is not None else "?"
    price = found.price_per_worker_hour
    return (
        f"{row.role}, pick" if picked else f"{row.role}, front" if row.on_front else row.role,
        whole(row.workers),
        *execution,
        f"{estimate(row.quality, row.ci)}{data}",
        row.quality_label,
        _verdict(row, found),
        duration(row.seconds) if row.seconds_label == "measured" else f"{duration(row.seconds)} ×÷ {factor}",
        _to_target(row, found),
        _follows(row, duration(row.cost * 3600) if price == 1.0 else cost(row.cost, price)),
    )


def _per_second(row: FrontierRow) -> str:
    rate = row.throughput
    if rate is None:
        return "–"
    return _follows(row, whole(round(rate)) if rate >= 1000 else number(rate, 3))


def _efficiency(row: FrontierRow) -> str:
    """Blank where there are no fewer workers to compare with."""
    if row.scaling_efficiency is None:
        return ""
    base_modelled = row.scaling_label == "modelled" and row.seconds_label == "measured"
    return f" ({'≈ ' if base_modelled else ''}{100 * row.scaling_efficiency:.0f} %)"


def _follows(row: FrontierRow, text: str) -> str:
    """A figure that is reckoned from the row's training time."""
    return f"≈ {text}" if row.seconds_label == "modelled" else text


def _verdict(row: FrontierRow, found: FrontierFound) -> str:
    if row.verdict == "falls":
        return "no" if found.target is not None else "falls" if found.direction == "max" else "rises"
    return "yes" if row.verdict == "holds" else "not shown"


def _to_target(row: FrontierRow, found: FrontierFound) -> str:
    if found.target is None:
        return "–"
    if row.time_to_target_s is None:
        return f"{row.reached} of {count(row.seeds, 'seed')}" if row.reached else "not reached"
    if row.time_to_target_ci is None:
        return _follows(row, duration(row.time_to_target_s))
    low, high = map(duration, row.time_to_target_ci)
    return _follows(row, f"{duration(row.time_to_target_s)} ({low} to {high})")


def _note(found: FrontierFound) -> str:
    """What stands beside modelled figures, and what the intervals hold."""
    words = []
    if any(row.seconds_label == "modelled" for row in found.rows):
        ratios = found.model_errors.values()
        ends = list(dict.fromkeys(number(end, 2) for end in (min(ratios), max(ratios)))) if ratios else []
        span = f"predicted / measured {' to '.join(ends)}" if ends else "unchecked"
        words.append(f"×÷: modelled, and by what factor it may be off ({span}); ≈: reckoned from that")
    samples = sorted({row.test_samples for row in found.rows if row.test_samples is not None})
    told = f"seeds and {' or '.join(count(n, 'test sample') for n in samples)}" if samples else "seeds alone"
    return "; ".join([*words, f"intervals: {told}"])


def _strong(found: FrontierFound) -> frozenset[int]:
    return frozenset({found.pick}) if found.pick is not None else frozenset()


# [frontier] The figures of a frontier: the trade-off against the worker count, before and after, and the front.

What = Literal["quality", "seconds", "throughput"]
NAIVE = "before: naive rule (batch and learning rate × workers)"
TUNED = "after: tuned"
ELSEWHERE = "the pick's settings, time alone"


def tradeoff(found: FrontierFound) -> Figure:
    """Quality, time and throughput against workers, before (naive rule) and after (tuned): Rojas and Meneses' figure.

    Lines join points of one setting: those of the naive rule, those of equal tuned settings, and the pick's settings
    on all worker counts. Where several rows of a role share a worker count, the one shown is ``shown_row``.
    """
    naive, tuned = _shown_by_workers(found, "naive"), _shown_by_workers(found, "tuned")
    alike = dict[str, list[FrontierRow]]()
    for row in tuned:
        alike.setdefault(row.settings, []).append(row)
    counts = tuple(float(w) for w in sorted({row.workers for row in found.rows}))
    workers = Axis("workers", log=True, ticks=counts)
    quality = plain(found.quality, 40)
    better = "higher is better" if found.direction == "max" else "lower is better"
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
                _against_workers(NAIVE, naive, found, what),
                *_pick_elsewhere(found, what),
                *(_against_workers(TUNED, rows, found, what) for rows in alike.values()),
                *_ring(found, "workers", what),
            ),
            _levels(found) if what == "quality" else (),
            within=_within(found) if what == "quality" else None,
        )
        for title, axis, what in shown
    )
    return Figure("tradeoff", f"{_capital(quality)}, time and throughput against workers", panels, _caption(found))


def front(found: FrontierFound) -> Figure:
    """Quality against training time, worker counts in the markers; the front's points joined, the pick ringed."""
    drawn = [row for row in found.rows if math.isfinite(row.quality)]
    naive = [row for row in drawn if row.role == "naive"]
    tuned = [row for row in drawn if row.role == "tuned"]
    joined = _in_the_picture([row for row in drawn if row.on_front], found)
    series = [
        Series(
            "Pareto front" if found.target is None else "Pareto front of what may reach the target",
            tuple(row.seconds for row in joined),
            tuple(row.quality for row in joined),
            palette.QUIET,
            marker=None,
            line="solid",
            hollow=tuple(row.seconds_label == "modelled" for row in joined),
        ),
        *_by_mechanism("before: naive rule", "square", naive, palette.BEFORE, found),
        *_by_mechanism(TUNED, "circle", tuned, palette.AFTER, found),
        *_ring(found, "seconds", "quality"),
    ]
    quality = plain(found.quality, 40)
    better = "higher is better" if found.direction == "max" else "lower is better"
    time, value = Axis("training time (s)", log=True), Axis(f"{quality} ({better})")
    panel = Panel("", time, value, tuple(series), _levels(found), within=_within(found))
    caption = (
        "Numbers in the markers are worker counts. The line joins rows that no other one beats in quality and time; "
    )
    caption += f"on the table's front cost counts, too. {_caption(found)}"
    return Figure("front", f"The front: {quality} against time", (panel,), caption)


def _in_the_picture(rows: Sequence[FrontierRow], found: FrontierFound) -> list[FrontierRow]:
    """Those of ``rows`` that no other one beats in quality and time, fastest first."""
    sign, kept = 1 if found.direction == "max" else -1, list[FrontierRow]()
    for row in sorted(rows, key=lambda row: (row.seconds, -sign * row.quality)):
        if not kept or sign * row.quality > sign * kept[-1].quality:
            kept.append(row)
    return kept


def _levels(found: FrontierFound) -> tuple[Level, ...]:
    return (Level(found.target, f"target {number(found.target)}"),) if found.target is not None else ()


def _within(found: FrontierFound) -> tuple[float, float] | None:
    """What the axis of quality shows: the target, the pick and the front in any case, and no outliers."""
    kept = [row.quality for i, row in enumerate(found.rows) if i == found.pick or row.on_front]
    kept += [] if found.target is None else [found.target]
    keep = [value for value in kept if math.isfinite(value)]
    return without_outliers([row.quality for row in found.rows], keep)


def _ring(found: FrontierFound, across: Literal["workers", "seconds"], what: What) -> list[Series]:
    """The pick, last of all and so on top."""
    row = found.rows[found.pick] if found.pick is not None else None
    value = None if row is None else getattr(row, what)
    if row is None or value is None or not math.isfinite(value) or (what != "quality" and value <= 0):
        return []
    at, label = (float(getattr(row, across)),), (describe_row(row, found),)
    return [Series("pick", at, (value,), palette.PICK, marker="ring", labels=label)]


def _pick_elsewhere(found: FrontierFound, what: What) -> list[Series]:
    """The pick's settings on the other worker counts, of which times alone are known: what workers buy."""
    row = found.rows[found.pick] if found.pick is not None else None
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


def shown_row(rows: Sequence[FrontierRow], found: FrontierFound) -> FrontierRow:
    """The row that stands for several: the pick, or the fastest on target, or the best; of equal ones the fastest."""
    if found.pick is not None and found.rows[found.pick] in rows:
        return found.rows[found.pick]
    sign = 1 if found.direction == "max" else -1
    if found.target is not None:
        there = [row for row in rows if sign * row.quality >= sign * found.target]
        if there:
            return min(there, key=lambda row: row.seconds)
    return max(rows, key=lambda row: (sign * row.quality if math.isfinite(row.quality) else -math.inf, -row.seconds))


def describe_row(row: FrontierRow, found: FrontierFound) -> str:
    """One row in one line, for hovering."""
    data = "held-out data" if row.held_out else "validation data"
    parts = [
        ", ".join(word for word in (row.role, count(row.workers, "worker"), plain(row.apart, 200)) if word),
        f"batch {row.batch_size}, lr {number(row.lr)} ({plain(row.lr_rule, 20)})",
        f"{plain(found.quality, 40)} {estimate(row.quality, row.ci)} {row.quality_label} on {data}, "
        f"{count(row.seeds, 'seed')}: {row.verdict}",
        f"{duration(row.seconds)} ({'measured' if row.seconds_label == 'measured' else modelled(row.seconds_factor)})",
        rate(row.throughput),
    ]
    return "; ".join([*parts, f"{row.diverged} diverged"] if row.diverged else parts)


def _shown_by_workers(found: FrontierFound, role: str) -> list[FrontierRow]:
    by_workers: dict[int, list[FrontierRow]] = {}
    for row in found.rows:
        if row.role == role:
            by_workers.setdefault(row.workers, []).append(row)
    return [shown_row(by_workers[workers], found) for workers in sorted(by_workers)]


def _against_workers(name: str, rows: Sequence[FrontierRow], found: FrontierFound, what: What) -> Series:
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
        labels=tuple(describe_row(row, found) for row in rows),
    )


def _interval_half_widths(row: FrontierRow, what: What) -> tuple[float, float] | None:
    """How far below and above: the confidence interval of quality; of a model's figure, by what it may be off."""
    if what == "quality":
        if row.ci is None or not math.isfinite(row.quality):
            return None
        return max(0.0, row.quality - row.ci[0]), max(0.0, row.ci[1] - row.quality)
    value, factor = getattr(row, what), row.seconds_factor
    if value is None or factor is None or factor <= 1:
        return None
    return value - value / factor, value * factor - value


def _by_mechanism(
    name: str, marker: Marker, rows: Sequence[FrontierRow], color: str, found: FrontierFound
) -> list[Series]:
    """Rows of one rule; each mechanism's in its own colour, where there are several."""
    mechanisms = sorted({row.mechanism for row in found.rows})
    if len(mechanisms) == 1:
        return [_against_seconds(name, marker, rows, color, found)]
    colors = {mechanism: palette.SEQUENCE[i % len(palette.SEQUENCE)] for i, mechanism in enumerate(mechanisms)}
    series = []
    for mechanism in dict.fromkeys(row.mechanism for row in rows):
        own = [row for row in rows if row.mechanism == mechanism]
        series.append(_against_seconds(f"{name}, {plain(mechanism, 40)}", marker, own, colors[mechanism], found))
    return series


def _against_seconds(
    name: str, marker: Marker, rows: Sequence[FrontierRow], color: str, found: FrontierFound
) -> Series:
    return Series(
        name,
        tuple(row.seconds for row in rows),
        tuple(row.quality for row in rows),
        color,
        marker=marker,
        error=tuple(_interval_half_widths(row, "quality") for row in rows),
        hollow=tuple(row.seconds_label == "modelled" for row in rows),
        labels=tuple(describe_row(row, found) for row in rows),
        inside=tuple(str(row.workers) for row in rows),
    )


def _caption(found: FrontierFound) -> str:
    fewest, quality = min((row.seeds for row in found.rows), default=0), plain(found.quality, 40)
    words = f"Bars of {quality}: 95 % confidence interval of the mean over at least {count(fewest, 'seed')}."
    if any(row.seconds_label == "modelled" for row in found.rows):
        factors = [row.seconds_factor for row in found.rows if row.seconds_label == "modelled" and row.seconds_factor]
        words += " Hollow markers and dashed lines: time and throughput from the step-time model, "
        if factors:
            words += f"with bars as far as it was off where it could be checked (×÷ {number(max(factors), 3)})."
        else:
            words += "which could not be checked here."
    if len({(row.role, row.workers) for row in found.rows}) < len(found.rows):
        words += " Of several rows of as many workers the pick or the fastest of the best is shown."
    if emulated := sorted({row.workers for row in found.rows if row.quality_label == "emulated"}):
        words += f" {_capital(quality)} of {', '.join(map(str, emulated))} workers is emulated on fewer."
    if found.rows and len({row.settings for row in found.rows if row.role == "tuned"}) > 1:
        words += " Lines join points of one setting: tuned points without a line are settings of their own."
    if _within(found) is not None:
        words += " A triangle at the edge: beyond the axis."
    if any(not math.isfinite(row.quality) for row in found.rows):
        words += " A cross on the lower edge: diverged."
    return words


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
