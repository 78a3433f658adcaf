"""``elastune check``: whether a program comes to the same on any number of workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from elastune.cli import options, parse
from elastune.cli.output import FAILED, OK, print_error, print_json, say
from elastune.cli.setup import use_data
from elastune.core.errors import UserError

MOST_STEPS = 1000


def check(
    file: options.File,
    steps: Annotated[int, typer.Option(help="Number of steps to compare, from 1 to 1000.")] = 2,
    time: Annotated[
        int,
        typer.Option(
            metavar="STEPS", help="Number of steps to time in exact mode and in one pass a batch, such as 50. 0: none."
        ),
    ] = 0,
    set_: options.Set = None,
    data: options.Data = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> int:
    """Check whether a program gets the same weights on two workers.

    A few steps run twice on one worker and once on two, in exact mode. Each finding is one line: what keeps FILE from
    the same weights, and what to change. With one or more findings the exit code is 1.

    With --time, exact mode is also measured beside one pass a batch, as a plain training loop has it: how long a step
    takes, and which metrics differ by more than rounding.

    --json: {kind: "check", steps, sha256, found: [{kind, lines, said, fix}]}, with --time also exact: {steps, exact_s,
    plain_s (seconds a step), apart: {metric: [exact, plain]}}.

    A program in which nothing is found is remembered by its digest, in XDG_CACHE_HOME/elastune/checked: elastune run
    then does not advise to check it.
    """
    from elastune.core.run import Program
    from elastune.job.checked_programs import note_check
    from elastune.job.exact_cost import exact_cost
    from elastune.job.portability import WORKERS, check_program

    if not 1 <= steps <= MOST_STEPS:
        raise UserError(f"--steps must be from 1 to {MOST_STEPS}", steps, "such as --steps 2")
    if not 0 <= time <= MOST_STEPS:
        raise UserError(f"--time must be from 0 to {MOST_STEPS} steps", time, "such as --time 50")
    use_data(data)
    settings = parse.settings(set_ or [])
    checked = check_program(Program(file), settings, steps=steps, seed=seed)
    try:
        note_check(Program(file), passed=not checked.found)
    except OSError as error:
        print_error(f"this check cannot be remembered: {error}")
    trains = all(found.kind != "fails" for found in checked.found)
    cost = exact_cost(Program(file), settings, steps=time, seed=seed) if time and trains else None
    if json:
        measured = {} if cost is None else {"exact": asdict(cost)}
        print_json({"kind": "check", **asdict(checked), **measured})
    for found in () if json else checked.found:
        say(found.told(file.name))
    if not checked.found and not json:
        say(f"{file.name}: {checked.steps} steps, the same weights again and on {WORKERS} workers")
    for line in cost.told() if cost is not None and not json else ():
        say(f"{file.name}: {line}")
    return FAILED if checked.found else OK
