"""``for it in range(max_iters)`` with ``get_batch``, in a function."""

import torch
import torch.nn as nn
import torch.nn.functional as F

batch_size = 8
max_iters = 12
learning_rate = 1e-2
torch.manual_seed(7)
data = (torch.arange(300) * 5 // 2) % 13


def get_batch():
    ix = torch.randint(len(data) - 1, (batch_size,))
    return data[ix], data[ix + 1]


def main():
    model = nn.Embedding(13, 13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    it = 0
    while it < max_iters:
        xb, yb = get_batch()
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        it += 1
    print(loss.item())


if __name__ == "__main__":
    main()
