"""Checkpoints of torch.distributed.checkpoint: what torch reads of ours, and what runs begin with of torch's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.parity.programs.large import Stack
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.checkpoint import complete, load
from elastune.train.checkpoints.export import export_run, read_dcp

PROGRAM = Path(__file__).parent / "programs" / "large.py"
SIZE = {"width": 64, "layers": 4}


def stack() -> tuple[Stack, torch.optim.SGD]:
    model = Stack(64, 4, again=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ran(cluster: LocalCluster, out: Path, execution: dict[str, Any], from_dcp: Path | None = None) -> dict[str, Any]:
    """The state of the model when a run ended."""
    run_job(
        RunSpec(
            Program(PROGRAM),
            out,
            dict(SIZE),
            execution=ExecutionSettings(**{"num_slots": 4, **execution}),
            from_dcp=from_dcp,
        ),
        cluster=cluster,
    )
    return dict(load(complete(out / "checkpoints")[-1]).states["model"])


def test_torch_reads_what_is_exported_and_runs_begin_with_it(cluster: LocalCluster, tmp_path: Path) -> None:
    """From three workers' pieces; the run that begins with it is the same under any mechanism."""
    state = ran(cluster, tmp_path / "run", {"mechanism": "sharded", "workers": 3})
    assert len(export_run(tmp_path / "run", tmp_path / "dcp", tmp_path / "model.safetensors")) == 2
    model, optimizer = stack()
    results = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(results, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=results["model"], optim_state_dict=results["optimizer"])
    alone = load_file(tmp_path / "model.safetensors")
    assert list(alone) == list(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
        assert torch.equal(alone[name], state[name]), name
    kept = load(complete(tmp_path / "run" / "checkpoints")[-1]).states["optimizer"]["state"]
    for name, p in model.named_parameters():
        assert torch.equal(optimizer.state[p]["momentum_buffer"], kept[name]["momentum_buffer"]), name
    begun = [
        ran(cluster, tmp_path / str(i), execution, tmp_path / "dcp")
        for i, execution in enumerate(({"workers": 1}, {"mechanism": "zero", "workers": 2}))
    ]
    for name, value in begun[0].items():
        assert torch.equal(value, begun[1][name]), name
        assert not torch.equal(value, state[name]), "it went on from there"


def test_what_is_no_plain_index_is_refused(tmp_path: Path) -> None:
    """And nothing of it is run."""
    with pytest.raises(UserError, match="No such file"):
        read_dcp(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(UserError, match=r"builtins\.print is nothing of an index"):
        read_dcp(tmp_path)


def test_weights_of_another_model_are_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    dcp.save({"model": torch.nn.Linear(3, 3).state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(Exception, match="weights fit a model of the same names and shapes"):
        ran(cluster, tmp_path / "run", {"workers": 1}, tmp_path / "dcp")
