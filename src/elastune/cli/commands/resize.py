"""``elastune resize``: change how many workers a running job has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.output import OK, print_json
from elastune.core.errors import UserError
from elastune.core.mesh import MOST_WORKERS


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
    from elastune.elastic.protocol.client import ask
    from elastune.elastic.protocol.messages import ResizeAsked

    answer = ask(out, ResizeAsked(workers, "elastune resize"))
    if not answer.taken:
        raise UserError("a run takes a wish only while it trains", answer.detail, "go on with it: --resume")
    if json:
        print_json(
            {"kind": "resize", "taken": True, "detail": answer.detail, "members": answer.members, "out": str(out)}
        )
    else:
        print(answer.detail)
    return OK
