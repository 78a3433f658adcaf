"""Being told in advance: this machine will be taken away. Where such news comes from; each source has a ``poll``."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError

DEFAULT_S = 120.0
POLL_S = 5.0
ANSWER_LIMIT_S = 2.0
CONTENT_LIMIT_BYTES = 1 << 16


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


class UrlNotice:
    """A metadata endpoint that answers 404 until there is a notice, as those of cloud providers do.

    A thread asks it every few seconds. An answer of JSON may name the end: ``{"action": "terminate", "time":
    "2026-01-31T12:00:00Z"}`` (EC2's spot/instance-action); any other is a notice of the usual seconds. ``fetch``
    returns the answer's body, or None where there is none; what it raises as ``OSError`` is no notice either.
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
        if not _is_web_address(url):
            fix = "such as http://169.254.169.254/latest/meta-data/spot/instance-action"
            raise UserError("--notice-url must be a web address", repr(url), fix)
        self._url = url
        self._seconds = seconds
        self._fetch = fetch or fetch_url
        self._clock = clock or SystemClock()
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
                answer = self._fetch(self._url)
            except (OSError, ValueError, http.client.HTTPException):  # an answer that is no HTTP is none
                answer = None
            if answer is not None:
                self._found = read_notice(answer, self._clock.wall(), self._seconds, self._url)
            else:
                self._closed.wait(self._poll_s)


def _is_web_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is none, or half an IPv6 address
        return False
    return known and url.isascii() and url.isprintable() and " " not in url


def fetch_url(url: str) -> bytes | None:
    """The body of an answer with status 200, at most 64 KiB; None for 404 and the like. Raises ``OSError``."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_LIMIT_S) as answer:
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
