"""Passes without random numbers and without statistics of a batch: what is left is what the program's lines compute.

``Quiet`` is entered around a program's lines. Dropout lets everything through, BatchNorm uses its running statistics,
and noise drawn from torch is its mean. So two passes over the same samples, cut otherwise, must have gradients that
add up, unless a loss looks at several samples at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_MEANS: dict[str, float] = {
    **dict.fromkeys(("randn", "randn_like", "normal_"), 0.0),
    **dict.fromkeys(("rand", "rand_like", "uniform_"), 0.5),
    "exponential_": 1.0,
}
_ATTENTION_DROPOUT = 4  # its place among the arguments of scaled_dot_product_attention
_BATCH_NORM_TRAINING = 5  # likewise of batch_norm


class Quiet(TorchFunctionMode):
    """See the module."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` without randomness; anything that draws nothing runs as it is."""
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in _DROPOUTS:
            return args[0] if args else options["input"]
        if func is F.multi_head_attention_forward:
            options["training"] = False
        elif func is F.scaled_dot_product_attention:
            args = args[:_ATTENTION_DROPOUT] + (0.0,) * (len(args) > _ATTENTION_DROPOUT) + args[5:]
            if "dropout_p" in options:
                options["dropout_p"] = 0.0
        elif func is F.batch_norm:
            args, options = _with_running_statistics(args, options)
        elif name in _RECURRENT:
            args = tuple(0.0 if type(each) is float else each for each in args)
        elif name == "normal":
            drawn = func(*args, **options)
            mean = args[0] if args else options.get("mean", 0.0)
            return mean.expand_as(drawn).clone() if isinstance(mean, torch.Tensor) else torch.full_like(drawn, mean)
        drawn = func(*args, **options)
        if name in _MEANS and isinstance(drawn, torch.Tensor):
            with torch.no_grad():
                drawn.fill_(_MEANS[name])
        return drawn


def _with_running_statistics(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mean = args[1] if len(args) > 1 else options.get("running_mean")
    if mean is None:  # a layer that keeps none
        return args, options
    if len(args) > _BATCH_NORM_TRAINING:
        return (*args[:_BATCH_NORM_TRAINING], False, *args[_BATCH_NORM_TRAINING + 1 :]), options
    return args, {**options, "training": False}
