"""Training and evaluation by one function with ``train=True``; a second optimizer argument decides; LR plateau."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def run_epoch(model, loader, criterion, optimizer=None):
    training = optimizer is not None
    model.train(training)
    total, count = 0.0, 0
    for x, y in loader:
        with torch.set_grad_enabled(training):
            loss = criterion(model(x), y)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total += loss.item() * len(x)
        count += len(x)
    return total / count


def main():
    torch.manual_seed(70)
    x = torch.rand(110, 4)
    y = x.sin().sum(1, keepdim=True)
    train_loader = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=16, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[80:], y[80:]), batch_size=16)
    model = nn.Sequential(nn.Linear(4, 10), nn.SiLU(), nn.Linear(10, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    num_epochs = 3
    best = float("inf")
    for epoch in range(num_epochs):
        train_loss = run_epoch(model, train_loader, criterion, optimizer)
        val_loss = run_epoch(model, val_loader, criterion)
        scheduler.step(val_loss)
        if val_loss < best:
            best = val_loss
        print(f"{epoch + 1}: {train_loss:.4f} {val_loss:.4f}")


if __name__ == "__main__":
    main()
