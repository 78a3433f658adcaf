"""Notices of clouds, from services that speak their documented formats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from elastune.core.errors import UserError
from elastune.runtime.preemption import CLOUDS, CloudNotice, Notice, look_at_aws, look_at_azure, look_at_google

NOON = 1769860800.0  # 2026-01-31T12:00:00Z
ACTION, AWS_TOKEN = "/latest/meta-data/spot/instance-action", "/latest/api/token"
GOOGLE = "/computeMetadata/v1/instance/"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


@dataclass
class Service:
    """Answers by path to who sends ``needs``; 404 to others. ``given``: header and value that a path needs."""

    url: str = ""
    answers: dict[str, bytes] = field(default_factory=dict)
    needs: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def service() -> Iterator[Service]:
    result = Service()

    class Metadata(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            good = self.path == AWS_TOKEN and lifetime.isdigit() and 1 <= int(lifetime) <= 21_600
            self._say(200 if good else 400, b"secret" if good else b"")

        def do_GET(self) -> None:
            allowed = all(self.headers.get(name) == value for name, value in result.needs.items())
            answer = result.answers.get(self.path)
            self._say(401 if not allowed else 404 if answer is None else 200, answer or b"")

        def _say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        result.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield result
        server.shutdown()


def aws(service: Service) -> None:
    service.needs = {"X-aws-ec2-metadata-token": "secret"}


def google(service: Service) -> None:
    service.needs = {"Metadata-Flavor": "Google"}
    service.answers = {f"{GOOGLE}preempted": b"FALSE", f"{GOOGLE}maintenance-event": b"NONE"}


def azure(service: Service) -> None:
    service.needs = {"Metadata": "true"}
    service.answers = {EVENTS: b'{"DocumentIncarnation": 1, "Events": []}', NAME: b"vm-1"}


def event(kind: str, machine: str, before: str) -> bytes:
    text = (
        '{"DocumentIncarnation": 2, "Events": [{"EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123", "EventType": "%s", '
        '"ResourceType": "VirtualMachine", "Resources": ["vm-0", "%s"], "EventStatus": "Scheduled", "NotBefore": "%s", '
        '"Description": "", "EventSource": "Platform", "DurationInSeconds": -1}]}'
    )
    return (text % (kind, machine, before)).encode()


def test_aws_names_the_action_and_its_time_to_who_has_a_token(service: Service) -> None:
    aws(service)
    assert look_at_aws(service.url, NOON) is None
    service.answers[ACTION] = b'{"action": "terminate", "time": "2026-01-31T12:02:00Z"}'
    assert look_at_aws(service.url, NOON) == Notice(120.0, "AWS announces terminate")
    service.answers[ACTION] = b"<html>"
    with pytest.raises(ValueError, match="JSON"):
        look_at_aws(service.url, NOON)


def test_google_names_preemptions_and_maintenance_that_ends_the_machine(service: Service) -> None:
    google(service)
    assert look_at_google(service.url, NOON) is None
    service.answers[f"{GOOGLE}maintenance-event"] = b"MIGRATE_ON_HOST_MAINTENANCE"  # it goes on elsewhere
    assert look_at_google(service.url, NOON) is None
    service.answers[f"{GOOGLE}maintenance-event"] = b"TERMINATE_ON_HOST_MAINTENANCE\n"
    result = look_at_google(service.url, NOON)
    assert result is not None
    assert result.seconds == 60.0
    service.answers[f"{GOOGLE}preempted"] = b"TRUE"
    assert look_at_google(service.url, NOON) == Notice(30.0, "Google announces a preemption")


@pytest.mark.parametrize(
    ("kind", "machine", "before", "seconds"),
    [
        ("Preempt", "vm-1", "Sat, 31 Jan 2026 12:00:30 GMT", 30.0),
        ("Terminate", "vm-1", "Sat, 31 Jan 2026 12:05:00 GMT", 300.0),
        ("Reboot", "vm-1", "", 30.0),
        ("Preempt", "vm-1", "Sat, 31 Jan 2026 11:00:00 GMT", 0.0),
        ("Freeze", "vm-1", "Sat, 31 Jan 2026 12:00:30 GMT", None),
        ("Preempt", "vm-2", "Sat, 31 Jan 2026 12:00:30 GMT", None),
    ],
)
def test_azure_lists_events_of_all_machines(
    service: Service, kind: str, machine: str, before: str, seconds: float | None
) -> None:
    azure(service)
    assert look_at_azure(service.url, NOON) is None
    service.answers[EVENTS] = event(kind, machine, before)
    result = look_at_azure(service.url, NOON)
    assert (result.seconds if result else None) == seconds


@pytest.mark.parametrize(("name", "prepare"), [("aws", aws), ("google", google), ("azure", azure)])
def test_a_service_is_asked_until_it_tells(service: Service, name: str, prepare: Callable[[Service], None]) -> None:
    prepare(service)
    source = CloudNotice(f"{name}={service.url}/", poll_s=0.01)
    try:
        time.sleep(0.05)
        assert source.poll() is None
        service.answers |= {
            ACTION: b'{"action": "stop", "time": "2026-01-31T12:02:00Z"}',
            f"{GOOGLE}preempted": b"TRUE",
            EVENTS: event("Preempt", "vm-1", "Sat, 31 Jan 2026 12:00:30 GMT"),
        }
        until = time.monotonic() + 20.0
        while (result := source.poll()) is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert result.why.lower().startswith(f"{name} announces")
    finally:
        source.close()


@pytest.mark.parametrize("name", list(CLOUDS))
def test_a_service_that_says_something_else_is_told_at_once(service: Service, name: str) -> None:
    service.needs = {"never": "sent"}
    service.answers = {ACTION: b"{}"}
    if name == "aws":
        service.needs = {"X-aws-ec2-metadata-token": "secret"}
    with pytest.raises(UserError, match=f"the metadata service of {name} must answer"):
        CloudNotice(f"{name}={service.url}")


@pytest.mark.parametrize("text", ["", "oracle", "aws=ftp://x", "aws=http://a b"])
def test_what_is_no_cloud_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match="--notices"):
        CloudNotice(text)
