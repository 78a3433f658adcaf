"""A script written for Lightning's Fabric, as its own examples are, on made data; the import says whose it is."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from lightning.fabric.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if os.environ.get("LIGHTNING_ITSELF"):
    from lightning.fabric import Fabric
else:
    from elastune.adapters.fabric import Fabric

config = {"faults": [], "epochs": 2, "lr": 0.02, "shuffle": True, "dropout": 0.1, "scale": 0.0, "divide": False}


def loaders(shuffle: bool) -> tuple[DataLoader, DataLoader]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(110, 6, generator=generator)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    train, test = TensorDataset(x[:60], y[:60]), TensorDataset(x[60:], y[60:])
    return DataLoader(train, 20, shuffle=shuffle), DataLoader(test, 16)


def main(seed: int = 42) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=config["scale"] or 1.0)
    precision = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)} if config["scale"] else {}
    divided = {"divide_evaluation": True} if config["divide"] else {}
    fabric = Fabric(accelerator="cpu", devices=1, **precision, **divided)
    fabric.seed_everything(seed)
    fabric.launch()
    train_loader, test_loader = fabric.setup_dataloaders(*loaders(config["shuffle"]))
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(config["dropout"]), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
    results = []
    for epoch in range(config["epochs"]):
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        scheduler.step()
        model.eval()
        losses, right, seen = [], 0, 0
        with torch.no_grad():
            for inputs, targets in test_loader:
                outputs = model(inputs)
                losses.append(F.cross_entropy(outputs, targets, reduction="sum"))
                right += int((outputs.argmax(1) == targets).sum())
                seen += len(targets)
        results.append(float(fabric.all_reduce(torch.stack(losses).sum(), reduce_op="sum")) / len(test_loader.dataset))
        rate = scheduler.get_last_lr()[0]
        fabric.print(f"epoch {epoch}: loss {results[-1]:.4f}, rate {rate:.5f}")
        accuracy = float(fabric.all_reduce(torch.tensor(float(right)), reduce_op="sum")) / len(test_loader.dataset)
        fabric.log_dict({"loss": results[-1], "accuracy": accuracy, "rate": rate, "seen": seen}, step=epoch)
    return results
