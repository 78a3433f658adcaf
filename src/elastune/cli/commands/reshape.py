"""``elastune reshape``: let the workers of a running job stand as another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.commands.resize import Elsewhere, TokenFile, elsewhere, wish
from elastune.core.mesh import Mesh


def reshape(
    out: Annotated[Path, typer.Argument(help="The output folder of a run that is running.")],
    mesh: Annotated[str, typer.Argument(help="The new mesh: data=1,tensor=2.")],
    cluster: Elsewhere = None,
    token_file: TokenFile = None,
    json: options.Json = False,
) -> int:
    """Give a running job another mesh of workers.

    The job trains on meanwhile, and gets as many workers as MESH has. Its mechanism must divide along the axes of MESH,
    and its --workers LOW:HIGH must allow that number. Between two steps, workers hand over the parts of the model that
    they hold. In exact mode this changes no result.

    If OUT is not on this machine, name the job's controller: --cluster hosts:HOST:PORT --token-file FILE, with the
    address and the token that its agents have.

    --json: {kind: "reshape", taken, detail, members: [worker, ...] (those at the time of asking), out}.
    """
    asked = Mesh.parse(mesh)
    from elastune.elastic.protocol.messages import ReshapeAsked

    request = ReshapeAsked(str(asked), "elastune reshape")
    return wish(out, "reshape", request, elsewhere(cluster, token_file), json=json)
