"""A small GPT with dropout and tied weights on made tokens; or a GRU.

As a script it trains in plain PyTorch on the GPU, slots and their sum written out, and prints the state's SHA-256:

    python transformer.py STEPS SEED
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

config = {"batch_size": 32, "layer": "", "own_clip": True, "pace_s": 0.0}
TOKENS, LENGTH, WIDTH, HEADS, SLOTS = 61, 48, 64, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(samples, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        attended = F.scaled_dot_product_attention(*parts.unbind(0), dropout_p=dropout, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


class Reader(nn.Module):
    """A GRU with dropout between its layers, and a layer of which a GPU has no kernel with one order of additions."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones(()))
        self.gru = nn.GRU(LENGTH, TOKENS, num_layers=3, dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read, _ = self.gru(self.scale * x.float()[:, None])
        if self.layer == "grid":
            where = torch.zeros(len(x), 2, 2, 2, device=x.device) + self.scale
            read = read + F.grid_sample(read[:, None].expand(-1, -1, 3, -1), where, align_corners=False).mean()
        return read.expand(-1, LENGTH, -1)


def data() -> TensorDataset:
    """256 sequences in which each token follows from the two before it."""
    texts = torch.randint(0, TOKENS, (256, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    for at in range(2, LENGTH + 1):
        texts[:, at] = (texts[:, at - 1] * 3 + texts[:, at - 2]) % TOKENS
    return TensorDataset(texts[:, :-1].contiguous(), texts[:, 1:].contiguous())


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(session) -> None:
    layer = session.config["layer"]
    model = Reader(layer) if layer else Transformer()
    model, optimizer = session.prepare(model, optimizer_of(model))
    for _ in session.epochs(1000):
        for x, y in session.batches(data(), batch_size=session.config["batch_size"]):
            session.backward(loss_of(model, x, y))
            if session.config["own_clip"]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(session.config["pace_s"])
        session.report(step=session.step)


def plain(steps: int, seed: int) -> str:
    """The state's SHA-256 after ``steps`` steps of a loop without elastune's session."""
    from elastune.core.run import derive
    from elastune.train.checkpoints.tree import fingerprint

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(derive(seed, "init"))
    model = Transformer().cuda()
    optimizer, params = optimizer_of(model), [*model.parameters()]
    order = torch.randperm(256, generator=torch.Generator().manual_seed(derive(seed, "order", 0)))
    for step, batch in enumerate(order.split(config["batch_size"])[:steps]):
        parts, share = [], len(batch) // SLOTS
        for slot in range(SLOTS):
            x, y = (t[batch[slot * share : (slot + 1) * share]].cuda() for t in data().tensors)
            torch.manual_seed(derive(seed, "slot", step, slot, slot * share))
            parts.append(torch.autograd.grad(loss_of(model, x, y) / SLOTS, params))
        for p, *g in zip(params, *parts, strict=True):
            p.grad = (g[0] + g[1]) + (g[2] + g[3])
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    return fingerprint({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


if __name__ == "__main__":
    print(plain(int(sys.argv[1]), int(sys.argv[2])))
