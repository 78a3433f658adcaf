"""Preemption notices: how a machine learns that it will be taken away. Each source of notices has a ``poll``.

A notice comes from a file, from a URL, or from the metadata service of a cloud in its documented format. AWS: EC2's
``spot/instance-action`` (404 until two minutes before), with a session token (IMDSv2). Google: Compute Engine's
``preempted`` (TRUE 30 s before) and ``maintenance-event``. Azure: ``scheduledevents`` of the machine itself; the
service lists those of its neighbours, too.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Protocol

from pydantic import BeforeValidator, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError

DEFAULT_S = 120.0
POLL_S = 5.0
ANSWER_LIMIT_S = 2.0
CONTENT_LIMIT_BYTES = 1 << 16
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Notice:
    """This machine will be taken away in ``seconds``, for the reason ``why``."""

    seconds: float
    why: str


class NoticeSource(Protocol):
    """A source of notices that this machine will be taken away."""

    def poll(self) -> Notice | None:
        """Return the notice, or None as long as there is none. Never blocks."""
        ...

    def close(self) -> None:
        """Stop watching. Idempotent."""
        ...


class FileNotice:
    """Takes the appearance of a file as a notice. The file may hold the number of seconds that are left."""

    def __init__(self, path: Path, seconds: float = DEFAULT_S) -> None:
        self._path = path
        self._seconds = seconds

    def poll(self) -> Notice | None:
        try:
            with self._path.open("rb") as file:
                text = file.read(CONTENT_LIMIT_BYTES).decode(errors="replace")
        except OSError:
            return None
        return Notice(_seconds(text.strip(), self._seconds), f"{self._path} has appeared")

    def close(self) -> None:
        """Do nothing: no file is open."""


class PolledNotice:
    """Calls a function in a thread until it returns a notice.

    ``OSError``, ``ValueError`` and an invalid HTTP answer count as no notice.

    Args:
        look: The function.
        poll_s: The time between two calls.
    """

    def __init__(self, look: Callable[[], Notice | None], poll_s: float = POLL_S) -> None:
        self._look = look
        self._poll_s = poll_s
        self._notice: Notice | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def poll(self) -> Notice | None:
        return self._notice

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while self._notice is None and not self._closed.is_set():
            try:
                self._notice = self._look()
            except (OSError, ValueError, http.client.HTTPException):
                self._notice = None
            if self._notice is None:
                self._closed.wait(self._poll_s)


class UrlNotice(PolledNotice):
    """Polls an endpoint that answers 404 until it has a notice.

    An answer in JSON may name the end: ``{"action": "terminate", "time": "2026-01-31T12:00:00Z"}``. Any other answer is
    a notice of the usual seconds.

    Args:
        url: The endpoint.
        seconds: The usual seconds.
        fetch: Returns the body of an answer, or None for 404.
        clock: The clock.
        poll_s: The time between two requests.
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
    """Raise ``UserError`` if ``url`` is not a web address."""
    if not _is_web_address(url):
        raise UserError(f"{option} must be a web address", repr(url), f"such as {example}")


def _is_web_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as an invalid port, or half an IPv6 address
        return False
    return valid and url.isascii() and url.isprintable() and " " not in url


def ask(url: str, headers: Mapping[str, str] = MappingProxyType({}), *, method: str = "GET") -> bytes | None:
    """Return the body of an answer with status 200, at most 64 KiB; None for another status.

    The request never goes through a proxy, because the answer is for this machine alone.

    Raises:
        OSError: If no server answers.
        HTTPException: If the answer is not HTTP.
    """
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _DIRECTLY.open(request, timeout=ANSWER_LIMIT_S) as answer:
            return bytes(answer.read(CONTENT_LIMIT_BYTES)) if answer.status == 200 else None
    except urllib.error.HTTPError:
        return None


def read_notice(answer: bytes, now: float, seconds: float, source: str) -> Notice:
    """Return the notice in ``answer``. ``now``: in seconds since 1970; ``seconds``: if the answer names no time."""
    try:
        payload = json.loads(answer)
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict):
        return Notice(seconds, f"{source} announces it")
    action = " ".join(str(payload.get("action", "an end")).split())[:60]
    try:
        at = datetime.fromisoformat(str(payload["time"])).timestamp()
    except (KeyError, ValueError, OverflowError):
        return Notice(seconds, f"{source} announces {action}")
    return Notice(max(0.0, at - now), f"{source} announces {action}")


def _seconds(text: str, usual: float) -> float:
    try:
        value = float(text)
    except ValueError:
        return usual
    return value if 0 <= value < float("inf") else usual


# --- the metadata services of clouds ---

Look = Callable[[str, float], Notice | None]
"""Takes the service's address and the time in seconds since 1970, and returns the notice, if there is one. Raises
``OSError`` if the service does not answer, ``ValueError`` for an answer that is not documented."""
AWS_TOKEN_S = 21_600
GOOGLE_PREEMPTED_S, GOOGLE_MAINTENANCE_S = 30.0, 60.0
AZURE_LEAST_S = 30.0  # of a preemption
AZURE_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")  # a Freeze is over in seconds


def look_at_aws(base: str, now: float) -> Notice | None:
    """EC2: ``{"action": "terminate", "time": "2026-01-31T12:02:00Z"}``."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_S)}
    token = ask(f"{base}/latest/api/token", lifetime, method="PUT")
    if token is None:
        raise OSError("no session token")
    reply = ask(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token.decode("ascii")})
    if reply is None:
        return None
    event = _AWS.validate_json(reply)
    return Notice(_left(event.time.timestamp(), now), f"AWS announces {event.action}")


def look_at_google(base: str, now: float) -> Notice | None:
    """Compute Engine: TRUE or FALSE; NONE, MIGRATE_ON_HOST_MAINTENANCE or TERMINATE_ON_HOST_MAINTENANCE."""
    instance, header = f"{base}/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
    preempted = ask(f"{instance}/preempted", header)
    if preempted is None:
        raise OSError("it does not answer whether this machine is preempted")
    if preempted.strip() == b"TRUE":
        return Notice(GOOGLE_PREEMPTED_S, "Google announces a preemption")
    if (ask(f"{instance}/maintenance-event", header) or b"").strip() == b"TERMINATE_ON_HOST_MAINTENANCE":
        return Notice(GOOGLE_MAINTENANCE_S, "Google announces maintenance that ends this machine")
    return None


def look_at_azure(base: str, now: float) -> Notice | None:
    """``{"Events": [{"EventType": "Preempt", "Resources": ["vm"], "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"}]}``."""
    header = {"Metadata": "true"}
    events = ask(f"{base}/metadata/scheduledevents?api-version=2020-07-01", header)
    if events is None:
        raise OSError("it lists no scheduled events")
    ends = [event for event in _AZURE.validate_json(events).Events if event.EventType in AZURE_ENDS]
    if not ends:
        return None
    reply = ask(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", header)
    if reply is None:
        raise OSError("no name of this machine")
    name = reply.decode().strip()
    for event in ends:
        if name in event.Resources:
            seconds = AZURE_LEAST_S if event.NotBefore is None else _left(event.NotBefore.timestamp(), now)
            return Notice(seconds, f"Azure announces {event.EventType}")
    return None


@dataclass(frozen=True)
class Cloud:
    """A cloud's metadata service: the function that reads it, and its address."""

    look: Look
    address: str


CLOUDS: Mapping[str, Cloud] = {
    "aws": Cloud(look_at_aws, "http://169.254.169.254"),
    "google": Cloud(look_at_google, "http://metadata.google.internal"),
    "azure": Cloud(look_at_azure, "http://169.254.169.254"),
}


class CloudNotice(PolledNotice):
    """Asks the metadata service that ``text`` names: ``aws``, ``google`` or ``azure``; ``=URL`` where it is elsewhere.

    Raises ``UserError`` for another name, and where the service does not answer now: no notice would ever come.
    """

    def __init__(self, text: str, *, clock: Clock | None = None, poll_s: float = POLL_S) -> None:
        name, _, address = text.partition("=")
        cloud, clock = CLOUDS.get(name), clock or SystemClock()
        if cloud is None:
            raise UserError("--notices names a cloud", text, f"use one of {', '.join(CLOUDS)}, or NAME=URL")
        base = (address or cloud.address).rstrip("/")
        check_address(base, "--notices NAME=URL", cloud.address)

        def look() -> Notice | None:
            return cloud.look(base, clock.wall())

        try:
            look()
        except (OSError, ValueError, HTTPException) as error:
            value = f"{base}: {' '.join(str(error).split())[:200]}"
            fix = "use the cloud that this machine is of, or leave --notices out"
            raise UserError(f"the metadata service of {name} must answer", value, fix) from None
        super().__init__(look, poll_s)


def _left(at: float, now: float) -> float:
    return max(0.0, at - now)


def _http_date(value: Any) -> Any:
    """Read one of Azure's dates, which have the form of HTTP; an event that has begun has no date."""
    if value == "":
        return None
    return parsedate_to_datetime(value).astimezone(UTC) if isinstance(value, str) else value


@checked(frozen=True)
class _InstanceAction:
    action: str
    time: datetime


@checked(frozen=True)
class _ScheduledEvent:
    EventType: str
    Resources: tuple[str, ...] = ()
    NotBefore: Annotated[datetime | None, BeforeValidator(_http_date)] = None


@checked(frozen=True)
class _ScheduledEvents:
    Events: tuple[_ScheduledEvent, ...] = ()


_AWS, _AZURE = TypeAdapter(_InstanceAction), TypeAdapter(_ScheduledEvents)
