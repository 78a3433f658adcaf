from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.runtime.preemption import FileNotice, Notice, UrlNotice, read_notice

NOON = 1769860800.0  # 2026-01-31T12:00:00Z


def until_found(source: UrlNotice, limit_s: float = 5.0) -> Notice:
    deadline = time.monotonic() + limit_s
    while (found := source.poll()) is None:
        assert time.monotonic() < deadline, "no notice"
        time.sleep(0.005)
    return found


@pytest.mark.parametrize(
    ("text", "seconds"), [("30\n", 30.0), ("", 7.0), ("soon", 7.0), ("-3", 7.0), ("nan", 7.0), ("inf", 7.0)]
)
def test_a_file_that_appears(tmp_path: Path, text: str, seconds: float) -> None:
    source = FileNotice(tmp_path / "notice", 7.0)
    assert source.poll() is None
    (tmp_path / "notice").write_text(text)
    assert source.poll() == Notice(seconds, f"{tmp_path / 'notice'} has appeared")


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (b'{"action": "terminate", "time": "2026-01-31T12:02:00Z"}', 120.0),
        (b'{"action": "terminate", "time": "2026-01-31T11:00:00Z"}', 0.0),
        (b'{"action": "stop"}', 9.0),
        (b'{"time": "tomorrow"}', 9.0),
        (b"[1]", 9.0),
        (b"\xff", 9.0),
        (b"TRUE", 9.0),
    ],
)
def test_answers_of_endpoints(answer: bytes, seconds: float) -> None:
    assert read_notice(answer, NOON, 9.0, "http://x").seconds == pytest.approx(seconds)


def test_an_endpoint_is_asked_until_it_answers() -> None:
    answers: list[bytes | OSError | None] = [None, OSError("refused"), None, b"TRUE"]

    def fetch(url: str) -> bytes | None:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    source = UrlNotice("http://host/notice", 4.0, fetch=fetch, poll_s=0.01)
    assert until_found(source) == Notice(4.0, "http://host/notice announces it")
    assert answers == []


def test_a_real_server_says_404_and_then_an_end() -> None:
    there = threading.Event()

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if there.is_set() else 404)
            self.end_headers()
            self.wfile.write(b'{"action": "terminate"}')

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        source = UrlNotice(f"http://127.0.0.1:{server.server_port}/", poll_s=0.01)
        try:
            time.sleep(0.05)
            assert source.poll() is None
            there.set()
            assert until_found(source).why.endswith("announces terminate")
        finally:
            source.close()
            server.shutdown()


def test_an_address_is_of_the_web() -> None:
    with pytest.raises(UserError, match="http://"):
        UrlNotice("file:///etc/passwd")
