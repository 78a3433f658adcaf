"""A small GPT, as nanoGPT's train.py trains one: blocks from random places of a text, warm-up and cosine decay of the
rate, gradients over micro steps, the best model kept. One process; gpt.py is the same on any workers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

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


def get_batch(data):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = torch.tensor([model(*get_batch(val_data))[1].item() for _ in range(eval_iters)])
    model.train()
    return losses.mean().item()


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def main():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=get_lr(0), betas=(0.9, 0.95), weight_decay=0.1)
    val_losses, best_val_loss = [], float("inf")
    X, Y = get_batch(train_data)
    for iter_num in range(max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        for _ in range(gradient_accumulation_steps):
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
            X, Y = get_batch(train_data)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (iter_num + 1) % eval_interval == 0:
            val_losses.append(estimate_loss(model))
            if val_losses[-1] < best_val_loss:
                best_val_loss = val_losses[-1]
                torch.save(model.state_dict(), "ckpt.pt")
    return val_losses


if __name__ == "__main__":
    print(main())
