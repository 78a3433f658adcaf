"""The server of the page: one HTML file, a few modules, events of what changed, and acts that a study journals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from elastune.core.errors import UserError
from elastune.core.journal.files import writer_of
from elastune.dashboard.folders import JOURNAL, Folders, FollowedFolder, Sent
from elastune.dashboard.guard import DashboardGuard, Keys
from elastune.dashboard.run_view import FollowedRun
from elastune.dashboard.study_view import FollowedStudy

LOOK_S = 0.25  # between two looks at a journal after something new
QUIET_S = 1.0  # between two looks when nothing happens
LIST_S = 2.0  # between two looks at all folders
LEAST_S = 1.0  # between two events of one page
PAUSE_S = 0.01  # between two blocks of a long journal: others are served meanwhile
ALIVE_S = 10.0  # a comment after so long a silence: a page notices that the server is lost
LONGEST_ACT = 4096
BY = "the dashboard"
FIELDS = {"trial", "trials", "budget_s", "worker_hours", "workers"}  # of requests to a study
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
MODULES = ("app.js", "dom.js", "charts.js", "folders.js", "study.js", "run.js")


@dataclass(frozen=True)
class DashboardOptions:
    """What a server shows, and to whom.

    Attributes:
        roots: Output folders, and folders that hold output folders.
        host: The address on which it listens.
        port: The port.
        read_only: Refuse all changes.
    """

    roots: tuple[Path, ...]
    host: str
    port: int
    read_only: bool = False


def application(options: DashboardOptions, keys: Keys, stopping: Callable[[], bool] = lambda: False) -> DashboardGuard:
    """Return the ASGI application.

    Args:
        options: What it shows.
        keys: Its secrets.
        stopping: Whether the server ends: events of open pages end then, too.

    Returns:
        The application, behind its guard.
    """
    pages = _Pages(options, keys, stopping)
    routes = [
        Route("/", pages.index),
        Route("/static/{name}", pages.static),
        Route("/api/me", pages.me),
        Route("/api/folders", pages.list_events),
        Route("/api/events", pages.events),
        Route("/api/trial", pages.trial),
        Route("/api/logs", pages.logs),
        Route("/api/importance", pages.importance),
        Route("/api/ledger", pages.ledger),
        Route("/api/act", pages.act, methods=["POST"]),
    ]
    return DashboardGuard(Starlette(routes=routes), keys, options.port, options.host)


class _Pages:
    """The answers of the server."""

    def __init__(self, options: DashboardOptions, keys: Keys, stopping: Callable[[], bool]) -> None:
        self._folders = Folders(options.roots)
        self._read_only = options.read_only
        self._keys = keys
        self._stopping = stopping
        self._static: dict[str, bytes] = {}

    # -- files --

    async def index(self, request: Request) -> Response:
        page = self._own("index.html").replace(b"VERSION", version("plotly").encode())
        return Response(page, media_type="text/html")

    async def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in (*MODULES, "page.css", "plotly.js"):
            return Response(status_code=404)
        kept = {"Cache-Control": "private, max-age=604800, immutable"} if name == "plotly.js" else None
        return Response(self._own(name), media_type=TYPES[Path(name).suffix], headers=kept)

    def _own(self, name: str) -> bytes:
        if name not in self._static:
            if name == "plotly.js":
                from plotly.offline import get_plotlyjs

                self._static[name] = get_plotlyjs().encode()
            else:
                package = "elastune.report" if name == "page.css" else "elastune.dashboard"
                folder = files(package) if name == "page.css" else files(package).joinpath("static")
                self._static[name] = folder.joinpath(name).read_bytes()
        return self._static[name]

    # -- what is shown --

    async def me(self, request: Request) -> Response:
        return JSONResponse({"token": "" if self._read_only else self._keys.act, "read_only": self._read_only})

    async def list_events(self, request: Request) -> Response:
        async def changes() -> AsyncIterator[dict[str, Any] | None]:
            sent: list[dict[str, Any]] | None = None
            while True:
                folders = self._folders.all()
                for each in folders:
                    if each.look():
                        await asyncio.to_thread(each.advance)
                shown = [each.summary() for each in folders]
                yield {"folders": shown} if shown != sent else None
                sent = shown
                await asyncio.sleep(LIST_S)

        return self._stream(request, changes())

    async def events(self, request: Request) -> Response:
        folder = self._folders.of(request.query_params.get("folder", ""))
        if folder is None:
            return Response(status_code=404)

        async def changes() -> AsyncIterator[dict[str, Any] | None]:
            sent, shown, shown_at, pause = Sent(), None, 0.0, LOOK_S
            while True:
                if folder.look() or shown is None:
                    await asyncio.to_thread(folder.advance)
                now = time.monotonic()
                if folder.state != shown and now >= shown_at + LEAST_S:
                    shown, shown_at, pause = folder.state, now, LOOK_S
                    yield await asyncio.to_thread(folder.event, sent)
                elif folder.state == shown:
                    pause = min(2.0 * pause, QUIET_S)
                    yield None
                else:
                    yield None
                wait = max(pause, shown_at + LEAST_S - time.monotonic())
                await asyncio.sleep(wait if folder.complete else PAUSE_S)

        return self._stream(request, changes())

    def _stream(self, request: Request, changes: AsyncIterator[dict[str, Any] | None]) -> Response:
        """Server-sent events of ``changes``; None is a look without news."""

        async def lines() -> AsyncIterator[str]:
            loop = asyncio.get_running_loop()
            spoke = loop.time()
            async for change in changes:
                if self._stopping() or await request.is_disconnected():
                    return
                if change is not None:
                    spoke = loop.time()
                    yield f"data: {json.dumps(change, separators=(',', ':'), allow_nan=False)}\n\n"
                elif loop.time() - spoke > ALIVE_S:
                    spoke = loop.time()
                    yield ": alive\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def trial(self, request: Request) -> Response:
        folder, number = self._named(request)
        shown = None if folder is None or number is None else await asyncio.to_thread(folder.curves, number)
        return Response(status_code=404) if shown is None else JSONResponse(_finite(shown))

    async def logs(self, request: Request) -> Response:
        folder, number = self._named(request)
        if folder is None:
            return Response(status_code=404)
        return JSONResponse({"logs": await asyncio.to_thread(folder.logs, number)})

    async def importance(self, request: Request) -> Response:
        folder, _ = self._named(request)
        if folder is None:
            return Response(status_code=404)
        return JSONResponse(_finite({"importance": await asyncio.to_thread(folder.importance)}))

    async def ledger(self, request: Request) -> Response:
        folder, _ = self._named(request)
        found = None if folder is None else await asyncio.to_thread(folder.ledger)
        return Response(status_code=404) if found is None else JSONResponse(found)

    def _named(self, request: Request) -> tuple[FollowedFolder | None, int | None]:
        text = request.query_params.get("trial", "")
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        return self._folders.of(request.query_params.get("folder", "")), number

    # -- what is done --

    async def act(self, request: Request) -> Response:
        if self._read_only:
            return _refused("this page is read-only (got a change): start it without --read-only", 403)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LONGEST_ACT:
                return _refused("a change must be short", 413)
        try:
            wanted = json.loads(bytes(body))
        except (ValueError, RecursionError):
            wanted = None
        if not isinstance(wanted, dict) or not isinstance(wanted.get("act"), str):
            return _refused("a change must be a JSON object with an act", 400)
        folder = self._folders.of(str(wanted.pop("folder", "")))
        if folder is None:
            return _refused("a change must be of a folder that the page shows", 404)
        try:
            return JSONResponse(await asyncio.to_thread(_do, folder, wanted.pop("act"), wanted))
        except UserError as error:
            return _refused(str(error), 409)


def _refused(why: str, status: int) -> Response:
    return JSONResponse({"refused": why}, status_code=status)


def _do(folder: FollowedFolder, act: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Ask what runs in ``folder`` to do ``act``, by the same functions as the commands. Raises ``UserError``."""
    if folder.view is None:
        folder.advance()
    if isinstance(folder.view, FollowedStudy):
        from elastune.tuning.study.control.requests import ask_study, request

        if unknown := fields.keys() - FIELDS:
            raise UserError("a request may have a trial, budgets and workers", min(unknown), "leave it out")
        try:
            asked = request(act, BY, **fields)
        except (ValueError, TypeError) as error:
            why = str(error).splitlines()[-1].strip()
            raise UserError("a request must be one that a study knows, within its range", act, why) from None
        answer = ask_study(folder.out, asked)
        return {"seen": answer.seen, "refused": answer.refused}
    if not isinstance(folder.view, FollowedRun):
        raise UserError("a change needs something that runs", folder.name, "wait for its first records")
    if act == "end":
        pid = writer_of(folder.out / JOURNAL)
        if pid is None:
            raise UserError("what is to be ended must run on this machine", folder.name, "elastune ls shows what runs")
        os.kill(pid, signal.SIGINT)  # as elastune stop
        return {"seen": True, "refused": ""}
    from elastune.elastic.wire.contact import ask
    from elastune.elastic.wire.messages import ReshapeAsked, ResizeAsked
    from elastune.tuning.study.control.requests import asker

    workers, mesh = fields.get("workers"), fields.get("mesh")
    if act == "workers" and isinstance(workers, int) and not isinstance(workers, bool) and workers > 0:
        done = ask(folder.out, ResizeAsked(workers, asker(BY)))
    elif act == "reshape" and isinstance(mesh, str):
        from elastune.core.mesh import Mesh

        done = ask(folder.out, ReshapeAsked(str(Mesh.parse(mesh)), asker(BY)))
    else:
        raise UserError("a run takes workers, reshape or end", act, "give workers a number from 1 on, or a mesh")
    return {"seen": True, "refused": "" if done.taken else done.detail, "detail": done.detail}


def _finite(value: Any) -> Any:
    """``value`` with None for numbers that JSON of browsers lacks."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
