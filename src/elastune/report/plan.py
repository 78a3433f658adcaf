"""A cluster's plan in words, as a table and as a page, from its record alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastune.core.formatting import byte_count, cost, count, duration, flat, number, plain
from elastune.core.journal.records import PlanMade
from elastune.core.plan.memory import serial_share_text
from elastune.report.document import Glance, Note, Page, Section, few_words
from elastune.report.tables import Table

PlanJson = Mapping[str, Any]
NAMES = {"width": "trainings at once"}
FLOAT_BYTES = 4


def plan_lines(made: PlanMade) -> list[str]:
    """The whole plan as lines for a terminal."""
    result, price = made.answer, float(made.request["price_per_worker_hour"])
    plans = [_line(place, each, price) for place, each in enumerate(result["plans"], 1)]
    warned = [result["too_small"], ""] if result.get("too_small") else []
    lines = [*warned, *_basis(made), "", *plans, "", "what such a split brings (plan 1, modelled):"]
    lines += [*(f"  {line}" for line in _brings(made)), "", *_next(result)]
    best = result["plans"][0]
    lines += ["", f"plan 1, one training of it: {best['command']}"]
    lines += [f"its search: {best['search_command']}"] if best["search_command"] else []
    lines += [f"  {note}" for note in result.get("command_notes", [])]
    if result["measured"]:
        where = "on the cluster" if made.request.get("cluster") else "here"
        lines += ["", f"measured {where}, one training of each alone:", *map(measured_line, result["measured"])]
    return lines


def plan_page(made: PlanMade) -> Page:
    """The page of a plan."""
    result, options = made.answer, made.request
    best, price = result["plans"][0], float(options["price_per_worker_hour"])
    cluster = f"{count(int(options['nodes']), 'node')} of {count(int(options['workers_per_node']), 'worker')}"
    answer = (
        f"{Path(plain(made.program)).name} on {cluster}: {count(best['width'], 'training')} at once on {best['mesh']}"
    )
    title = few_words(f"{count(best['width'], 'training')} at once on {best['mesh']} (modelled)")
    sections = [
        Section("Plans", (plans_table(result["plans"], price),), open=True),
        Section("What such a split brings (plan 1, modelled)", tuple(Note(line) for line in _brings(made))),
        Section("Where the next doubling goes", tuple(Note(line) for line in _next(result))),
        Section("From what", tuple(Note(line) for line in _basis(made))),
    ]
    if result["measured"]:
        sections.insert(1, Section("Predicted, then measured", (measured_table(result["measured"]),)))
    request_table = Table(
        "The request", ("asked for", "value"), tuple(flat({**options, "program": made.program}).items())
    )
    sections.append(Section("The request", (request_table,)))
    if notes := result.get("command_notes"):
        sections.insert(1, Section("About the commands", tuple(Note(line) for line in notes)))
    if result.get("too_small"):
        sections.insert(0, Section("Size of the model", (Note(result["too_small"]),), open=True))
    state = f"modelled: tuned in {_span(best)}, {cost(best['cost'], price)}"
    command, of = best["search_command"], "The search of plan 1:"
    if command is None:
        command, of = best["command"], "One training of plan 1:"
    return Page("plan", Glance(title), answer, state, True, (), tuple(sections), command, of)


def plans_table(plans: Sequence[PlanJson], price: float) -> Table:
    """One row for each plan."""
    header: tuple[str, ...] = (
        "at once",
        "mesh",
        "workers",
        "batch",
        "a pass",
        "tuned in",
        "80 % of cases",
        "cost",
        "step",
        "a worker",
    )
    header += ("largest model that fits", "limited by")
    rows = tuple(
        (
            str(each["width"]),
            each["mesh"] + (" (sharded)" if each["sharded"] else ""),
            f"{each['workers']:,}",
            f"{each['batch']:,}",
            str(each["micro"]),
            duration(each["seconds"]),
            " to ".join(duration(end) for end in each["interval_s"]),
            cost(each["cost"], price),
            duration(each["step_s"]),
            byte_count(round(each["memory_bytes"])),
            _largest(each) or "–",
            f"{each['limits'][0]} ({each['limits'][1]:.0%})",
        )
        for each in plans
    )
    note = "All modelled. The largest model: all state grown alike, activations as they are."
    return Table("Plans", header, rows, frozenset({0, 2, 3, 4, 5, 7, 8, 9}), note=note, strong=frozenset({0}))


def measured_table(rows: Sequence[PlanJson]) -> Table:
    """Predicted and measured step time and memory, one row for each plan that was run."""
    header: tuple[str, ...] = (
        "mesh",
        "mechanism",
        "batch",
        "a pass",
        "step predicted",
        "measured",
        "error",
        "memory predicted",
    )
    header += ("measured", "error")
    cells = tuple(
        (
            each["mesh"],
            each["mechanism"],
            f"{each['batch']:,}",
            str(each["micro"]),
            duration(each["step_s"]),
            each["failed"] if each["measured_step_s"] is None else duration(each["measured_step_s"]),
            _percent(each["step_error"]),
            byte_count(round(each["memory_bytes"])),
            "–" if each["measured_memory_bytes"] is None else byte_count(round(each["measured_memory_bytes"])),
            _percent(each["memory_error"]),
        )
        for each in rows
    )
    note = "Predictions are modelled, for the place of the runs; one training of each was run, alone."
    return Table("Predicted, then measured", header, cells, frozenset(range(2, 10)), note=note)


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:+.1%}"


def _basis(made: PlanMade) -> list[str]:
    """What the plan rests on: the program, the search, the measurements, and what was left out."""
    result, options = made.answer, made.request
    size, search = result["size"], result["search"]
    where = "on the cluster" if options.get("probe") else "here"
    noise = {
        "given": f"{number(search['noise_scale'], 3)} samples, as given",
        "measured": f"{number(search['noise_scale'], 3)} samples, measured in the first steps {where}: it grows later",
        "unknown": "not known (no batch is taken to save steps): --noise-scale",
    }[result["noise"]]
    lines = [
        f"program: {byte_count(size['parameter_bytes'])} of parameters, {size['flops'] / 1e6:,.1f} MFLOP a sample, "
        f"needs {byte_count(round(size['pass_bytes']))} a sample in a pass; {count(search['runs'], 'training')} of "
        f"{search['steps']:,.0f} steps at batch {search['base_batch']}; noise scale {noise}",
        _searched(search, where),
    ]
    if result["probed"]:
        timings = "; ".join(f"{what}: {duration(step_s)}" for what, step_s in result["probed"].items())
        lines.append(f"measured {where}: {timings}")
    elif result.get("assumed"):
        lines.append(f"nothing was run: {result['assumed']}")
    else:
        lines.append(
            f"nothing was run here: {result['unmeasured']}. Times are those of any machine, within factors of 4 and 8"
        )
    lines += [f"left out: {axis}, it does not run here: {why}" for axis, why in result["refused"].items()]
    beside = (
        f"that is without {byte_count(round(result['beside_bytes']))} which its process takes beside, measured {where}"
    )
    if not result["probed"]:
        beside = "what a process takes beside is not known"
    copies = int(options.get("copies", 1))
    owners = f"counted with {count(copies, 'holder')} of each part of what is divided (--copies {copies} in commands)"
    if copies == 1:
        owners += ": a lost worker then takes its part along. Runs have two by default"
    return [
        *lines,
        f"memory (modelled): {result['memory']}; {beside}; {owners}",
        f"{serial_of(made)} (rehearsed)",
    ]


def serial_of(made: PlanMade) -> str:
    """Which part of the program's model ``tensor`` leaves whole, in one sentence."""
    size = made.answer["size"]
    whole = size.get("whole_flops", 0.0) / size["flops"] if size["flops"] else None
    return serial_share_text(1 - size["divided"], whole)


def _searched(search: PlanJson, where: str) -> str:
    within = search["crowding_within"]
    crowding = f"{search['crowding']:.1%} more trainings for each further one at once"
    if within:
        crowding += (
            f" ({within[0]:.1%} to {within[1]:.1%}, up to {number(search['blind'])} x as many: simulated studies)"
        )
    elif not search["crowding"]:
        crowding = "trainings at once cost no further ones"
    else:
        crowding += ", as given"
    rounds = "generation by generation" if search["generations"] else "each finished training is replaced at once"
    if search.get("generation"):
        rounds = f"generations of {search['generation']}, each waited for"
    kept = "" if search["kept"] == 1 else f"; early stopping leaves {search['kept']:.0%} of steps (simulated studies)"
    beside = search.get("beside_s") or 0.0
    start = f"; a training takes {duration(beside)} beside its steps, as measured {where}" if beside else ""
    return f"search (modelled): {crowding}; lengths vary by {search['variation']:.0%}, {rounds}{kept}{start}"


def _span(of: PlanJson) -> str:
    low, high = of["interval_s"]
    return f"{duration(of['seconds'])} ({duration(low)} to {duration(high)}, modelled, 80 %)"


def _largest(of: PlanJson) -> str:
    most = of["most_parameters"]
    return "" if most is None else f"{number(most / FLOAT_BYTES / 1e6, 3)} M parameters"


def _line(place: int, of: PlanJson, price: float) -> str:
    state = ", sharded" if of["sharded"] else ""
    noise = "" if of["noise_ratio"] is None else f", {number(of['noise_ratio'], 2)} x the noise scale"
    part, share = of["limits"]
    low, high = of["cost_interval"]
    odds = "" if of["odds"] is None else f", within the deadline in {_share(of['odds'])} of cases"
    largest = f"; up to {_largest(of)} would fit so" if _largest(of) else ""
    return (
        f"{place}. {count(of['width'], 'training')} at once x {of['mesh']}{state} = {count(of['workers'], 'worker')}: "
        f"tuned in {_span(of)}{odds}, {cost(of['cost'], price)} ({cost(low, price)} to {cost(high, price)}); batch "
        f"{of['batch']}{noise}, {of['micro']} a pass; step {duration(of['step_s'])}, {share:.0%} of it {part}; "
        f"{byte_count(round(of['memory_bytes']))} a worker{_copied(of)}{largest}"
    )


def _copied(of: PlanJson) -> str:
    """The memory of a worker with two holders of each part, if that is more."""
    copied = of.get("copied_bytes")
    if copied is None or copied < 1.005 * of["memory_bytes"]:
        return ""
    return f" ({byte_count(round(copied))} with --copies 2)"


def _share(odds: float) -> str:
    return f"{odds:.0%}" if odds < 0.99 else "more than 99%"


def _brings(made: PlanMade) -> list[str]:
    """About plan 1: its batch beside that of plain data parallelism, the manual input, and the largest model."""
    result, best = made.answer, made.answer["plans"][0]
    own_batch, workers = result["size"]["batch_size"], best["workers"]
    noise = "" if best["noise_ratio"] is None else f", {number(best['noise_ratio'], 2)} x the noise scale"
    mesh = "mesh, " if made.request["mesh"] is None else ""
    size = f"{number(result['size']['parameter_bytes'] / FLOAT_BYTES / 1e6, 3)} M"
    return [
        f"batch: {best['batch']:,} samples in each training, {number(best['batch'] / own_batch, 3)} x the program's own"
        f"{noise}; one training on all {count(workers, 'worker')} by data parallelism, each with the program's own "
        f"batch, would have {own_batch * workers:,}",
        f"manual input: nodes, workers of each and trainings; how many at once, {mesh}batch and samples of a pass were "
        "found, and stand in the commands",
        f"parameters: {size} in the program; {_largest(best) or 'any number (no bound on memory)'} would fit so split",
    ]


def _next(result: PlanJson) -> list[str]:
    """Where twice the workers would go, and why, the largest gain first."""
    gains, reasons = result["gains"], result["reasons"]
    lines = []
    if gains:
        first = next(iter(gains))
        verb = "goes to" if gains[first] > 1 else "would bring nothing; the least harm does"
        lines.append(f"the next doubling of workers {verb} {NAMES.get(first, first)} (plan 1, modelled):")
    for axis, why in reasons.items():
        text = f"{number(gains[axis], 3)} x as fast" if axis in gains else "not possible"
        lines.append(f"  {NAMES.get(axis, axis)}: {text}: {plain(why, 300)}")
    return lines


def measured_line(of: PlanJson) -> str:
    """A line for one plan that was run: predicted and measured."""
    low, high = of["step_interval_s"]
    predicted = (
        f"{of['mesh']} ({of['mechanism']}), batch {of['batch']}, {of['micro']} a pass: step {duration(of['step_s'])} "
    )
    predicted += "predicted"
    if of["measured_step_s"] is None:
        return f"{predicted}; not measured: {of['failed']}"
    within = "in" if of["within"] else "outside"
    text = f"{predicted}, {duration(of['measured_step_s'])} measured, error {of['step_error']:+.1%} "
    text += f"({within} its interval, {duration(low)} to {duration(high)}); "
    text += f"memory {byte_count(round(of['memory_bytes']))} predicted"
    if of["measured_memory_bytes"] is None:
        return f"{text}, not measured"
    measured = byte_count(round(of["measured_memory_bytes"]))
    return f"{text}, {measured} measured, error {of['memory_error']:+.1%}"
