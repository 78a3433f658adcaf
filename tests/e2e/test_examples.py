"""Examples train, as a user runs them, to what they promise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_recurrent_network_reads_digits_alike_on_one_and_two_workers(
    tmp_path: Path, command_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    def trained(workers: int) -> dict[str, Any]:
        out = tmp_path / str(workers)
        said = command_here("run", "examples/rows.py", "--workers", workers, "--json", "--out", out)
        assert said.code == 0, said.err
        return dict(said.json)

    one, two = trained(1), trained(2)
    assert one["metrics"]["accuracy"] > 0.9
    assert one["sha256"] == two["sha256"]
