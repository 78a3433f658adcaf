"""Models with what a tensor axis divides, and the plans that divide them; worker processes import this by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
WORDS, LENGTH, FEATURES, HEADS = 50, 8, 32, 4


class Layer(nn.Module):
    """A transformer's layer as many write it: projections of their own, heads made by a view, attention fused."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.up, self.down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)
        self.gate = nn.Linear(FEATURES, 4 * FEATURES) if gated else None
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (w(y).view(batch, length, HEADS, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.wo(heads.transpose(1, 2).contiguous().view(batch, length, FEATURES))
        y = self.norm2(x)
        h = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.dropout(self.down(self.dropout(h)))


class Gpt(nn.Module):
    """Causal, with the output layer's weight tied to the embedding; ``again``: layers run again in a backward pass."""

    def __init__(self, gated: bool = False, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.words, self.places = nn.Embedding(WORDS, FEATURES), nn.Embedding(LENGTH, FEATURES)
        self.layers = nn.ModuleList(Layer(gated) for _ in range(2))
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            y = checkpoint(layer, y, use_reentrant=False) if self.again else layer(y)
        return self.head(self.norm(y))


class Cnn(nn.Module):
    """Channels and features that four blocks do not divide evenly, BatchNorm, dropout of numbers and of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 10, 3, padding=1), nn.BatchNorm2d(10)
        self.fc1, self.fc2 = nn.Linear(90, 41), nn.Linear(41, 10)
        self.dropout, self.dropout2d = nn.Dropout(0.3), nn.Dropout2d(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.dropout2d(self.norm1(self.conv1(x)))), 2)
        x = F.relu(self.norm2(self.conv2(x)), inplace=True)
        return self.fc2(self.dropout(F.relu(self.fc1(x.flatten(1)))))


class Odd(nn.Module):
    """Between its divided layers is what only the whole can do; a weight is used without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 30), nn.LayerNorm(30), nn.Linear(30, 30)
        self.words = nn.Embedding(WORDS, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.norm(self.up(x)).cumsum(-1))
        return F.linear(y, self.words.weight)


def attention() -> nn.Module:
    """With weights wanted, and padding."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, kdim=12, vdim=12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.transpose(0, 1)
            padding = torch.zeros(x.shape[1], x.shape[0], dtype=torch.bool)
            padding[0, -2:] = True
            out, weights = self.attention(x, x[..., :12], x[..., 4:], key_padding_mask=padding)
            return out.sum(0) @ torch.ones(16, 5, dtype=x.dtype) + weights.sum(1)

    return Attends()


class Decoder(nn.Module):
    """torch's decoder layer, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, x.flip(0), tgt_mask=mask, tgt_is_causal=True)


def encoder(dropout: float = 0.1) -> nn.Module:
    """torch's encoder."""
    layer = nn.TransformerEncoderLayer(16, 4, 30, dropout=dropout, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2)


def mlp(dropout: float = 0.2) -> nn.Module:
    """Sizes that do not divide."""
    return nn.Sequential(
        nn.Linear(6, 33), nn.Tanh(), nn.Dropout(dropout), nn.Linear(33, 10), nn.ReLU(), nn.Linear(10, 4)
    )


def normalised() -> nn.Module:
    """BatchNorm inside of what is divided."""
    return nn.Sequential(nn.Linear(6, 18), nn.BatchNorm1d(18), nn.ReLU(), nn.Linear(18, 4))


GPT_PLAN = {
    "words": ROWS,
    "places": COLUMNS,
    "head": COLUMNS,
    "layers.*.w[qkv]": COLUMNS,
    "layers.*.wo": ROWS,
    "layers.*.up": COLUMNS,
    "layers.*.down": ROWS,
}


@dataclass(frozen=True)
class Example:
    """A model, the user's plan or None, and the shape of a sample (None: words)."""

    make: Callable[[], nn.Module]
    plan: dict[str, Any] | None
    sample: tuple[int, ...] | None


EXAMPLES = {
    "mlp": Example(mlp, None, (6,)),
    "cnn": Example(Cnn, {"conv1": COLUMNS, "conv2": ROWS, "fc1": COLUMNS, "fc2": ROWS}, (1, 8, 8)),
    "cnn, conv to linear": Example(Cnn, {"conv2": COLUMNS, "fc1": ROWS}, (1, 8, 8)),
    "cnn, fc alone": Example(Cnn, None, (1, 8, 8)),
    "gpt, tied": Example(Gpt, GPT_PLAN, None),
    "gpt, gated": Example(lambda: Gpt(gated=True), {**GPT_PLAN, "layers.*.gate": COLUMNS}, None),
    "gpt, checkpointed": Example(lambda: Gpt(again=True), GPT_PLAN, None),
    "gpt, found": Example(Gpt, None, None),
    "encoder": Example(encoder, None, (5, 16)),
    "decoder": Example(Decoder, None, (5, 16)),
    "attention": Example(attention, None, (5, 16)),
    "mlp without dropout": Example(lambda: mlp(0.0), None, (6,)),
    "encoder without dropout": Example(lambda: encoder(0.0), None, (5, 16)),
    "normalised": Example(normalised, None, (6,)),
    "odd": Example(Odd, {"up": COLUMNS, "down": COLUMNS, "words": COLUMNS}, (6,)),
}


def samples(example: Example, step: int, dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    """A batch."""
    generator = torch.Generator().manual_seed(step)
    if example.sample is None:
        return torch.randint(0, WORDS, (count, LENGTH), generator=generator)
    return torch.randn(count, *example.sample, generator=generator).to(dtype)


def built(example: Example, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model, the same each time."""
    torch.manual_seed(1)
    return example.make().to(dtype)
