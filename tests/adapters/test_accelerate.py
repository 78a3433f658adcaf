"""A script written for Accelerate: the same bits on any workers, whoever dies; the losses of Accelerate itself."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.elastic_runs import Ran, Runs
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from elastune.adapters.accelerate import Accelerator
from elastune.core.errors import UserError
from elastune.core.run import Program, derive
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.program.load import in_session

PROGRAMS = Path(__file__).parent / "programs"
SEED = 3  # of Runs


@pytest.fixture
def runs(cluster: LocalCluster, tmp_path: Path) -> Runs:
    return Runs(cluster, tmp_path, Program(PROGRAMS / "accelerated_disturbed.py"))


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Runs(cluster, tmp_path_factory.mktemp("alone"), Program(PROGRAMS / "accelerated_disturbed.py"))(1)


def test_a_script_comes_to_the_same_though_workers_die_in_a_step_and_in_an_evaluation(
    runs: Runs, undisturbed: Ran
) -> None:
    three = runs(3, faults=["kill 1 3 loss", "kill 2 5 loss"])
    assert three.lost == [1, 2]
    assert three.sha256 == undisturbed.sha256
    assert three.reports == undisturbed.reports
    assert three.ledger.exact


def test_a_resumed_script_repeats_nothing(runs: Runs, undisturbed: Ran, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = runs(2, out=out, spec={"max_steps": 7})
    assert first.reports[0] == undisturbed.reports[0]
    again = runs(1, out=out, spec={"resume": True})
    assert again.sha256 == undisturbed.sha256
    assert again.reports == undisturbed.reports[1:]


def test_it_trains_as_accelerate_does(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"num_epochs": 2, "lr": 0.02, "batch_size": 10, "gradient_accumulation_steps": 2, "seed": 1}
    settings |= {"dropout": 0.0, "in_order": True, "output_dir": ""}
    spec = importlib.util.spec_from_file_location("accelerated_itself", PROGRAMS / "accelerated.py")
    assert spec is not None
    assert spec.loader is not None
    itself = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_ITSELF", "1")
        spec.loader.exec_module(itself)
    assert itself.Accelerator.__module__.startswith("accelerate.")
    monkeypatch.setattr(itself, "set_seed", lambda seed: torch.manual_seed(derive(SEED, "init")))
    told = itself.training_function(Namespace(**settings))
    ours = Runs(cluster, tmp_path, Program(PROGRAMS / "accelerated.py"))(2, **settings)
    assert [report["loss"] for report in ours.reports] == pytest.approx(told, abs=1e-5)


def test_a_script_is_run_and_tuned_by_the_command_line(command_here: Any, tmp_path: Path) -> None:
    program, out = PROGRAMS / "accelerated_tuned.py", tmp_path / "run"
    settings = ["--set", "lr=0.02", "--set", "num_epochs=2", "--slots", "4"]
    ran = command_here("run", program, "--workers", 2, *settings, "--out", out, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["steps"] == 2 * 5
    other = command_here("run", program, "--workers", 1, *settings, "--out", tmp_path / "other", "--json")
    assert ran.json["sha256"] == other.json["sha256"]
    assert ran.json["metrics"] == other.json["metrics"]
    again = command_here("run", program, *settings, "--set", "lr=0.03", "--out", out, "--resume", "--json")
    assert "lr" in again.line or "config" in again.line
    tuned = command_here("tune", program, "--trials", 3, "--sampler", "random", "--out", tmp_path / "study", "--json")
    assert tuned.code == 0, tuned.err
    assert tuned.json["trials"] == {"complete": 3}
    best = max(tuned.json["front"], key=lambda trial: trial["values"]["accuracy"])
    assert 0.5 < best["metrics"]["accuracy"] <= 1.0
    assert 1e-3 <= best["config"]["lr"] <= 1e-1


@pytest.fixture
def alone(tmp_path: Path) -> Callable[[Callable[[Accelerator], None]], None]:
    """Calls a function with an accelerator in a run of one worker."""

    def call(function: Callable[[Accelerator], None]) -> None:
        in_session(lambda session: function(Accelerator()))(lone_session(tmp_path))

    return call


def prepared(accelerator: Accelerator) -> tuple[nn.Module, Any, Any]:
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.randn(10, 2)), batch_size=4, shuffle=True)
    found: tuple[nn.Module, Any, Any] = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return found


def test_a_state_is_loaded_as_it_was_saved(alone: Any, tmp_path: Path) -> None:
    saved = {}

    def save(accelerator: Accelerator) -> None:
        model, optimizer, loader = prepared(accelerator)
        average = torch.optim.swa_utils.AveragedModel(model)
        accelerator.register_for_checkpointing(average)
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)
        accelerator.save_state(tmp_path / "state")
        saved.update({name: each.clone() for name, each in model.state_dict().items()})

    def load(accelerator: Accelerator) -> None:
        model, _, _ = prepared(accelerator)
        average = torch.optim.swa_utils.AveragedModel(model)
        accelerator.register_for_checkpointing(average)
        assert not torch.equal(model.weight, saved["weight"])
        with pytest.raises(UserError, match="from where save_state has put it"):
            accelerator.load_state(tmp_path / "nowhere")
        accelerator.load_state(tmp_path / "state")
        assert all(torch.equal(each, saved[name]) for name, each in model.state_dict().items())
        assert torch.equal(average.module.weight, saved["weight"])

    alone(save)
    alone(load)


def test_a_sampler_says_what_is_evaluated(alone: Any) -> None:
    def evaluate(accelerator: Accelerator) -> None:
        data = TensorDataset(torch.arange(10))
        loader = accelerator.prepare(DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([7, 1, 4])))
        told = [accelerator.gather_for_metrics({"x": [x]})["x"][0] for (x,) in loader]
        assert [each.tolist() for each in told] == [[1, 4], [7]]
        assert len(loader) == 2
        assert loader.batch_size == 2

    alone(evaluate)


def test_a_sampler_with_a_generator_of_its_own_is_drawn_from_the_run_s_seed(alone: Any) -> None:
    def evaluate(accelerator: Accelerator) -> None:
        data, told = TensorDataset(torch.arange(40)), []
        for _ in range(2):  # on two workers the generators stand at other places after a death, say
            own = torch.Generator().manual_seed(1)
            own_at = WeightedRandomSampler([1.0] * 40, 6, generator=own)
            torch.rand(len(told) + 1, generator=own)
            loader = accelerator.prepare(DataLoader(data, batch_size=6, sampler=own_at))
            told += [accelerator.gather_for_metrics(Pair(x, x)).first.tolist() for (x,) in loader]
        assert told[0] == told[1]
        assert len(told[0]) == 6

    alone(evaluate)


class Pair(NamedTuple):
    """What a step may give."""

    first: torch.Tensor
    second: torch.Tensor


def test_what_it_cannot_do_is_said(alone: Any) -> None:
    def ask(accelerator: Accelerator) -> None:
        with pytest.raises(UserError, match="prepared in one call"):
            accelerator.prepare(nn.Linear(1, 1))
        with pytest.raises(UserError, match="no split_between_processes"):
            accelerator.split_between_processes([1])
        assert not hasattr(accelerator, "split_between_processes")
        assert getattr(accelerator, "scaler", None) is None
        with pytest.raises(UserError, match="the norm of gradients"):
            accelerator.clip_grad_norm_([], 1.0, norm_type=1)
        with pytest.raises(UserError, match="deepspeed_plugin"):
            Accelerator(deepspeed_plugin=1)
        with pytest.raises(UserError, match="--precision bf16"):
            Accelerator(mixed_precision="fp16")
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(2))))
        for _ in loader:
            with pytest.raises(UserError, match="tensors are gathered"):
                accelerator.gather_for_metrics("words")

    alone(ask)
    with pytest.raises(UserError, match="elastune run FILE"):
        Accelerator()
