"""NCCL groups on one GPU. What needs two is in ``test_backend.py``, beside what fakes can show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def told(what: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("nccl_here.py")), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_communicator_of_one_reduces_is_given_up_and_made_again() -> None:
    result = told("alone")
    assert result["collectives"] == dict.fromkeys(("all_to_all", "all_gather", "all_reduce", "broadcast"), True)
    assert result["abandoned"] == "the group was abandoned"
    assert result["drained"]
    assert len(result["formed_s"]) == 5
    assert result["sum"] == 1.0


def test_nccl_refuses_two_workers_on_one_gpu() -> None:
    """Which is why ``comm.backend`` takes gloo there."""
    for why in told("shared")["told"]:
        assert why not in ("formed", "neither formed nor refused")
