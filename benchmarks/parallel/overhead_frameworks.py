"""Scripts of ``overhead.py`` that were written for another framework: its own loop, and elastune's adapter for it.

Both read a map-style data set through torch's ``DataLoader``, sample by sample, and collate.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
import transformers
from benchmarks.common.paired import Seconds, Timed, now, paired, since, timed
from benchmarks.parallel.overhead_programs import INPUTS, SAMPLES, mlp
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from elastune.adapters.accelerate import Accelerator
from elastune.adapters.transformers import Trainer
from elastune.core.run import ExecutionSettings
from elastune.train.program.load import in_session

WARM = 3  # steps of a new trainer


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, INPUTS, generator=generator)
        self.labels = torch.randint(0, 10, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """As a ``Trainer`` calls models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(INPUTS, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def accelerated(accelerator: Any, batch: int) -> Iterator[None]:
    """A script for Accelerate: ``accelerator`` is its own, or elastune's. One item a step."""
    model = mlp(INPUTS, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loader = DataLoader(Samples(), batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for inputs in loader:
            loss = F.cross_entropy(model(inputs["x"]), inputs["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            yield


def measure_accelerate(batch: int, rounds: int, steps: int) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def take(script: Iterator[None]) -> Callable[[int], None]:
        def run(count: int) -> None:
            for _ in itertools.islice(script, count):
                pass

        run(5)
        return run

    def train(session: Any) -> None:
        scripts = {
            "plain": accelerated(accelerate.Accelerator(cpu=True), batch),
            "fast": accelerated(Accelerator(), batch),
        }
        variants = {name: timed(take(script)) for name, script in scripts.items()}
        results.update(paired(variants, rounds, steps))
        for script in scripts.values():
            script.close()

    session = lone_session(Path("nowhere"), execution=ExecutionSettings(mode="fast", num_slots=1))
    in_session(train)(session)
    return {"program": "accelerate", "batch": batch, **results}


class Stamps(TrainerCallback):
    """Times all steps of a trainer but the first ``WARM``."""

    seconds: Seconds

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == WARM:
            self._started = now()
        elif state.global_step == WARM + self._steps:
            self.seconds = since(self._started, self._steps)


def trained(kind: Any, batch: int, folder: str, steps: int) -> Seconds:
    """The steps of one new trainer of ``kind``."""
    stamps = Stamps(steps)
    arguments = TrainingArguments(
        folder,
        max_steps=WARM + steps,
        per_device_train_batch_size=batch,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = kind(model=Classifier(), args=arguments, train_dataset=Samples(), callbacks=[stamps])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return stamps.seconds


def measure_trainer(batch: int, rounds: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:

        def ours(steps: int) -> Seconds:
            results: list[Seconds] = []
            session = lone_session(Path(folder), execution=ExecutionSettings(mode="fast", num_slots=1))
            in_session(lambda _: results.append(trained(Trainer, batch, folder, steps)))(session)
            return results[0]

        variants: dict[str, Timed] = {
            "plain": lambda steps: trained(transformers.Trainer, batch, folder, steps),
            "fast": ours,
        }
        return {"program": "trainer", "batch": batch, **paired(variants, rounds, steps)}


FRAMEWORKS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "accelerate": measure_accelerate,
    "trainer": measure_trainer,
}
