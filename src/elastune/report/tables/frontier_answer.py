"""The answer of a frontier in lines: what settings buy, what workers buy, the price, this machine, what was not done.

All of it is read from the one record, ``FrontierFound.answer``; the rows that it names give the values beside.
"""

from __future__ import annotations

from elastune.core.text import count, duration, estimate, number, plain
from elastune.journal.records import FrontierAnswer, FrontierFound, FrontierRow, Gain
from elastune.report.tables.tables import Table


def answer_lines(found: FrontierFound) -> list[tuple[str, str]]:
    """What stands under the headline, most important first: a word for what it is about, and the line."""
    told = found.answer
    lines = [
        ("settings", _settings(found, told)),
        ("workers", _workers(found, told)),
        ("more", _more(told)),
        ("price", _price(found, told)),
        ("faster", _faster(found, told)),
        ("seeds", _seeds(found, told)),
        ("here", _here(found, told)),
        ("rule", plain(told.naive_rule, 1000)),
        *(("not done", plain(each, 400)) for each in told.not_done),
    ]
    return [(name, line) for name, line in lines if line]


def answer_table(found: FrontierFound) -> Table:
    """The same as a table."""
    return Table("What earned it", ("what", "answer"), tuple(answer_lines(found)))


def _settings(found: FrontierFound, told: FrontierAnswer) -> str:
    if told.pick is None or told.settings_name == "the program's own settings":
        return ""
    if told.settings is None:
        return "what they buy was not measured: there is no row of the program's own settings on the fewest workers"
    on = count(told.settings.workers, "worker")
    line = f"{told.settings_name} instead of the program's own, on {on}: {_gain(told.settings)}"
    if told.naive is None or told.naive.workers == told.settings.workers:
        return line
    rule = "" if told.naive.beside is None else f", which reaches {_value(found, found.rows[told.naive.beside])}"
    more = count(told.naive.workers, "worker")
    return f"{line}; instead of the naive rule{rule}, on {more}: {_gain(told.naive)}"


def _workers(found: FrontierFound, told: FrontierAnswer) -> str:
    if told.pick is None:
        return ""
    if told.workers is None:
        most = found.rows[told.pick].workers
        return "" if told.more_workers is not None else f"what more or fewer than {most} buy was not asked or measured"
    gain = told.workers
    line = f"{gain.workers} instead of {gain.beside_workers}, with the same settings: {_gain(gain)}"
    line += "" if gain.pays else ", less than their price or than the model's error"
    untrained = f"; on {gain.beside_workers} these settings were not trained, so that only the time there is known"
    return line if gain.beside is not None else line + untrained


def _more(told: FrontierAnswer) -> str:
    gain = told.more_workers
    if gain is None:
        return ""
    pays = "" if gain.pays else ", less than their price or than the model's error"
    trained = "; not trained there, so its quality is not known" if gain.pays else ""
    with_more = f"{gain.workers} instead of {gain.beside_workers} workers, with the same settings"
    return f"{with_more}: {_gain(gain)}{pays}{trained}"


def _price(found: FrontierFound, told: FrontierAnswer) -> str:
    if told.pick is None or found.rows[told.pick].verdict != "holds":
        return ""
    gain, does = told.cheapest, _does(found)
    if gain is None:
        return f"no row that {does} is cheaper than the pick"
    beside = "" if gain.beside is None else f", {_row(found, found.rows[gain.beside])}"
    speed = f"{number(gain.times_as_fast, 3)} times as fast{_reach(gain)}"
    return f"{number(gain.times_the_cost, 3)} times the cost of the cheapest row that {does}{beside}; {speed}"


def _faster(found: FrontierFound, told: FrontierAnswer) -> str:
    gain = told.fastest
    if gain is None or told.fastest_row is None:
        return ""
    command = f": {plain(told.fastest_command, 4000)}" if told.fastest_command else ""
    return (
        f"the fastest row that {_does(found)}, {_row(found, found.rows[told.fastest_row])}, is {_gain(gain)}{command}"
    )


def _seeds(found: FrontierFound, told: FrontierAnswer) -> str:
    if told.shown is None or told.pick is None:
        return ""
    row, pick = found.rows[told.shown], found.rows[told.pick]
    seeds = pick.seeds + (told.more_seeds or 0)
    return (
        f"{_row(found, row)}, are shown to: {_value(found, row)}, and are no faster and no cheaper than the pick, "
        f"{_value(found, pick)}; --seeds {seeds} would show the pick, if its mean and spread stay"
    )


def _here(found: FrontierFound, told: FrontierAnswer) -> str:
    here = told.this_machine
    if here is None:
        return ""
    has = f"this machine has {count(here.cores, 'core')}"
    has += f" and {count(here.gpus, 'GPU')}" if here.gpus else ""
    if here.row is None:
        return f"{has}: no row with so few workers {_does(found)}"
    if here.row == told.pick:
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
