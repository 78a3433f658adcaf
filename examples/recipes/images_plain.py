"""An image classifier, as timm's train.py trains one: mixed images, smoothed labels, warm-up and cosine decay in each
update, an average of the weights, the best one kept. One process; images.py is the same on any workers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

epochs, batch_size, lr, warmup_updates, smoothing, mixup = 4, 32, 0.01, 8, 0.1, 0.2

source = torch.Generator().manual_seed(0)
labels = torch.randint(0, 4, (320,), generator=source)
images = torch.randn(320, 3, 12, 12, generator=source) + F.one_hot(labels, 12)[:, None, None].float()
train_set, val_set = TensorDataset(images[:256], labels[:256]), TensorDataset(images[256:], labels[256:])


def build():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AvgPool2d((6, 2)),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(96, 4),
    )  # fmt: skip


def mixed(x, y):
    share, order = torch.distributions.Beta(mixup, mixup).sample().item(), torch.randperm(len(x))
    targets = F.one_hot(y, 4).float() * (1 - smoothing) + smoothing / 4
    return share * x + (1 - share) * x[order], share * targets + (1 - share) * targets[order]


def main():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    loader = DataLoader(train_set, batch_size, shuffle=True, drop_last=True)
    updates = epochs * len(loader)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup_updates)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates - warmup_updates)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [warmup_updates])
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    accuracies, best = [], 0.0
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            x, targets = mixed(x, y)
            loss = F.cross_entropy(model(x), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ema.update_parameters(model)
        ema.eval()
        right = 0
        with torch.no_grad():
            for x, y in DataLoader(val_set, 64):
                right += (ema(x).argmax(1) == y).sum().item()
        accuracies.append(right / len(val_set))
        if accuracies[-1] > best:
            best = accuracies[-1]
            torch.save(ema.state_dict(), "model_best.pth")
    return accuracies


if __name__ == "__main__":
    print(main())
