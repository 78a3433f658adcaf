"""A script written for Hugging Face Accelerate, as its own examples are, on made data; the import says whose it is."""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if os.environ.get("ACCELERATE_ITSELF"):
    from accelerate import Accelerator
    from accelerate.utils import set_seed
else:
    from elastune.adapters.accelerate import Accelerator, set_seed


def loaders(batch_size: int, shuffle: bool = True) -> tuple[DataLoader, DataLoader]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(150, 6, generator=generator)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    train, test = TensorDataset(x[:100], y[:100]), TensorDataset(x[100:], y[100:])
    return DataLoader(train, batch_size, shuffle=shuffle), DataLoader(test, 16)


def training_function(args: argparse.Namespace) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    train_loader, test_loader = loaders(args.batch_size, not args.in_order)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    results = []
    for epoch in range(args.num_epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                inputs, targets = batch
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        model.eval()
        right, losses, seen = 0, [], 0
        for inputs, targets in test_loader:
            with torch.no_grad():
                outputs = model(inputs)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), targets))
            losses.append(accelerator.gather_for_metrics(F.cross_entropy(outputs, targets).repeat(16)))
            right += int((predictions == references).sum())
            seen += len(references)
        accuracy, loss = right / seen, float(torch.cat(losses).double().mean())
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}, rate {scheduler.get_last_lr()[0]:.5f}, seen {seen}")
        accelerator.log({"accuracy": accuracy, "loss": loss, "rate": scheduler.get_last_lr()[0]}, step=epoch)
        results.append(loss)
        if args.output_dir:
            accelerator.save_state(args.output_dir)
    accelerator.end_training()
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=20)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--output_dir", default="")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--in_order", action="store_true")
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
