"""Models that are built in files: the values of a plain construction, in the memory of one layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

from elastune.parallel.mechanisms.tensor_storage import is_memory_mapped, let_go, memory_mapped_parameters, take_in

WIDTH, LAYERS = 1024, 24  # 4 MB a layer


class Odd(nn.Module):
    """Draws in every way that programs do: in layers, by hand, over again at the end; ties, buffers, half precision."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width, width, padding_idx=3)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.scale = nn.Parameter(torch.randn(width, width))
        self.half = nn.Linear(width, width, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.orthogonal_(self.layers[0].weight)  # type: ignore[arg-type]
        self.apply(self.draw)
        with torch.no_grad():
            self.scale.mul_(0.5)
            self.scale[2:4] += torch.rand(2, width)

    @staticmethod
    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)


def built(seed: int, width: int, layers: int) -> Odd:
    torch.manual_seed(seed)
    return Odd(width, layers)


def resident_mb(kind: str = "VmHWM") -> float:
    """Of this process, in megabytes; VmHWM: the most since ``clear_refs``."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(kind)) / 1024


def test_values_are_those_of_a_plain_construction(tmp_path: Path) -> None:
    plain, after = built(3, 160, 3), torch.rand(3)
    with memory_mapped_parameters(tmp_path):
        parked, drawn = built(3, 160, 3), torch.rand(3)
    assert torch.equal(after, drawn), "the random stream goes on as it would"
    assert parked.head.weight is parked.embedding.weight
    assert is_memory_mapped(parked.scale)
    assert not is_memory_mapped(parked.norm.weight), "too small"
    states = plain.state_dict(), parked.state_dict()
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert not list(tmp_path.iterdir()), "files without names"
    take_in(parked.scale)
    assert not is_memory_mapped(parked.scale)
    assert torch.equal(parked.scale, plain.scale)


def test_outside_of_it_everything_is_as_before(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), memory_mapped_parameters(tmp_path):
        raise ZeroDivisionError
    assert not hooks._global_parameter_registration_hooks
    assert not is_memory_mapped(nn.Linear(512, 512).weight)


def test_building_takes_the_memory_of_a_layer(tmp_path: Path) -> None:
    """100 MB of parameters; whoever reads a part of them afterwards has that part in memory."""
    built(1, 160, 1)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = resident_mb("VmRSS")
    with memory_mapped_parameters(tmp_path):
        model = built(1, WIDTH, LAYERS)
        for layer in model.layers:
            nn.init.normal_(layer.weight, std=0.02)  # type: ignore[arg-type]
    size = sum(p.nbytes for p in model.parameters()) / 2**20
    assert size > 100
    assert resident_mb() - before < 48, "a layer, and what orthogonal_ needs for itself"
    first = model.layers[5].weight.view(-1)[:4096].clone()  # type: ignore[operator, union-attr]
    assert resident_mb("VmRSS") - before < 24
    for p in model.parameters():
        p.sum()
        let_go(p)
    assert resident_mb() - before < 48
    assert torch.equal(first, model.layers[5].weight.view(-1)[:4096])  # type: ignore[operator, union-attr]
