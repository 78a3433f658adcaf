"""Models of sub-problems under one head (stacked generalisation, Wolpert 1992), trained as any model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.reuse.candidates import library
from elastune.reuse.joined import MadeOf, model_of
from elastune.reuse.weights import Build
from elastune.study.results.study import Study

View = Callable[[dict[str, Any], torch.Tensor], torch.Tensor]


def everything(config: dict[str, Any], inputs: torch.Tensor) -> torch.Tensor:
    """Return all inputs: the view of a part that sees everything."""
    return inputs


class StackedParts(nn.Module):
    """A linear ``head`` over the outputs of its ``parts``. The parts stay as they are, in evaluation mode.

    Attributes:
        made_of: The trials of its parts and, once it is trained, of its head; empty where they are not known.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        configs: Sequence[dict[str, Any]],
        view: View,
        head: nn.Linear,
        made_of: Sequence[MadeOf] = (),
    ) -> None:
        super().__init__()
        self.made_of = tuple(made_of)
        self.parts, self.head = nn.ModuleList(parts), head
        self._configs, self._view = list(configs), view
        self.parts.requires_grad_(False)

    def train(self, mode: bool = True) -> StackedParts:
        """Set the training mode of the head; the parts stay in evaluation mode."""
        super().train(mode)
        self.parts.eval()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the head's output for the outputs of the parts."""
        return self.head(said_by(self.parts, self._configs, self._view, inputs))  # type: ignore[no-any-return]


def said_by(parts: Any, configs: Sequence[dict[str, Any]], view: View, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs of the parts for ``inputs``, each for its own view, side by side: (samples, numbers)."""
    with torch.no_grad():
        said = [part(view(config, inputs)) for part, config in zip(parts, configs, strict=True)]
    return torch.cat([one.reshape(len(inputs), -1) for one in said], -1)


def stacked_parts(
    study: Study | str | Path,
    build: Build,
    *,
    outputs: int,
    example: torch.Tensor,
    trials: Sequence[int] | None = None,
    view: View = everything,
) -> StackedParts:
    """Put kept trials of a study under a new head, to be trained like any model. Call this in ``train(session)``.

    The parts may have been trained on classes, regions or views of their own, in parallel, as one study. Train the head
    on other data than the parts: they know their own training data too well.

    Args:
        study: The study whose trials are parts, in a folder that every worker can read.
        build: Makes the program's model from the settings of a trial.
        outputs: Numbers that the head gives, such as the number of classes.
        example: One sample or more, of the shape that the model will get; it shows how many numbers the parts give.
        trials: The trials to take; None: all that were kept.
        view: What a part sees of the inputs, by its settings; by default all.

    Returns:
        The model; only its head trains.

    Raises:
        UserError: Where nothing was kept, ``build`` makes other models, or parts do not take the example.

    Example:
        >>> model = elastune.stacked_parts("parts", build, outputs=10, example=data.train[0][0][None])
        >>> model, optimizer = session.prepare(model, torch.optim.Adam(model.head.parameters()))
    """
    if isinstance(outputs, bool) or not isinstance(outputs, int) or outputs < 1:
        raise UserError("a head gives a whole number of outputs, at least 1", outputs, "such as the number of classes")
    found = library(study)
    asked = found.asked(trials)
    parts, configs = [model_of(one, build).eval() for one in asked], [dict(one.config) for one in asked]
    try:
        width = said_by(parts, configs, view, example).shape[-1]
    except (RuntimeError, TypeError, IndexError) as error:
        rule, fix = "parts take the example that they are shown", "give one of the right shape, or view=..."
        raise UserError(rule, str(error).split("\n")[0][:200], fix) from None
    made_of = [MadeOf(found.out, one.trial, one.config) for one in asked]
    return StackedParts(parts, configs, view, nn.Linear(width, outputs), made_of).train()
