from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.members_kit import begun, coordinating, eventually, let_in, members

from elastune.core.errors import UserError
from elastune.elastic.wire import contact as client
from elastune.elastic.wire.contact import CONTACT_NAME, ask, left_behind, read_contact, remove_contact, write_contact
from elastune.elastic.wire.messages import ResizeAsked
from elastune.elastic.wire.transport import dial, split_address


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_run_is_resized_from_its_folder(tmp_path: Path) -> None:
    with coordinating(2, high=4) as coordinator, members(coordinator, 0, 1) as result:
        write_contact(tmp_path, coordinator.address, coordinator.token)
        begun(result)
        eventually(lambda: coordinator.members == [0, 1])
        coordinator.capacity(2)
        answer = ask(tmp_path, ResizeAsked(3, "by hand"))
        assert (answer.taken, answer.detail, answer.members) == (True, "from 2 to 3 workers", [0, 1])
        assert eventually(coordinator.take)[0].workers == (2,)


def test_the_contact_is_its_owners_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_contact(tmp_path, "127.0.0.1:1", "secret")
        write_contact(tmp_path, "127.0.0.1:2", "secret")
    finally:
        os.umask(old)
    assert [path.name for path in tmp_path.iterdir()] == [CONTACT_NAME]
    assert stat.S_IMODE((tmp_path / CONTACT_NAME).stat().st_mode) == 0o600
    assert read_contact(tmp_path).address == "127.0.0.1:2"
    remove_contact(tmp_path)
    remove_contact(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["nothing/here", "file", "."])
def test_what_does_not_run(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="the run must be running"):
        ask(tmp_path / folder, ResizeAsked(3))


def test_a_run_that_ended_without_a_word(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "DIAL_LIMIT_S", 0.2)
    write_contact(tmp_path, address(listener), "secret")
    listener.close()
    with pytest.raises(UserError, match="the run must be running"):
        ask(tmp_path, ResizeAsked(3))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"address": "127.0.0.1:1"}', '{"address": 1, "token": "x"}', "\x00\xff" * 5000,
     '{"address": "127.0.0.1:1", "token": "x", "more": 1}', '{"address": "here", "token": "x", "grace_s": 9.0}'],
)  # fmt: skip
def test_rubbish_in_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / CONTACT_NAME).write_text(text)
    for asking in (lambda: ask(tmp_path, ResizeAsked(3)), lambda: left_behind(tmp_path)):  # resize, and --resume
        with pytest.raises(UserError, match="must hold the address") as error:
            asking()
        assert error.value.fix.startswith("remove that file")
    (tmp_path / CONTACT_NAME).unlink()
    assert left_behind(tmp_path) is None, "done as told"


@pytest.mark.parametrize(
    "address",
    [
        "here",
        ":5",
        "host:",
        "host:x",
        "host:70000",
        "host:²",
        "[::1:5",
        "::1]:5",
        "[::1]",
        "[]:5",
        "[host]:5",
        "[[::1]]:5",
    ],
)
def test_an_address_that_is_none(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match="HOST:PORT") as error:
        dial(address, 60.0)
    assert address in str(error.value)
    assert time.monotonic() - began < 10, "nobody is called there"


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("host:5", "host"),
        ("127.0.0.1:5", "127.0.0.1"),
        ("[::1]:5", "::1"),
        ("::1:5", "::1"),
        ("[fe80::1%e0]:5", "fe80::1%e0"),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, host: str) -> None:
    assert split_address(address) == (host, 5)


def test_a_file_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match="by its owner only"):
        ask(tmp_path, ResizeAsked(3))


def test_a_token_of_another_run(tmp_path: Path) -> None:
    with coordinating(1) as coordinator:
        write_contact(tmp_path, coordinator.address, "0" * 32)
        with pytest.raises(UserError, match="the run must be running"):
            ask(tmp_path, ResizeAsked(3))


@pytest.mark.parametrize("answer", [b"rubbish\n", b'{"kind":"bye"}\n', b"x" * (2 << 20), None])
def test_a_stranger_at_the_address(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setattr(client, "ANSWER_LIMIT_S", 0.3)
    over = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            let_in(connection, "secret")
            if answer is not None:
                connection.sendall(answer)
            over.wait(10)

    thread = threading.Thread(target=serve)
    thread.start()
    write_contact(tmp_path, address(listener), "secret")
    try:
        with pytest.raises(UserError, match="a run must answer"):
            ask(tmp_path, ResizeAsked(3))
    finally:
        over.set()
        thread.join()
