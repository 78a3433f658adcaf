"""What doctor finds, against what is really there."""

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from elastune.cli.commands.checks import _reductions, memory_gib

Command = Callable[..., Any]


def test_doctor_tells_what_is_here(elastune: Command) -> None:
    said = elastune("doctor", "--json")
    assert said.code == 0
    found = said.json
    findings = {finding["what"]: finding for finding in found["findings"]}
    assert 1 <= found["cores"] <= len(os.sched_getaffinity(0))
    assert (found["devices"] == ["cpu"]) == (not torch.cuda.is_available())
    assert findings["torch"]["value"] == torch.__version__
    assert findings["gloo"]["value"]
    assert ("nccl" in findings["reductions"]["value"]) == (torch.cuda.device_count() > 1)
    assert findings["Slurm"]["value"] == shutil.which("srun")
    assert Path(findings["digits"]["value"]).is_file()
    assert findings["mechanism tensor"]["value"] == "exact and fast; divides along tensor; workers come and go"
    assert findings["mechanism replicated"]["value"] == "exact and fast; workers come and go"
    for name in ("deepspeed", "fairscale"):
        here = findings[f"mechanism {name}"]
        assert (here["value"] is None) == (find_spec(name) is None)
        assert "pip install" in here["install"]
        assert here["value"] is None or "ZeRO stages" in here["value"]
    assert findings["MNIST"]["value"] is None, "the fixture hides every data set"
    for finding in found["findings"]:
        assert finding["value"] or finding["install"], "what is missing comes with a way to get it"


@pytest.mark.parametrize(
    ("gpus", "nccl", "said"),
    [
        ((), False, "gloo: workers run on CPU"),
        (("cuda:0",), True, "gloo, over CPU memory, for several workers on the one GPU"),
        (("cuda:0", "cuda:1"), False, "gloo, over CPU memory: this torch has no NCCL"),
        (("cuda:0", "cuda:1"), True, "nccl for at most 2 workers, one a GPU; gloo, over CPU memory, for more"),
    ],
)
def test_doctor_says_over_what_workers_would_reduce(gpus: tuple[str, ...], nccl: bool, said: str) -> None:
    assert _reductions(gpus, nccl=nccl) == said


def test_doctor_looks_into_the_data_folder(here: Path, elastune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (here / f"{part}-ubyte.gz").touch()
    monkeypatch.setenv("ELASTUNE_DATA", str(here))
    findings = {finding["what"]: finding for finding in elastune("doctor", "--json").json["findings"]}
    assert findings["MNIST"]["value"] == str(here)


def test_doctor_for_people(elastune: Command) -> None:
    said = elastune("doctor")
    assert said.code == 0
    (line,) = [line for line in said.out.splitlines() if line.startswith("MNIST")]
    assert "missing" in line
    assert "ELASTUNE_DATA" in said.out


def test_memory_heeds_the_control_group(tmp_path: Path) -> None:
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text(f"{1 << 30}\n")
    assert memory_gib(tmp_path) == 1.0
    limit.write_text("max\n")
    assert memory_gib(tmp_path) == memory_gib()
