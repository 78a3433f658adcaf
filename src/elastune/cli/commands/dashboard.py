"""``elastune dashboard``: a page that shows what runs while it runs, and steers it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli.output import OK, print_error
from elastune.core.errors import UserError

DEFAULT_ROOT = Path("elastune-out")
LAST_PORT = 65535


def dashboard(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Output folders, or folders that hold output folders.", show_default="elastune-out"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Other machines reach the page at one that is not loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port. [default: a free one]", show_default=False)] = 0,
    read_only: Annotated[bool, typer.Option("--read-only", help="Show, and refuse all changes.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Holds the token of the address, so that a later server has the same one."),
    ] = None,
    beside: Annotated[int | None, typer.Option(hidden=True, help="End with this parent process.")] = None,
) -> int:
    """Show runs, studies and frontiers in a browser while they work, and steer them.

    The page reads journals alone, so it can start and end at any time. It prints an address with a secret token: who
    has it sees the folders, and acts on them as you. Without --host only this machine reaches it.
    """
    from elastune.dashboard.serve import serve
    from elastune.dashboard.server import DashboardOptions

    roots = tuple(folders or (DEFAULT_ROOT,))
    for root in roots:
        if not root.is_dir() and (folders or beside is None):
            fix = "name output folders, or start something first"
            raise UserError("elastune dashboard shows folders", root, fix)
    if not 0 <= port <= LAST_PORT:
        raise UserError(f"a port must be from 0 to {LAST_PORT}", port, "leave --port out for a free one")
    options = DashboardOptions(roots, host, port, read_only)
    serve(options, lambda address: print_error(f"dashboard: {address}"), token_file, beside)
    return OK


@contextmanager
def page_beside(out: Path, wanted: bool) -> Iterator[None]:
    """Serve the page of ``out`` from a process of its own while a command works, if ``wanted``.

    The process prints the address on stderr. A page that cannot be served is no reason to end the command.
    """
    if not wanted:
        yield
        return
    command = [sys.executable, "-m", "elastune", "dashboard", str(out), "--beside", str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
