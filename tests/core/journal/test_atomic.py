"""Files that are whole or not there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from elastune.core.journal.files import atomic_write


def test_a_file_is_made_and_replaced_with_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old and longer")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_its_mode_is_what_was_asked_for_less_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic_write(tmp_path / "open", b"")
        atomic_write(tmp_path / "secret", b"", mode=0o600)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("open", "secret")] == [0o640, 0o600]


def test_whoever_has_it_open_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")
    with path.open("rb") as file:
        atomic_write(path, b"new")
        assert file.read() == b"old"


def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def refuse(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "nowhere" / "file", b"new")
