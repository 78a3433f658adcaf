"""The random stream of a micro-batch: it goes from stage to stage as the activations do."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def drawn_state() -> list[torch.Tensor]:
    """Where the streams of the CPU and of this worker's accelerator stand."""
    found = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(torch.cuda.get_rng_state())
    return found


def draw_from(state: Sequence[torch.Tensor]) -> None:
    """Go on from ``drawn_state``, of this worker or another one."""
    # Copies, because torch reads a state from the beginning of its memory, whatever the tensor's place in that.
    torch.set_rng_state(state[0].cpu().clone())
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1].cpu().clone())
