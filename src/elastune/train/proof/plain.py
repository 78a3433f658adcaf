"""Runs a plain training script unchanged and records its steps, fed with the samples of another run.

``observe`` runs the script in this process, so it belongs into a process of its own (``main``). It wraps what the
script uses of torch. A pass over a ``DataLoader`` of the training set gives the samples of the other run, and random
streams are seeded as there. Optimizers begin with the same weights. Losses and gradients are recorded at each
``backward``, weights after each batch.

A loader with smaller batches gives the parts of a batch one after another: the script adds gradients up. Where the
other run counts its steps and has no samples, the script gets its data by itself; it is seeded after each step.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset

from elastune.core.run import derive
from elastune.train.agreement import OptimizerSettings
from elastune.train.data.fingerprint import checksum_of
from elastune.train.models import Optimizers
from elastune.train.program.errors import cause_of
from elastune.train.program.load import process_restored
from elastune.train.proof.compare import Leaf, PassRecord, StepRecord, encode
from elastune.train.rng import SeededSamples, seed_everything


@dataclass(frozen=True)
class PlainRequest:
    """A plain script, and the run that it is compared with.

    Attributes:
        script: The script.
        arguments: Its command line.
        beginning: The file of the parameters to begin with, in the optimizer's order.
        batches: The samples of each batch of each epoch.
        samples: How many samples the training set has.
        seed: The seed of the run.
        records: The file for the steps.
        turns: How many steps the run takes with each batch.
    """

    script: str
    arguments: tuple[str, ...]
    beginning: str
    batches: tuple[tuple[tuple[int, ...], ...], ...]
    samples: int
    seed: int
    records: str
    turns: int = 1

    @property
    def counts_steps(self) -> bool:
        """Whether the run's samples are the numbers of its steps."""
        epochs = (zip(epoch, range(len(epoch)), strict=True) for epoch in self.batches)
        return all(batch == (place,) for epoch in epochs for batch, place in epoch)


@dataclass(frozen=True)
class PlainOutcome:
    """How the script ended.

    Attributes:
        steps: The batches that were recorded.
        without_step: The first recorded batch (from 1) after which no optimizer stepped; None: each had a step.
        problem: Why nothing can be compared; "": it can.
        by_itself: Whether the script got its data by itself, so that they were not compared.
    """

    steps: int
    without_step: int | None = None
    problem: str = ""
    by_itself: bool = False


class _Enough(BaseException):
    """All steps are recorded; not an ``Exception``, so that the script does not swallow it."""


class _Unlike(BaseException):
    """The script trains another model; its text says how."""


def observe(request: PlainRequest) -> PlainOutcome:
    """Run the script of ``request`` and record its steps in ``request.records``."""
    watch = _Watch(request)
    problem = ""
    before = sys.argv
    try:
        with process_restored(), watch.attached():
            seed_everything(derive(request.seed, "import"))
            sys.argv = [request.script, *request.arguments]
            sys.path.insert(0, str(Path(request.script).resolve().parent))
            try:
                runpy.run_path(request.script, run_name="__main__")
            finally:
                sys.path.pop(0)
        watch.close()
    except _Enough:
        pass
    except _Unlike as error:
        problem = str(error)
    except SystemExit as error:
        if error.code not in (None, 0):
            problem = cause_of(error, request.script)
        else:
            watch.close()
    except Exception as error:  # noqa: BLE001 - the script is the user's; its error is the answer
        problem = cause_of(error, str(Path(request.script).resolve()))
    finally:
        sys.argv = before
    if not problem and not watch.steps:
        problem = f"it iterates no DataLoader of {request.samples:,} samples, as the run does"
    return PlainOutcome(watch.steps, watch.without_step, problem, watch.by_itself)


class _Watch:
    """Records the steps of a script, batch by batch."""

    def __init__(self, request: PlainRequest) -> None:
        self._request = request
        self._beginning = load_file(request.beginning)
        self._names = [key.partition(".")[2] for key in sorted(self._beginning)]
        self._optimizers: list[torch.optim.Optimizer] = []
        self._epoch = 0
        self._size: int | None = None  # the batch size of the loader that trains
        self._most = sum(map(len, request.batches))
        self._iterate = DataLoader.__iter__
        self._stepped_optimizers: set[int] = set()
        self.by_itself = request.counts_steps
        self.steps = 0
        self.without_step: int | None = None
        # Of the batch:
        self._numbers: tuple[int, ...] = ()
        self._content = 0
        self._losses: list[float] = []
        self._gradient: dict[str, Leaf] = {}
        self._settings: dict[str, str] = {}
        self._before: dict[str, Leaf] | None = None
        self._open = self._stepped = False

    # -- what the script uses of torch ---------------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While the script runs."""
        iterate, make, backward = self._iterate, torch.optim.Optimizer.__init__, torch.Tensor.backward

        def iterated(loader: Any) -> Any:
            return self._fed(loader) if self._trains(loader) else iterate(loader)

        def made(optimizer: Any, *arguments: Any, **options: Any) -> None:
            make(optimizer, *arguments, **options)
            self._optimizers.append(optimizer)
            if self.by_itself:
                self._seed_step()

        def forwards(module: Any, inputs: Any) -> None:
            if self.by_itself and not self._open and self.steps == 0 and torch.is_grad_enabled() and self._optimizers:
                self._begin_by_itself()

        def run_backward(tensor: Any, *arguments: Any, **options: Any) -> None:
            if self._open:
                self._losses.append(float(tensor.detach()) if tensor.numel() == 1 else float("nan"))
            backward(tensor, *arguments, **options)  # type: ignore[no-untyped-call]
            if self._open:
                self._gradient = self._leaves(gradients=True)
                self._settings = self._settings_now()

        with ExitStack() as stack:
            handle = register_optimizer_step_post_hook(self._after_step)
            stack.callback(handle.remove)
            stack.callback(register_module_forward_pre_hook(forwards).remove)
            replaced: list[tuple[Any, str, Any, Any]] = [
                (DataLoader, "__iter__", iterated, iterate),
                (torch.optim.Optimizer, "__init__", made, make),
                (torch.Tensor, "backward", run_backward, backward),
            ]
            for owner, name, replacement, original in replaced:
                setattr(owner, name, replacement)
                stack.callback(setattr, owner, name, original)
            yield

    def _trains(self, loader: Any) -> bool:
        if isinstance(loader.dataset, IterableDataset) or not torch.is_grad_enabled():
            return False
        if len(loader.dataset) != self._request.samples or self._size not in (None, loader.batch_size):
            return False
        self._size = loader.batch_size
        return True

    def _fed(self, loader: Any) -> Iterator[Any]:
        """A pass of ``loader`` over the samples of the other run's epoch, in its batches."""
        if self._epoch == len(self._request.batches):
            self.close()
            raise _Enough
        batches, epoch = self._request.batches[self._epoch], self._epoch
        self._epoch += 1
        self.by_itself = False
        seeded = SeededSamples(loader.dataset, self._request.seed, epoch)

        def read(lists: Iterable[Sequence[int]]) -> Iterator[Any]:
            whole = DataLoader(seeded, batch_sampler=[list(each) for each in lists], collate_fn=loader.collate_fn)
            return iter(self._iterate(whole))

        size = loader.batch_size or len(batches[0])
        parts = {numbers: [numbers[at : at + size] for at in range(0, len(numbers), size)] for numbers in batches}
        adds_up = len(parts[batches[0]]) > 1
        for number, (numbers, batch) in enumerate(zip(batches, read(batches), strict=True)):
            self.close()
            self._begin(numbers, batch)
            self._seed_step()
            try:
                yield from read(parts[numbers]) if adds_up else (batch,)
            except GeneratorExit:
                if number == 0 and not self._losses:  # it took a look at the first batch
                    self._open, self._epoch = False, epoch
                raise
            if adds_up:
                self._losses = [sum(self._losses)]
        self.close()

    def _seed_step(self) -> None:
        """Begin the random streams of the next step, as the run does."""
        seed_everything(derive(self._request.seed, "slot", self.steps * self._request.turns, 0, 0))

    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self._stepped = True
        self._stepped_optimizers.add(id(optimizer))
        if self.by_itself and self._open and self._stepped_optimizers >= {id(each) for each in self._optimizers}:
            self.close()
            self._begin_by_itself()
            self._seed_step()

    def _begin_by_itself(self) -> None:
        """Begin a step for which the script gets its data by itself."""
        ends = [sum(map(len, self._request.batches[: at + 1])) for at in range(len(self._request.batches))]
        self._epoch = next(at for at, end in enumerate(ends) if self.steps < end) + 1
        numbers = [batch for epoch in self._request.batches for batch in epoch][self.steps]
        self._begin(numbers, torch.tensor(numbers))

    # -- batches -------------------------------------------------------------------------------------------------------

    def _begin(self, numbers: Sequence[int], batch: Any) -> None:
        if self.steps == 0:
            self._load_beginning()
            self._before = self._leaves(gradients=False)
        self._numbers, self._content = tuple(numbers), checksum_of(batch)
        self._losses, self._gradient, self._settings = [], {}, {}
        self._open, self._stepped = True, False
        self._stepped_optimizers = set()

    def close(self) -> None:
        """The script asks for the next batch, or its pass is over: record the batch before."""
        if not self._open:
            return
        self._open = False
        self.steps += 1
        if not self._stepped and self.without_step is None:
            self.without_step = self.steps
        record = PassRecord(0, 0, 1.0, self._numbers, self._content, tuple(self._losses))
        weights, before = self._leaves(gradients=False), self._before
        self._before = None
        step = StepRecord(
            self.steps, self._epoch - 1, (record,), self._settings, self._gradient, weights, before=before
        )
        with Path(self._request.records).open("a") as file:
            file.write(f"{encode(step)}\n")
        if self.steps == self._most:
            raise _Enough

    @property
    def _parameters(self) -> list[torch.Tensor]:
        """What the optimizers train, in the order in which they were made."""
        groups = (group for each in self._optimizers for group in each.param_groups)
        return list({id(p): p for group in groups for p in group["params"]}.values())

    def _leaves(self, *, gradients: bool) -> dict[str, Leaf]:
        tensors = [(name, p.grad if gradients else p) for name, p in zip(self._names, self._parameters, strict=False)]
        return {name: Leaf.of(tensor) for name, tensor in tensors if tensor is not None}

    def _settings_now(self) -> dict[str, str]:
        return OptimizerSettings.by_name(Optimizers(self._optimizers))

    def _load_beginning(self) -> None:
        wanted = [self._beginning[key] for key in sorted(self._beginning)]
        parameters = self._parameters
        if not parameters:
            raise _Unlike("it trains no optimizer of torch.optim")
        for place, (tensor, parameter) in enumerate(zip(wanted, parameters, strict=False)):
            if tensor.shape != parameter.shape:
                name, shapes = self._names[place], f"{tuple(parameter.shape)} there, {tuple(tensor.shape)} here"
                raise _Unlike(f"it trains another model: parameter {place + 1} ({name}) is {shapes}")
        if len(wanted) != len(parameters):
            raise _Unlike(f"it trains another model: {len(parameters)} parameters there, {len(wanted)} here")
        with torch.no_grad():
            for tensor, parameter in zip(wanted, parameters, strict=True):
                parameter.copy_(tensor)


def main() -> int:
    """The process: read the request from the file of its first argument, write the outcome to that of its second."""
    fields = json.loads(Path(sys.argv[1]).read_text())
    batches = tuple(tuple(tuple(batch) for batch in epoch) for epoch in fields["batches"])
    reply = Path(sys.argv[2])
    request = PlainRequest(**{**fields, "arguments": tuple(fields["arguments"]), "batches": batches})
    reply.write_text(json.dumps(asdict(observe(request))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
