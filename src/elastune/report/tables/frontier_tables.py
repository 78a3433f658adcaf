"""Tables of a frontier: what each row reaches, with which settings, and what the answer rests on."""

from __future__ import annotations

from elastune.core.text import cost, count, duration, estimate, number, plain, plus_minus, settings_text, whole
from elastune.journal.records import FrontierFound, FrontierRow
from elastune.report.tables.tables import Table

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
        *(("workers", "means" if moved else "mesh, mechanism") if wide else ("workers",)),
        f"{plain(found.quality, 60)} (95 % interval)",
        "by",
        "reaches target" if found.target is not None else "holds",
        "training time",
        "time to target (95 % interval)",
        "worker time" if free else f"cost (${number(found.price_per_worker_hour)} a worker-hour{begun})",
    )
    means = [
        (plain(row.apart, 200) or "as asked for",) if moved else (_stands(row),) if divided else ()
        for row in found.rows
    ]
    rows = tuple(_cells(row, found, i == found.pick, means[i]) for i, row in enumerate(found.rows))
    numeric = frozenset({1, 6, 8} if wide else {1, 5, 7})
    return Table("The frontier", header, rows, numeric, _note(found), _strong(found))


def settings_table(found: FrontierFound) -> Table:
    """With which settings, over how many seeds, and how much each row does in a second."""
    scaled = any(row.scaling_efficiency is not None for row in found.rows)
    rate = "samples/s (scaling efficiency)" if scaled else "samples/s"
    header = ("rule", "workers", "batch size", "lr (rule)", "seeds", "worse by (bound)", rate, "noise scale")
    means = {f"{plain(row.mechanism, 40)}, {plain(row.mode, 20)}" for row in found.rows}
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
    note = f"All: {means.pop()}. " if len(means) == 1 else ""
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


def _cells(row: FrontierRow, found: FrontierFound, picked: bool, means: tuple[str, ...]) -> tuple[str, ...]:
    data = "" if row.held_out else " (validation)"
    factor = number(row.seconds_factor, 3) if row.seconds_factor is not None else "?"
    price = found.price_per_worker_hour
    return (
        f"{row.role}, pick" if picked else f"{row.role}, front" if row.on_front else row.role,
        whole(row.workers),
        *means,
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
