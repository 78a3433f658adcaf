"""``elastune check``: whether a program comes to the same on any number of workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from elastune.cli import options, parse
from elastune.cli.output import FAILED, OK, print_json
from elastune.cli.setup import use_data
from elastune.core.errors import UserError

MOST_STEPS = 1000


def check(
    file: options.File,
    steps: Annotated[int, typer.Option(help="Steps that are compared.")] = 2,
    set_: options.Set = None,
    data: options.Data = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> int:
    """Does FILE come to the same weights again, and on two workers? Says what keeps it from that, and what to change.

    A few steps are run twice on one worker and once on two, in exact mode. Each finding is one line; with one or more
    of them the exit code is 1.

    --json: {kind: "check", steps, sha256, found: [{kind, lines, said, fix}]}.
    """
    from elastune.core.run import Program
    from elastune.job.portability import WORKERS, check_program

    if not 1 <= steps <= MOST_STEPS:
        raise UserError(f"--steps must be from 1 to {MOST_STEPS}", steps, "such as --steps 2")
    use_data(data)
    checked = check_program(Program(file), parse.settings(set_ or []), steps=steps, seed=seed)
    if json:
        print_json({"kind": "check", **asdict(checked)})
    for found in () if json else checked.found:
        print(found.told(file.name))
    if not checked.found and not json:
        print(f"{file.name}: {checked.steps} steps, the same weights again and on {WORKERS} workers")
    return FAILED if checked.found else OK
