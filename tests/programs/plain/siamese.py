"""Pairs of samples by one network; the data set draws pairs by their number."""

import argparse

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.rand(count, 6, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        other = (index * 7 + 3) % len(self.x)
        same = float((self.x[index].sum() > 3) == (self.x[other].sum() > 3))
        return self.x[index], self.x[other], torch.tensor(same)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, one, two):
        return self.head(torch.cat((self.body(one), self.body(two)), 1))


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    criterion = nn.BCELoss()
    for batch_idx, (images_1, images_2, targets) in enumerate(train_loader):
        images_1, images_2, targets = images_1.to(device), images_2.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(epoch, batch_idx * len(images_1), loss.item())
            if args.dry_run:
                break


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--no-accel", action="store_true")
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()
    use_accel = not args.no_accel and torch.cuda.is_available()
    torch.manual_seed(1)
    if use_accel:
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")
    train_kwargs = {"batch_size": args.batch_size, "shuffle": True}
    if use_accel:
        train_kwargs.update({"num_workers": 1, "pin_memory": True})
    train_loader = DataLoader(Pairs(100), **train_kwargs)
    model = SiameseNetwork().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        scheduler.step()


if __name__ == "__main__":
    main()
