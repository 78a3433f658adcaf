"""``elastune resize``: change how many workers a running job has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options
from elastune.cli.output import OK, WRONG, print_error, print_json
from elastune.core.errors import UserError
from elastune.core.mesh import MOST_WORKERS

if TYPE_CHECKING:
    from elastune.elastic.protocol.messages import ReshapeAsked, ResizeAsked


def resize(
    out: Annotated[Path, typer.Argument(help="The output folder of a run that is running.")],
    workers: Annotated[int, typer.Argument(help="How many workers it shall have.")],
    json: options.Json = False,
) -> int:
    """Give a running job more or fewer workers. It goes on meanwhile; within the bounds of its --workers LOW:HIGH.

    --json: {kind: "resize", taken, detail, members: [worker, ...] (those at the time of asking), out}.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise UserError(f"workers must be from 1 to {MOST_WORKERS}", workers, "such as elastune resize OUT 4")
    from elastune.elastic.protocol.messages import ResizeAsked

    return wish(out, "resize", ResizeAsked(workers, "elastune resize"), json=json)


def wish(out: Path, kind: str, request: ResizeAsked | ReshapeAsked, *, json: bool) -> int:
    """Ask the run in ``out`` for it, and tell what it says."""
    from elastune.elastic.protocol.client import ask

    answer = ask(out, request)
    if not answer.taken:
        print_error(answer.detail)
        return WRONG
    if json:
        print_json({"kind": kind, "taken": True, "detail": answer.detail, "members": answer.members, "out": str(out)})
    else:
        print(answer.detail)
    return OK
