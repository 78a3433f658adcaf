"""``gpu.py``'s program: ResNet-50 or the smallest GPT-2 on made data; ``size="small"``: where there is no GPU."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

config = {"model": "resnet", "size": "full", "parts": 1, "pace_s": 0.0}

BATCH = {"full": {"resnet": 128, "gpt": 32}, "small": {"resnet": 16, "gpt": 8}}
"""Images, or texts, of a global batch."""
PASSES = 4  # batches of an epoch
PIXELS = {"full": 224, "small": 16}
LENGTH = {"full": 512, "small": 16}
TOKENS = {"full": 50257, "small": 101}


class Bottleneck(nn.Module):
    """He et al. 2015, with the stride in the 3x3 convolution."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.short = nn.Identity() if inside == out and stride == 1 else nn.Sequential(
            nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.path(x) + self.short(x))


class ResNet(nn.Module):
    """ResNet-50 (25.6 million parameters): ``blocks`` of a stage, the first stage's ``width``."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]  # fmt: skip
        inside = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                layers.append(Bottleneck(inside, width << stage, 2 if stage and not block else 1))
                inside = 4 * (width << stage)
        self.layers = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(images.float() / 128 - 1))


class Block(nn.Module):
    """Attention and MLP, each behind a normalisation."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(*parts.unbind(0), dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(samples, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    """Radford et al. 2019, the smallest (124 million parameters), with tied embeddings and dropout."""

    def __init__(self, tokens: int, places: int = 1024, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(places, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(width, heads, 0.1) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(x) + self.places.weight[: x.shape[1]])
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def build(model: str, size: str) -> nn.Module:
    if model == "resnet":
        return ResNet() if size == "full" else ResNet((1, 1), width=4, classes=10)
    return Gpt(TOKENS[size]) if size == "full" else Gpt(TOKENS[size], places=16, width=16, heads=2, layers=2)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(model, ResNet):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def data(model: str, size: str) -> TensorDataset:
    """Noise with random labels; images are bytes, as they come from a decoder."""
    source, count = torch.Generator().manual_seed(0), PASSES * BATCH[size][model]
    if model == "resnet":
        images = torch.randint(0, 256, (count, 3, PIXELS[size], PIXELS[size]), dtype=torch.uint8, generator=source)
        return TensorDataset(images, torch.randint(0, 10, (count,), generator=source))
    texts = torch.randint(0, TOKENS[size], (count, LENGTH[size] + 1), generator=source)
    return TensorDataset(texts[:, :-1].contiguous(), texts[:, 1:].contiguous())


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = model(x)
    return F.cross_entropy(scores.flatten(0, -2), y.flatten())


def train(session) -> None:
    name, size = session.config["model"], session.config["size"]
    model = build(name, size)
    model, optimizer = session.prepare(model, optimizer_of(model))
    samples, batch_size = data(name, size), BATCH[size][name] // session.config["parts"]
    for _ in session.epochs(1000):
        for x, y in session.batches(samples, batch_size=batch_size):
            session.backward(loss_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(session.config["pace_s"])
