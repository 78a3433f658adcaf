"""Who is refused, and what the server does not show: one server, asked without a browser."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.server import Server
from tests.dashboard.studies import STUDY, begun

from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.records import ActAsked


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: str


@dataclass(frozen=True)
class Client:
    """Asks ``server`` with the headers of a browser that has its cookie, and others instead."""

    server: Server
    cookie: str
    act_token: str

    def ask(self, path: str, method: str = "GET", body: object = None, **headers: str | None) -> Answer:
        own: dict[str, str | None] = {"Host": f"127.0.0.1:{self.server.port}", "Cookie": self.cookie}
        if method == "POST":
            own |= {"Origin": self.server.base, "X-Elastune-Token": self.act_token, "Content-Type": "application/json"}
        own |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        content = body if isinstance(body, str) else None if body is None else json.dumps(body)
        connection.putrequest(method, path, skip_host=True)
        for name, value in own.items():
            if value is not None:
                connection.putheader(name, value)
        if content is not None:
            connection.putheader("Content-Length", str(len(content.encode())))
        connection.endheaders(content.encode() if content is not None else None)
        answer = connection.getresponse()
        is_stream = answer.headers.get_content_type() == "text/event-stream"
        text = answer.readline().decode() if is_stream else answer.read().decode(errors="replace")
        connection.close()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, text)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study, and with links that lead out of it."""
    root = tmp_path_factory.mktemp("guard") / "root"
    for name in ("root/study", "elsewhere"):
        with JournalWriter(root.parent / name / "journal.jsonl") as journal:
            journal.write(STUDY)
            journal.write(begun(0))
    (root / "link").symlink_to(root.parent / "elsewhere")
    (root / "file").mkdir()
    (root / "file" / "journal.jsonl").symlink_to(root.parent / "elsewhere" / "journal.jsonl")
    return root


@pytest.fixture(scope="module")
def client(out: Path) -> Iterator[Client]:
    server = Server(out)
    try:
        visitor = Client(server, "", "")
        entered = visitor.ask(f"/?token={server.token}")
        assert entered.status == 303
        assert "HttpOnly" in entered.headers["set-cookie"]
        assert "SameSite=strict" in entered.headers["set-cookie"]
        cookie = entered.headers["set-cookie"].partition(";")[0]
        me = json.loads(Client(server, cookie, "").ask("/api/me").body)
        yield Client(server, cookie, me["token"])
    finally:
        server.stop()


STOP = {"folder": "study", "act": "stop", "trial": 0}


def asked(out: Path) -> list[str]:
    folder = out / "study" / ".asked"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_the_owner_is_let_in(client: Client, out: Path) -> None:
    page = client.ask("/")
    assert page.status == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; " in policy
    assert "eval" not in policy
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert client.ask("/static/app.js").status == 200
    assert client.ask("/", Host=f"localhost:{client.server.port}").status == 200
    before = asked(out)
    answer = client.ask("/api/act", "POST", STOP)
    assert json.loads(answer.body) == {"seen": False, "refused": ""}
    assert len(asked(out)) == len(before) + 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"Cookie": None}, "open the address"),
    ({"Cookie": "elastune-1=x"}, "open the address"),
    ({"Host": "evil.example:80"}, "no such name"),
    ({"Host": "evil.example"}, "no such name"),
    ({"Host": "127.0.0.1:1"}, "no such name"),
    ({"Host": "10.0.0.1"}, "no such name"),
    ({"Host": None}, ""),
    ({"Host": "a@127.0.0.1"}, "no such name"),
]


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/me", "/api/folders", "/api/events?folder=study"])
@pytest.mark.parametrize(("headers", "why"), REFUSED)
def test_others_see_nothing(client: Client, path: str, headers: dict[str, Any], why: str) -> None:
    answer = client.ask(path, **headers)
    assert answer.status in (400, 403, 421)
    assert why in answer.body
    assert client.act_token not in answer.body
    assert "study" not in answer.body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Cookie": None}, 403),
        ({"Origin": None}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"X_Elastune_Token": None}, 403),
        ({"X_Elastune_Token": "x"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 421),
    ],
)
def test_others_change_nothing(client: Client, out: Path, headers: dict[str, Any], status: int) -> None:
    before = asked(out)
    assert client.ask("/api/act", "POST", STOP, **headers).status == status
    assert asked(out) == before
    assert not [e for e in read(out / "study" / "journal.jsonl") if isinstance(e.record, ActAsked)]


def test_a_wrong_token_is_refused(client: Client) -> None:
    for token in ("", "x", client.server.token[:-1], "%00", "\u00fc".encode().hex()):
        assert client.ask(f"/?token={token}", Cookie=None).status == 403
    assert client.ask("/api/act", "GET").status in (404, 405)
    assert client.ask("/", "PUT").status == 405


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 400),
        ("[]", 400),
        ("[" * 3000, 400),
        ("x" * 5000, 413),
        ({"act": 1}, 400),
        ({"folder": "other", "act": "stop", "trial": 0}, 404),
        ({"folder": "../elsewhere", "act": "stop", "trial": 0}, 404),
        ({"folder": "study", "act": "dance"}, 409),
        ({"folder": "study", "act": "stop"}, 409),
        ({"folder": "study", "act": "stop", "trial": -1}, 409),
        ({"folder": "study", "act": "stop", "trial": 0, "by": "root"}, 409),
        ({"folder": "study", "act": "stop", "trial": 0, "refused": "x" * 3}, 409),
        ({"folder": "study", "act": "budget", "worker_hours": float("nan")}, 409),
        ({"folder": "study", "act": "workers", "workers": "many"}, 409),
    ],
)
def test_rubbish_is_refused(client: Client, out: Path, body: object, status: int) -> None:
    before = asked(out)
    answer = client.ask("/api/act", "POST", body)
    assert answer.status == status
    assert json.loads(answer.body)["refused"]
    assert asked(out) == before


@pytest.mark.parametrize("name", ["link", "file", "..", "../elsewhere", "study/../../elsewhere", "/etc", "", "%2e%2e"])
def test_only_the_named_folders_are_shown(client: Client, name: str) -> None:
    for path in ("events", "trial", "logs"):
        assert client.ask(f"/api/{path}?folder={name}&trial=0").status == 404
    assert client.ask("/static/..%2fguard.py").status == 404
    listed = json.loads(client.ask("/api/folders").body.removeprefix("data: "))
    assert [each["name"] for each in listed["folders"]] == ["study"]


def test_a_read_only_page_changes_nothing(serve: Callable[..., Server], out: Path) -> None:
    server = serve(out, "--read-only")
    cookie = Client(server, "", "").ask(f"/?token={server.token}").headers["set-cookie"].partition(";")[0]
    reader = Client(server, cookie, "")
    assert json.loads(reader.ask("/api/me").body) == {"token": "", "read_only": True}
    before = asked(out)
    assert reader.ask("/api/act", "POST", STOP).status == 403
    assert asked(out) == before
