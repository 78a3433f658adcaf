"""The README's plain loop and its diff: few lines, and the same losses."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elastune.core.run import ExecutionSettings, derive
from elastune.train.rng import seed_everything

README = Path(__file__).parents[2] / "README.md"
MOST_ADDED = 5


def test_five_lines_make_a_plain_loop_a_program_that_trains_to_the_same(
    tmp_path: Path,
) -> None:
    (diff,) = re.findall(r"```diff\n(-def train.*?)```", README.read_text(), re.DOTALL)
    lines = diff.splitlines()
    added = [line for line in lines if line.startswith("+")]
    assert len(added) <= MOST_ADDED
    path = tmp_path / "program.py"
    losses: list[float] = []

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def cross_entropy(*given: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(*given)
        losses.append(float(loss.detach()))
        return loss

    def trained(sign: str, *given: Any) -> list[float]:
        """Run the lines of one side, in the data's order: each side would shuffle by a stream of its own."""
        own = [line[1:] for line in lines if line[:1] in (sign, " ")]
        path.write_text("\n".join(own).replace("shuffle=True", "shuffle=False") + "\n")
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        x = torch.arange(1200.0).reshape(200, 6).sin()
        module.Net, module.torch, module.DataLoader = net, torch, DataLoader
        module.F, module.train_set = SimpleNamespace(cross_entropy=cross_entropy), TensorDataset(x, x.argmax(1) % 3)
        spec.loader.exec_module(module)
        losses.clear()
        module.train(*given)
        return list(losses)

    session = lone_session(tmp_path / "out", execution=ExecutionSettings(num_slots=1))
    with_session = trained("+", session)
    seed_everything(derive(session.seed, "init"))
    assert with_session == pytest.approx(trained("-"), abs=1e-6)
    assert len(with_session) == 3 * 4
