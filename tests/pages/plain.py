"""The plain.py of the pages: a script as people write it, for ``elastune init --from``."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--data", default="photos")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(256, 6)
    data = TensorDataset(x, x[:, :3].argmax(1))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(2):
        for inputs, targets in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
