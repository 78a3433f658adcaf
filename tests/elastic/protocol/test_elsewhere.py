"""Where the next controller is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.elastic.wire import contact as elsewhere
from elastune.elastic.wire.contact import ControllerLocator, at_host


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "LOOK_S", 0.0)


def test_it_is_where_it_was_until_the_file_says_another_host(tmp_path: Path) -> None:
    file = tmp_path / "controller.json"
    where = ControllerLocator("10.0.0.1:70", str(file))
    assert where.now == "10.0.0.1:70"
    file.write_text('{"name": "elastune-0123abcd", "address": "10.0.0.9", "port": 71}')
    assert where.now == "10.0.0.9:70", "each of those who listen has a port of its own"
    file.write_text('{"address": "fd00::9"}')
    assert where.now == "[fd00::9]:70"
    file.unlink()
    assert where.now == "[fd00::9]:70"
    assert ControllerLocator("10.0.0.1:70").now == "10.0.0.1:70"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "\x00", '{"address": 7}', '{"address": "n2"'),
        *(f'{{"address": "{host}"}}' for host in ("", "a b", "a/b", "..", ".n2", "n" * 64, "\\ud800")),
    ],
)
def test_what_a_file_should_not_say_changes_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    assert ControllerLocator("n1:70", str(tmp_path / "file")).now == "n1:70"
    assert ControllerLocator("n1:70", str(tmp_path)).now == "n1:70"


def test_the_file_is_looked_at_once_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "LOOK_S", 60.0)
    where = ControllerLocator("n1:70", str(tmp_path / "file"))
    assert where.now == "n1:70"
    (tmp_path / "file").write_text('{"address": "n2"}')
    assert where.now == "n1:70"


def test_a_port_at_another_host() -> None:
    assert at_host("[fd00::1]:70", "10.0.0.1") == "10.0.0.1:70"
    assert at_host("10.0.0.1:70", "fd00::1") == "[fd00::1]:70"
