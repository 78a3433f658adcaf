"""Gradients of several batches in one step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accumulation_steps = 4
batch_size = 6
num_epochs = 3


def main():
    torch.manual_seed(9)
    x = torch.rand(144, 7)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 3.5).long()), batch_size=batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    optimizer.zero_grad()
    for epoch in range(num_epochs):
        for i, (inputs, labels) in enumerate(loader):
            loss = F.cross_entropy(model(inputs), labels)
            loss = loss / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch} {loss.item() * accumulation_steps:.4f}")


if __name__ == "__main__":
    main()
