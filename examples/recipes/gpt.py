"""A small GPT, as nanoGPT's train.py trains one: blocks from random places of a text, warm-up and cosine decay of the
rate, gradients over micro steps, the best model kept. gpt_plain.py is the same in one process.

    elastune run examples/recipes/gpt.py --workers 2
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, RandomSampler

batch_size, block_size, gradient_accumulation_steps = 8, 32, 2
max_iters, eval_interval, eval_iters = 60, 20, 4
learning_rate, min_lr, warmup_iters, grad_clip = 3e-3, 3e-4, 10, 1.0
n_layer, n_head, n_embd, vocab_size = 2, 2, 32, 16

letters = torch.arange(6000)
text = (letters * letters // 7 + letters // 3) % vocab_size  # made, and to be learnt
train_data, val_data = text[:5000], text[5000:]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        layers = (
            nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, 0.1, F.gelu, batch_first=True, norm_first=True)
            for _ in range(n_layer)
        )
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(n_embd, vocab_size)
        self.register_buffer("mask", torch.ones(block_size, block_size).triu(1).bool(), persistent=False)

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Blocks(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data) - block_size

    def __getitem__(self, i):
        return self.data[i : i + block_size], self.data[i + 1 : i + 1 + block_size]


def get_batch(data, device):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


@torch.no_grad()
def estimate_loss(model, device):
    model.eval()
    losses = torch.tensor([model(*get_batch(val_data, device))[1].item() for _ in range(eval_iters)])
    model.train()
    return losses.mean().item()


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def train(session):
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=get_lr(0), betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = session.prepare(model, optimizer)
    blocks, size = Blocks(train_data), batch_size * gradient_accumulation_steps
    places = RandomSampler(blocks, replacement=True, num_samples=size * eval_interval)
    for _ in session.epochs(max_iters // eval_interval):
        for X, Y in session.batches(blocks, size, sampler=places):
            _, loss = model(X, Y)
            session.backward(loss)
            session.clip_grad_norm_(grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = get_lr(session.step + session.ends_step)
        session.report(loss=estimate_loss(model, session.device))
        session.save_best("loss", "min")
