"""Examples and recipes leave no tensor behind on the CPU: two steps of each on a GPU, and in a test without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.data import DataLoader, TensorDataset

from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.recipes import datasets
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.program.load import load

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = ("digits", "rows", "gns_policy", "mnist", "split_cnn", "views", "recipes/gpt", "recipes/images")
ELSEWHERE = torch.device("meta")
NUMBERS = {torch.Tensor.__int__: 1, torch.Tensor.__float__: 1.0, torch.Tensor.__bool__: True}
# An index may lie on the CPU; the last is asked while a module is moved.
PLACES = {torch.Tensor.__getitem__, torch.Tensor.to, torch._has_compatible_shallow_copy_type}
FEW = datasets.Splits(*[TensorDataset(torch.rand(64, 1, 28, 28), torch.arange(64) % 10)] * 3)


class OneDevice(TorchFunctionMode):
    """Refuses calls with tensors of two devices, as a GPU does, and gives numbers of tensors that have none."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func in NUMBERS and tensors[0].device == ELSEWHERE:
            return NUMBERS[func]
        if func is torch.Tensor.item and tensors[0].device == ELSEWHERE:
            return 1.0 if tensors[0].is_floating_point() else 1
        devices = {each.device for each in tensors if each.dim() > 0}
        assert len(devices) < 2 or func in PLACES, f"{func.__name__} of tensors on two devices"
        return func(*args, **(kwargs or {}))


class SessionElsewhere:
    """A session on a device without memory: it takes one training step and one batch of each evaluation."""

    rank, size, epoch, step, seed, device = 0, 1, 0, 0, 0, ELSEWHERE
    leader = ends_step = True

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.metrics: dict[str, Any] = {}
        self.trained = self.evaluated = 0

    def prepare(self, *objects: Any, plan: Any = None) -> Any:
        model, optimizer = objects[:2]
        before = dict(model.named_parameters())
        moved = nn.Module.to(model, ELSEWHERE)
        names = {id(parameter): name for name, parameter in before.items()}
        after = dict(moved.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [after[names[id(parameter)]] for parameter in group["params"]]
        return objects

    def track(self, name: str, obj: Any) -> Any:
        return obj

    def epochs(self, count: int) -> Iterator[int]:
        yield 0

    def batches(self, data: Any, batch_size: int = 1, *, train: bool = True, **options: Any) -> Iterator[Any]:
        loader: Iterable[Any] = data if isinstance(data, DataLoader) else DataLoader(data, batch_size)
        self.trained += train
        self.evaluated += not train
        yield tree_map_only(torch.Tensor, lambda each: each.to(ELSEWHERE), next(iter(loader)))

    def backward(self, loss: torch.Tensor) -> None:
        assert loss.device == ELSEWHERE
        loss.backward()

    def clip_grad_norm_(self, limit: float) -> None:
        """Nothing is clipped."""

    def sum(self, values: Any) -> float:
        return 1.0

    def mean(self, values: Any) -> float:
        return 1.0

    def report(self, evaluated_on: Any = None, **metrics: float) -> None:
        self.metrics |= metrics

    def save_best(self, *arguments: Any) -> None:
        """Nothing is saved."""

    def predictions(self, name: str, outputs: Any, targets: Any) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_tensors_of_a_step_and_an_evaluation_are_on_the_sessions_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "mnist", lambda: FEW)
    loaded = load(Program(EXAMPLES / f"{name}.py"))
    session = SessionElsewhere(dict(loaded.config))
    with OneDevice():
        loaded.train(session)
    assert session.trained == 1
    assert session.metrics


def test_a_tensor_that_stays_behind_is_found(tmp_path: Path) -> None:
    text = (EXAMPLES / "recipes" / "gpt.py").read_text()
    (tmp_path / "left.py").write_text(text.replace("x.to(device), y.to(device)", "x, y"))
    loaded = load(Program(tmp_path / "left.py"))
    with OneDevice(), pytest.raises(AssertionError, match="of tensors on two devices"):
        loaded.train(SessionElsewhere({}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_steps_on_a_gpu(cluster: LocalCluster, tmp_path: Path, name: str) -> None:
    mechanism = "tensor" if name == "split_cnn" else None
    config: dict[str, Any] = {"epochs": 1} if "recipes" not in name else {}
    execution = ExecutionSettings(device="cuda", mechanism=mechanism)
    with chdir(EXAMPLES.parent):
        spec = RunSpec(Program(EXAMPLES / f"{name}.py"), tmp_path / "out", config, execution=execution, max_steps=2)
        done = run_job(spec, cluster=cluster)
    assert done.steps == 2
    assert done.metrics
