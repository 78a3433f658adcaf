"""Being told in advance: this machine will be taken away. Where such news comes from; each source has a ``poll``."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError

DEFAULT_S = 120.0
POLL_S = 5.0
ANSWER_LIMIT_S = 2.0
CONTENT_LIMIT_BYTES = 1 << 16
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Notice:
    """In ``seconds`` this machine is gone."""

    seconds: float
    why: str


class NoticeSource(Protocol):
    """Something that may tell of a machine's end."""

    def poll(self) -> Notice | None:
        """The notice, once there is one. Never blocks."""
        ...

    def close(self) -> None:
        """Look no more. Idempotent."""
        ...


class FileNotice:
    """A file that appears; what it holds may be the number of seconds that are left."""

    def __init__(self, path: Path, seconds: float = DEFAULT_S) -> None:
        self._path = path
        self._seconds = seconds

    def poll(self) -> Notice | None:
        try:
            with self._path.open("rb") as file:
                text = file.read(CONTENT_LIMIT_BYTES).decode(errors="replace")
        except OSError:
            return None
        return Notice(_seconds(text.strip(), self._seconds), f"{self._path} is there")

    def close(self) -> None:
        """Nothing is open."""


class PolledNotice:
    """A thread calls ``look`` every ``poll_s`` until it returns a notice.

    What ``look`` raises as ``OSError``, ``ValueError`` or as an answer that is no HTTP is no notice.
    """

    def __init__(self, look: Callable[[], Notice | None], poll_s: float = POLL_S) -> None:
        self._look = look
        self._poll_s = poll_s
        self._found: Notice | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def poll(self) -> Notice | None:
        return self._found

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while self._found is None and not self._closed.is_set():
            try:
                self._found = self._look()
            except (OSError, ValueError, http.client.HTTPException):
                self._found = None
            if self._found is None:
                self._closed.wait(self._poll_s)


class UrlNotice(PolledNotice):
    """An endpoint that answers 404 until there is a notice.

    An answer of JSON may name the end: ``{"action": "terminate", "time": "2026-01-31T12:00:00Z"}``; any other is a
    notice of the usual seconds. ``fetch`` returns the answer's body, or None where there is none.
    """

    def __init__(
        self,
        url: str,
        seconds: float = DEFAULT_S,
        *,
        fetch: Callable[[str], bytes | None] | None = None,
        clock: Clock | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        check_address(url, "--notice-url", "http://169.254.169.254/latest/meta-data/spot/instance-action")
        clock, fetch = clock or SystemClock(), fetch or ask

        def look() -> Notice | None:
            answer = fetch(url)
            return None if answer is None else read_notice(answer, clock.wall(), seconds, url)

        super().__init__(look, poll_s)


def check_address(url: str, option: str, example: str) -> None:
    """Raise ``UserError`` where ``url`` is no web address."""
    if not _is_web_address(url):
        raise UserError(f"{option} must be a web address", repr(url), f"such as {example}")


def _is_web_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is none, or half an IPv6 address
        return False
    return known and url.isascii() and url.isprintable() and " " not in url


def ask(url: str, headers: Mapping[str, str] = MappingProxyType({}), *, method: str = "GET") -> bytes | None:
    """The body of an answer with status 200, at most 64 KiB; None for 404 and the like. Never asks a proxy: what is
    said to this machine is said to nobody else.

    Raises:
        OSError: Nobody answers.
        HTTPException: The answer is no HTTP.
    """
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _DIRECTLY.open(request, timeout=ANSWER_LIMIT_S) as answer:
            return bytes(answer.read(CONTENT_LIMIT_BYTES)) if answer.status == 200 else None
    except urllib.error.HTTPError:
        return None


def read_notice(answer: bytes, now: float, seconds: float, source: str) -> Notice:
    """The notice in ``answer``, given ``now`` in seconds since the epoch."""
    try:
        told = json.loads(answer)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        return Notice(seconds, f"{source} tells of it")
    action = " ".join(str(told.get("action", "an end")).split())[:60]
    try:
        at = datetime.fromisoformat(str(told["time"])).timestamp()
    except (KeyError, ValueError, OverflowError):
        return Notice(seconds, f"{source} announces {action}")
    return Notice(max(0.0, at - now), f"{source} announces {action}")


def _seconds(text: str, usual: float) -> float:
    try:
        value = float(text)
    except ValueError:
        return usual
    return value if 0 <= value < float("inf") else usual
