"""What ``exact`` mode asks of random numbers: a stream for each slot, wherever they are drawn."""

from __future__ import annotations

from torch import nn

from elastune.core.errors import UserError


def check_streams(model: nn.Module) -> None:
    """Refuse what draws on a GPU from a stream that no seed sets: dropout inside of cuDNN's RNNs.

    Raises ``UserError``.
    """
    for name, part in model.named_modules():
        if not isinstance(part, nn.RNNBase) or not part.dropout or part.num_layers == 1:
            continue
        if any(p.device.type == "cuda" for p in part.parameters()):
            raise UserError(
                "dropout between the layers of an RNN has no stream for each slot on a GPU, which exact mode needs",
                f"{type(part).__name__} {name!r} with dropout={part.dropout}",
                "use an RNN for each layer with nn.Dropout between them, or --mode fast",
            )
