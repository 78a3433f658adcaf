"""The answer of a frontier in lines: what settings buy, what workers buy, the price, this machine, what was not done.

All of it is read from the one record, ``FrontierFound.answer``; the rows that it names give the values beside.
"""

from __future__ import annotations

from elastune.core.text import count, duration, estimate, number, plain
from elastune.journal.records import FrontierAnswer, FrontierFound, FrontierRow, Gain
from elastune.report.tables.tables import Table


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
