"""What a script does besides training: it prints, logs and saves, each once in a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.adapters.passes import Passes
from elastune.core.errors import UserError
from elastune.train.session import Session

STATE = "elastune_state.pt"


class Lacking(UserError, AttributeError):
    """A part of Accelerate's API that elastune does not have; ``hasattr`` says that it is missing."""


class Effects:
    """The part of ``Accelerator`` that does not train."""

    session: Session
    device: torch.device
    passes: Passes
    keeps: dict[str, Any]  # what a state has, by name
    num_processes = 1  # a script sees one process: its batch size is that of all workers together
    optimizer_step_was_skipped = False

    @property
    def sync_gradients(self) -> bool:
        """Whether this batch completed a step."""
        return self.session.ends_step

    @property
    def is_main_process(self) -> bool:
        """Whether this worker does now what is done once in a run.

        False where a script that starts again in mid-run repeats earlier lines.
        """
        return self.session.leader and not self.passes.again

    is_local_main_process = is_last_process = is_main_process

    @property
    def process_index(self) -> int:
        """This worker's rank, for messages."""
        return self.session.rank

    local_process_index = process_index

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Report the numbers among ``values``, as ``session.report`` does.

        Inside of a pass, it does so only at the end of a step.
        """
        numbers: dict[str, Any] = {
            name: each for name, each in values.items() if isinstance(each, (int, float, torch.Tensor))
        }
        if numbers and not self.passes.again and self.session.ends_step:
            self.session.report(**numbers)

    def print(self, *words: Any, **options: Any) -> None:
        """Print as Python's ``print`` does, once in a run."""
        if self.is_main_process:
            print(*words, **options)

    def save_state(self, output_dir: str | Path | None = None, **options: Any) -> None:
        """Write a checkpoint of the run, for ``--resume``.

        Args:
            output_dir: Also write into this folder the state that ``load_state`` reads.
        """
        if self.passes.again:
            return
        self.session.save()
        if output_dir is None:
            return
        if self.session.trained is not None and self.session.trained.in_shares:
            rule = "a state in a folder needs workers that have all of it"
            raise UserError(rule, output_dir, "leave output_dir out: --resume needs none")
        if self.is_main_process:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            self.save({name: each.state_dict() for name, each in self.keeps.items()}, Path(output_dir) / STATE)

    def load_state(self, input_dir: str | Path, **options: Any) -> None:
        """Start from the state that another run saved. A resumed run continues from its own checkpoint instead.

        Args:
            input_dir: The folder that ``save_state`` wrote.

        Raises:
            UserError: Where the folder holds no such state.
        """
        if self.session.step > 0:
            return
        file = Path(input_dir) / STATE
        if not file.is_file():
            raise UserError("a state is loaded from where save_state has put it", file, "check the folder")
        held = torch.load(file, map_location=self.device, weights_only=True)
        for name, each in self.keeps.items():
            each.load_state_dict(held[name])

    def register_for_checkpointing(self, *given: Any) -> None:
        """Make objects a part of the run's state, as ``session.track`` does. Call it after ``prepare``."""
        for each in given:
            name = f"registered {len(self.keeps)}"
            self.keeps[name] = self.session.track(name, each)

    def save(self, given: Any, file: str | Path, **options: Any) -> None:
        """Save as ``torch.save`` does, once in a run."""
        if self.is_main_process:
            torch.save(given, file)

    def wait_for_everyone(self) -> None:
        """Return when all workers are here, between steps."""
        if not self.passes.again:
            self.session.sum(0.0)

    def unwrap_model(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return ``model``: nothing is wrapped around it."""
        return model

    def get_state_dict(self, model: nn.Module, **options: Any) -> dict[str, Any]:
        """Return ``model.state_dict()``."""
        return model.state_dict()

    def init_trackers(self, *given: Any, **options: Any) -> None:
        """Do nothing: the run's journal keeps what is logged."""

    end_training = free_memory = init_trackers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise Lacking("elastune's Accelerator has a part of Accelerate's", f"no {name}", "see docs/programs.md")
