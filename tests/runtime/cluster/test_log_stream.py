"""What a worker prints where there is no room for it."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from elastune.runtime.worker import LogFile, log_stream


def opened(path: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(path, "wb"), "ascii")


def test_on_a_full_disk_it_is_left_out() -> None:
    with opened("/dev/full") as full:
        log = log_stream(full)
        print("a line", "x" * 100_000, file=log)
        log.flush()
        log.buffer.write(b"bytes")
        log.flush()


def test_it_is_there_at_once_in_whatever_locale(tmp_path: Path) -> None:
    with opened(str(tmp_path / "log")) as file:
        file.write("before, ")
        log = log_stream(file)
        print("ein Übel", file=log)
        assert (tmp_path / "log").read_bytes() == b"before, ein \\xdcbel\n"


def test_any_other_trouble_is_told() -> None:
    with opened("/dev/full") as file:
        log = LogFile(file)
        os.dup2(os.open("/dev/null", os.O_RDONLY), log.fileno())
        with pytest.raises(OSError, match="Bad file descriptor"):
            log.write(b"nobody can write this")
        os.dup2(os.open("/dev/null", os.O_WRONLY), log.fileno())
