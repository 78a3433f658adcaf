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
    mesh: Annotated[str, typer.Argument(help="How its workers shall stand: data=1,tensor=2.")],
    cluster: Elsewhere = None,
    token_file: TokenFile = None,
    json: options.Json = False,
) -> int:
    """Give a running job another mesh, and as many workers as that has. It goes on meanwhile.

    Its mechanism must divide along the mesh's axes, and its --workers LOW:HIGH allow as many. What workers hold of the
    model moves from one to another between two steps; in exact mode no result changes by it. Where OUT is not on this
    machine: --cluster hosts:HOST:PORT --token-file FILE, as its agents are given them.

    --json: {kind: "reshape", taken, detail, members: [worker, ...] (those at the time of asking), out}.
    """
    asked = Mesh.parse(mesh)
    from elastune.elastic.protocol.messages import ReshapeAsked

    request = ReshapeAsked(str(asked), "elastune reshape")
    return wish(out, "reshape", request, elsewhere(cluster, token_file), json=json)
