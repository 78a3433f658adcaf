from __future__ import annotations

from pathlib import Path

import pytest

from elastune.core.run import Program


@pytest.fixture
def tiny() -> Program:
    return Program(Path(__file__).parent / "programs" / "tiny.py")


@pytest.fixture
def program(tmp_path: Path):
    """Writes a program."""

    def write(text: str, name: str = "mine.py") -> Program:
        path = tmp_path / name
        path.write_text(text)
        return Program(path)

    return write
