"""Observe a training script from inside its own processes; Python imports this file by its name at start.

``elastune check --command`` puts this folder first on PYTHONPATH and sets ELASTUNE_OBSERVE to a folder. Each process
that takes an optimizer step writes ``rank-R-PID.jsonl`` there. The script does not notice: nothing that it computes
changes. The file stands alone, because the script's environment need not have elastune.

A *sketch* of a tensor is three dot products of its values with fixed signs. It is linear: the sketch of a mean of
gradients is the mean of their sketches. So a few numbers show how gradients of several processes were put together.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import sysconfig
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "ELASTUNE_OBSERVE"
STEPS = "ELASTUNE_OBSERVE_STEPS"
HERE = str(Path(__file__).parent)
SKETCHED = 16_384  # values of a tensor that its sketch takes, at equal distances
SIGNS = 3
_FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_BEGAN_IN = os.getcwd() + os.sep
_LIBRARIES = (HERE, "<", *_FOLDERS, *(os.path.realpath(folder) for folder in _FOLDERS))


def place() -> str:
    """``FILE:LINE`` of the innermost line of the user's own code that runs now; empty if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            return f"{file.removeprefix(_BEGAN_IN)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Observer:
    """What one process of the command does, as lines of JSON. ``torch``: the module, just imported."""

    def __init__(self, torch: Any, folder: Path, steps: int) -> None:
        self.torch = torch
        self.folder = folder
        self.steps = steps
        self.file: Any = None
        self.waiting: list[dict[str, Any]] = []  # before the first step: nobody knows whether this process trains
        self.step = 0
        self.depth = 0
        self.local: dict[int, list[list[float]]] = {}
        self.hooked: dict[int, Any] = {}
        self.models: dict[int, Any] = {}
        self.signs: dict[tuple[int, str], Any] = {}
        self.began = False
        self.inside = False

    # --- writing ---

    def write(self, kind: str, **values: Any) -> None:
        record = {"kind": kind, **values}
        if self.file is None:
            self.waiting.append(record)
            return
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def open(self) -> None:
        if self.file is not None:
            return
        rank, world = self.rank()
        self.file = open(self.folder / f"rank-{rank}-{os.getpid()}.jsonl", "w")  # noqa: SIM115, open until the end
        self.write("start", rank=rank, world=world)
        waiting, self.waiting = self.waiting, []
        for record in waiting:
            self.file.write(json.dumps(record) + "\n")

    def rank(self) -> tuple[int, int]:
        dist = self.torch.distributed
        if dist.is_available() and dist.is_initialized():
            return int(dist.get_rank()), int(dist.get_world_size())
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    # --- numbers ---

    def whole(self, tensor: Any) -> Any:
        """The values of ``tensor``, also where a DTensor has only this process's part."""
        tensor = tensor.detach()
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def sketch(self, tensor: Any) -> list[float]:
        torch = self.torch
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        values = tensor.reshape(-1)
        if values.numel() > SKETCHED:
            values = values[:: values.numel() // SKETCHED][:SKETCHED]
        values = values.to(torch.float64)
        key = (values.numel(), str(values.device))
        if key not in self.signs:
            generator = torch.Generator().manual_seed(7)
            signs = torch.randint(0, 2, (SIGNS, values.numel()), generator=generator, dtype=torch.float64) * 2 - 1
            self.signs[key] = signs.to(values.device)
        return [float(x) for x in (self.signs[key] @ values).tolist()]

    def rows(self, values: Any) -> list[str]:
        """A digest of each row of the batch: of the tensor with most values among the inputs."""
        tensors: list[Any] = []
        self.collect(values, tensors)
        if not tensors:
            return []
        batch = max(tensors, key=lambda each: int(each.numel())).detach().contiguous().cpu()
        if batch.ndim == 0 or batch.shape[0] == 0:
            return []
        flat = batch.reshape(batch.shape[0], -1).contiguous().view(self.torch.uint8).numpy()
        return [blake2b(row.tobytes(), digest_size=8).hexdigest() for row in flat]

    def collect(self, values: Any, into: list[Any]) -> None:
        if isinstance(values, self.torch.Tensor):
            into.append(values)
        elif isinstance(values, dict):
            for each in values.values():
                self.collect(each, into)
        elif isinstance(values, (list, tuple)):
            for each in values:
                self.collect(each, into)

    def random_state(self) -> str:
        return blake2b(self.torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest()

    # --- what happens ---

    def forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trains = bool(model.training) and self.torch.is_grad_enabled()
        if trains and self.step >= self.steps:
            return
        first = trains and id(model) not in self.models
        if first:
            self.models[id(model)] = model
            self.attach(model)
        values: dict[str, Any] = {}
        if first:
            kinds = [type(each).__name__ for each in model.modules()]
            norms = [n for n in kinds if n.startswith("BatchNorm")]
            dropout = any(
                getattr(each, "p", 0) and "Dropout" in type(each).__name__ for each in model.modules()
            ) or any(float(getattr(each, "dropout", 0) or 0) > 0 for each in model.modules() if _number(each))
            values = {
                "batch_norms": len(norms),
                "dropout": bool(dropout),
                "weights": [self.sketch(self.whole(p)) for p in model.parameters() if p.requires_grad],
            }
        self.write(
            "forward",
            step=self.step,
            trains=trains,
            rows=self.rows((args, kwargs)),
            line=place(),
            random=self.random_state() if trains else "",
            **values,
        )

    def attach(self, model: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad and id(parameter) not in self.hooked and not hasattr(parameter, "full_tensor"):
                self.hooked[id(parameter)] = parameter.register_hook(self.gradient_hook(id(parameter)))

    def gradient_hook(self, key: int) -> Any:
        def note(gradient: Any) -> None:
            if self.step < self.steps and not self.inside:
                self.local.setdefault(key, []).append(self.sketch(gradient.detach()))

        return note

    def backward(self, loss: Any) -> None:
        if self.step < self.steps:
            value = float(loss.detach()) if loss.numel() == 1 else None
            self.write("backward", step=self.step, loss=value, line=place())

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the gradients; with a closure, as soon as it has computed them."""
        self.open()
        if self.step >= self.steps:
            return None
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.gradients(optimizer)
            return None

        def observed() -> Any:
            loss = closure()
            self.gradients(optimizer)
            return loss

        return (args[0], observed, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def gradients(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.inside = True
        try:
            reduced = [self.sketch(self.whole(p.grad)) for p in parameters]
        finally:
            self.inside = False
        local = [_sum(self.local.get(id(p), [])) for p in parameters]
        self.write(
            "step",
            step=self.step,
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            local=local,
            reduced=reduced,
            line=place(),
        )
        self.local.clear()

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.step < self.steps:
            weights = [self.sketch(self.whole(p)) for g in optimizer.param_groups for p in g["params"]]
            buffers = {
                name.removeprefix("module."): self.sketch(self.whole(buffer))
                for model in self.models.values()
                for name, buffer in model.named_buffers()
                if buffer.numel()
            }
            self.write("done", step=self.step, weights=weights, buffers=buffers)
        elif self.step == self.steps:
            self.write("unwatched", step=self.step)
        self.step += 1


def _number(module: Any) -> bool:
    return isinstance(getattr(module, "dropout", None), (int, float))


def _sum(sketches: list[list[float]]) -> list[float]:
    return [sum(values) for values in zip(*sketches, strict=True)]


def install(torch: Any) -> None:
    """Have every optimizer, model, loss, loader and sampler of this process observed."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    observer = Observer(torch, Path(os.environ[FOLDER]), int(os.environ.get(STEPS, "20")))
    register_optimizer_step_pre_hook(observer.before_step)
    register_optimizer_step_post_hook(observer.after_step)
    module, call = torch.nn.Module, torch.nn.Module.__call__

    @functools.wraps(call)
    def observed_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if observer.depth or torch.compiler.is_compiling() or next(self.parameters(), None) is None:
            return call(self, *args, **kwargs)
        observer.depth += 1
        try:
            observer.forward(self, args, kwargs)
            return call(self, *args, **kwargs)
        finally:
            observer.depth -= 1

    module.__call__ = observed_call
    backward = torch.Tensor.backward

    @functools.wraps(backward)
    def observed_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer.backward(self)
        return backward(self, *args, **kwargs)

    torch.Tensor.backward = observed_backward

    def at_birth(kind: Any, name: str) -> None:
        born = kind.__init__

        @functools.wraps(born)  # Lightning reads the signature
        def observed(self: Any, *args: Any, **kwargs: Any) -> None:
            born(self, *args, **kwargs)
            observer.write(name, line=place(), what=type(self).__name__)

        kind.__init__ = observed

    at_birth(torch.optim.Optimizer, "optimizer")
    at_birth(DataLoader, "loader")
    iterate = DistributedSampler.__iter__

    @functools.wraps(iterate)
    def observed_iterate(self: Any) -> Any:
        observer.write("sampler", line=place(), shuffles=bool(self.shuffle), epoch=int(self.epoch), key=id(self))
        return iterate(self)

    DistributedSampler.__iter__ = observed_iterate  # type: ignore[method-assign]
    seed = torch.manual_seed

    @functools.wraps(seed)
    def observed_seed(value: Any) -> Any:
        line = place()
        if line:
            observer.write("seed", line=line, value=int(value))
        return seed(value)

    torch.manual_seed = observed_seed


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Call ``install`` as soon as ``torch`` is imported, and not before: the command may never import it."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            install(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _also_the_environments_own() -> None:
    """Run the ``sitecustomize`` that this file hides, if there is one."""
    paths = [path for path in sys.path if os.path.realpath(path) != os.path.realpath(HERE)]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_also_the_environments_own()
if os.environ.get(FOLDER):
    sys.meta_path.insert(0, _AfterTorch())
