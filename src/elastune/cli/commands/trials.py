"""``elastune trials`` and ``elastune budget``: steer a study that runs, from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from elastune.cli import options
from elastune.cli.output import OK, WRONG, print_error, print_json, print_lines
from elastune.core import notation
from elastune.core.errors import UserError

TrialAct = Literal["stop", "pause", "go-on"]
COMMANDS = {"budget": "elastune budget", "workers": "elastune resize"} | dict.fromkeys(
    ("stop", "pause", "go_on"), "elastune trials"
)
BOUNDARY = {
    "stop": "it stops at its next step boundary",
    "pause": "it pauses at its next step boundary",
    "go_on": "it goes on once workers are free",
    "budget": "the study has the new budget",
    "workers": "running trials hand workers over at their boundaries",
}


def trials(
    out: Annotated[Path, typer.Argument(help="The output folder of a study or a frontier.")],
    act: Annotated[TrialAct, typer.Argument(help="stop, pause or go-on.")],
    number: Annotated[int, typer.Argument(min=0, help="The number of the trial.")],
    json: options.Json = False,
) -> int:
    """Stop or pause a trial of a running study, or let a paused one go on.

    A stopped trial has no result, and no search learns from it. A paused trial keeps its checkpoint, gives its workers
    back, and goes on by go-on only. A trial that early stopping has paused goes on by go-on until early stopping
    judges it again.

    The study's journal records who asked. A request to a study that does not run is done when elastune resume goes on
    with it.
    """
    return ask(out, act.replace("-", "_"), f"trial {number}", {"trial": number}, as_json=json)


def budget(
    out: Annotated[Path, typer.Argument(help="The output folder of a study.")],
    trials: Annotated[int | None, typer.Option(min=1, help="The new number of trials.")] = None,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="The new time for all trials, as 2h.")] = None,
    worker_hours: Annotated[float | None, typer.Option(help="The new number of worker-hours.")] = None,
    json: options.Json = False,
) -> int:
    """Change the budget of a running study.

    The numbers replace those that the study was begun with, and count from its beginning.
    """
    seconds = None if budget is None else notation.duration(budget, "--budget")
    parts = {"trials": trials, "budget_s": seconds, "worker_hours": worker_hours}
    given = {name: value for name, value in parts.items() if value is not None}
    if not given:
        fix = "such as elastune budget OUT --trials 50"
        raise UserError("a budget needs --trials, --budget or --worker-hours", "none of them", fix)
    shown = ", ".join(f"{name} {value:g}" for name, value in given.items())
    return ask(out, "budget", shown, given, as_json=json)


def ask(out: Path, act: str, what: str, fields: dict[str, Any], *, as_json: bool) -> int:
    """Ask the study in ``out`` to do ``act``, and print its answer.

    Args:
        out: The folder of the study.
        act: What to do, as ``ActAsked`` names it.
        what: What ``act`` is about, in words.
        fields: The fields of ``ActAsked`` that belong to ``act``.
        as_json: Print JSON.

    Returns:
        The exit code.

    Raises:
        UserError: If ``out`` holds no study, or if ``fields`` are out of range.
    """
    from elastune.tuning.study.control.requests import ask_study, is_study, request

    if not is_study(out):
        fix = "elastune ls lists output folders; elastune stop and elastune resize steer a run"
        raise UserError("a study or a frontier has trials and a budget", out, fix)
    try:
        asked = request(act, COMMANDS[act], **fields)
    except ValueError as error:
        raise UserError("a request must be within its range", what, str(error).splitlines()[-1].strip()) from None
    answer = ask_study(out, asked)
    if answer.refused:
        print_error(answer.refused)
        return WRONG
    detail = f"{what}: {BOUNDARY[act]}"
    if not answer.seen:
        detail = f"{what}: the request waits in {out}, until the study looks at it or elastune resume goes on with it"
    if as_json:
        print_json({"kind": "asked", "act": act, **fields, "seen": answer.seen, "detail": detail, "out": str(out)})
    else:
        print_lines(detail)
    return OK
