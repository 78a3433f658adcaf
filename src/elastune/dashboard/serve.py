"""Start the server of the page: in this process until it is interrupted, or beside a command that trains."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.dashboard.guard import Keys
from elastune.dashboard.server import DashboardOptions, application

PARENT_S = 1.0  # between two looks whether the command beside it still runs
TICK_S = 0.5  # between two looks whether the server is to end
LONGEST_TOKEN = 200
RARELY = 50_000, 20, 50  # the garbage collector looks through all records of a journal: half of the time of reading it


def serve(
    options: DashboardOptions,
    announce: Callable[[str], None],
    token_file: Path | None = None,
    beside: int | None = None,
) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        options: What it shows; port 0 chooses a free one.
        announce: Receives the address, with its token.
        token_file: Holds the token of this and later servers; None: a new token.
        beside: The process beside which it serves: it ends with it. None: it serves by itself.

    Raises:
        UserError: If the address cannot be listened on, or if the token file is wrong.
    """
    import uvicorn

    gc.set_threshold(*RARELY)
    keys = Keys() if token_file is None else Keys(_token(token_file))
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
        listening.listen()  # who has the address may come at once
    except OSError as error:
        listening.close()
        fix = "choose a free --port, or leave it out; --host must be an address of this machine"
        raise UserError("a page needs an address", f"{options.host}:{options.port}: {error}", fix) from None
    options = replace(options, port=listening.getsockname()[1])
    shown = f"[{options.host}]" if ":" in options.host else options.host

    class Server(uvicorn.Server):
        """Its own loop wakes ten times a second: nearly all that a page costs while nothing happens."""

        async def main_loop(self) -> None:
            while not await self.on_tick(0):
                await asyncio.sleep(TICK_S)

    server = Server(
        uvicorn.Config(
            application(options, keys, lambda: server.should_exit),
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            loop="asyncio",
        )
    )
    if beside is not None:
        threading.Thread(target=_end_with, args=(server, beside), daemon=True).start()
    announce(f"http://{shown}:{options.port}/?token={keys.token}")
    server.run(sockets=[listening])


def _end_with(server: object, pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(PARENT_S)
    server.should_exit = True  # type: ignore[attr-defined]


def _token(path: Path) -> str:
    """The token in ``path``; a new one is written if there is none. Only its owner may read it."""
    try:
        if not path.exists():
            atomic_write(path, f"{Keys().token}\n".encode(), mode=0o600)
        if path.stat().st_mode & 0o077:
            raise UserError("only its owner may read a token file", path, f"chmod 600 {path}")
        text = path.read_text()[:LONGEST_TOKEN].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("a token file must be readable", f"{path}: {error}", "check the path") from None
    if len(text) < 16 or not text.isascii() or not text.isprintable():
        raise UserError("a token must have 16 printable characters or more", path, "remove the file for a new token")
    return text
