"""``elastune resize`` and ``elastune reshape``: change the number of workers, or the mesh, of a running job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options
from elastune.cli.commands.trials import ask
from elastune.cli.output import OK, WRONG, print_error, print_json, print_lines
from elastune.core.errors import UserError
from elastune.core.mesh import MOST_WORKERS, Mesh

if TYPE_CHECKING:
    from elastune.elastic.wire.messages import ReshapeAsked, ResizeAsked


# --- elastune resize ---

ControllerLocator = Annotated[
    str | None,
    typer.Option(
        metavar="hosts:HOST:PORT",
        help="Address of the run's controller on another machine, such as hosts:login1:7070. "
        "[default: OUT is on this machine]",
    ),
]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With --cluster: a copy of that controller's token file.")
]


def resize(
    out: Annotated[Path, typer.Argument(help="The output folder of a run or a study that is running.")],
    workers: Annotated[int, typer.Argument(help="The new number of workers.")],
    cluster: ControllerLocator = None,
    token_file: TokenFile = None,
    json: options.Json = False,
) -> int:
    """Give a running job more or fewer workers.

    The job trains on meanwhile. The number must lie within the bounds of its --workers LOW:HIGH. A study shares the
    new number of workers among its trials; it must fit into the study's cluster.

    If OUT is not on this machine, name the job's controller: --cluster hosts:HOST:PORT --token-file FILE, with the
    address and the token that its agents have.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise UserError(f"workers must be from 1 to {MOST_WORKERS}", workers, "such as elastune resize OUT 4")
    from elastune.elastic.wire.messages import ResizeAsked
    from elastune.tuning.study.control.requests import is_study

    if cluster is None and is_study(out):
        return ask(out, "workers", f"{workers} workers", {"workers": workers}, as_json=json)
    return request_change(
        out, "resize", ResizeAsked(workers, "elastune resize"), remote_controller(cluster, token_file), json=json
    )


@dataclass(frozen=True)
class Controller:
    """A controller on another machine: the address on which it listens for agents ("host:port"), and its token file."""

    address: str
    token_file: Path


def remote_controller(cluster: str | None, token_file: Path | None) -> Controller | None:
    """The controller that --cluster and --token-file name; None if the run's folder is on this machine.

    Raises:
        UserError: For an address that is none, or if one of the two options is missing.
    """
    if cluster is None:
        if token_file is not None:
            rule = "a token is for a controller on another machine"
            raise UserError(rule, "--token-file without --cluster", "--cluster hosts:HOST:PORT")
        return None
    name, _, address = cluster.partition(":")
    if name != "hosts" or not re.fullmatch(r"(\[[^\]\s]+\]|[^:\s]+):[0-9]{1,5}", address):
        fix = "such as hosts:login1:7070, also for a controller on Slurm or Ray (its port=)"
        raise UserError("a running controller is reached by --cluster hosts:HOST:PORT", repr(cluster), fix)
    if token_file is None:
        raise UserError("a controller lets in who has its token", "no --token-file", "--token-file FILE, a copy of its")
    return Controller(address, token_file)


def request_change(
    out: Path, kind: str, request: ResizeAsked | ReshapeAsked, controller: Controller | None, *, json: bool
) -> int:
    """Send ``request`` to the run in ``out``, through ``controller`` if it is on another machine; print the answer.

    Returns:
        The exit code.
    """
    from elastune.elastic.wire.contact import ask

    contact = None
    if controller is not None:
        from elastune.runtime.agents.credentials import read_token
        from elastune.runtime.agents.launcher import find_run

        contact = find_run(controller.address, read_token(controller.token_file), out)
    answer = ask(out, request, contact)
    if not answer.taken:
        print_error(answer.detail)
        return WRONG
    if json:
        print_json({"kind": kind, "taken": True, "detail": answer.detail, "members": answer.members, "out": str(out)})
    else:
        print_lines(answer.detail)
    return OK


# --- elastune reshape ---


def reshape(
    out: Annotated[Path, typer.Argument(help="The output folder of a run that is running.")],
    mesh: Annotated[str, typer.Argument(help="The new mesh: data=1,tensor=2.")],
    cluster: ControllerLocator = None,
    token_file: TokenFile = None,
    json: options.Json = False,
) -> int:
    """Give a running job another mesh of workers.

    The job trains on meanwhile, and gets as many workers as MESH has. Its mechanism must divide along the axes of MESH,
    and its --workers LOW:HIGH must allow that number. Between two steps, workers hand over the parts of the model that
    they hold. In exact mode this changes no result.

    If OUT is not on this machine, name the job's controller: --cluster hosts:HOST:PORT --token-file FILE, with the
    address and the token that its agents have.
    """
    new_mesh = Mesh.parse(mesh)
    from elastune.elastic.wire.messages import ReshapeAsked

    request = ReshapeAsked(str(new_mesh), "elastune reshape")
    return request_change(out, "reshape", request, remote_controller(cluster, token_file), json=json)
