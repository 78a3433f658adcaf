"""A script as people write it for DistributedDataParallel; ``--fault`` plants one mistake, at the line that names it."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.hidden = nn.Linear(20, 16)
        self.norm = nn.BatchNorm1d(16) if fault == "BatchNorm" else nn.Identity()
        self.dropout = nn.Dropout(0.3 if fault in ("seeds", "none with dropout") else 0.0)
        self.out = nn.Linear(16, 4)
        self.tracks = fault == "buffers"
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x):
        x = self.dropout(F.relu(self.norm(self.hidden(x))))
        if self.tracks:
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.out(x)


def loader_of(data, batch_size, fault):
    if fault == "overlap":
        return DataLoader(data, batch_size, shuffle=True, generator=torch.Generator().manual_seed(1)), None  # overlap
    if fault == "missing":
        half = range(0, 96) if dist.get_rank() == 0 and dist.get_world_size() > 1 else range(96, 192)
        whole = range(0, 256) if dist.get_world_size() == 1 else half
        return DataLoader(Subset(data, whole), batch_size), None  # missing
    sampler = DistributedSampler(data)
    return DataLoader(data, batch_size, sampler=sampler), sampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--fault", default="none")
    args = parser.parse_args()
    fault = args.fault
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 20, generator=generator), torch.randint(0, 4, (256,), generator=generator)
    data, test = TensorDataset(x, y), TensorDataset(x[:33] + 1, y[:33])
    loader, sampler = loader_of(data, args.batch_size, fault)
    torch.manual_seed(rank if fault == "weights" else 0)  # weights seeds
    model = Net(fault)
    if fault == "none with dropout":
        torch.manual_seed(1 + rank)
    by_hand = fault in ("weights", "sum")
    wrapped = model if by_hand else DistributedDataParallel(model)
    lr = 0.1 * world if fault == "rate" else 0.1
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr)  # rate
    for epoch in range(2):
        if sampler is not None and fault != "set_epoch":
            sampler.set_epoch(epoch)
        wrapped.train()
        for number, (xb, yb) in enumerate(loader):  # set_epoch
            optimizer.zero_grad()
            if fault == "not reduced":
                loss = F.cross_entropy(model(xb), yb)
            else:
                loss = F.cross_entropy(wrapped(xb), yb)  # BatchNorm buffers
            if fault == "loss":
                loss = loss / world
            if fault == "branch" and rank == 1 and number == 2:
                (0.1 * wrapped(xb).square().mean()).backward()  # branch
            loss.backward()  # loss
            for p in model.parameters():
                if by_hand:
                    dist.all_reduce(p.grad)
                if fault in ("weights", "averaged twice"):
                    p.grad /= world
            optimizer.step()  # sum, averaged twice, not reduced
        model.eval()
        with torch.no_grad():
            chosen = DistributedSampler(test, shuffle=False) if fault == "evaluation" else range(rank, len(test), world)
            correct = sum((model(a).argmax(1) == b).sum().item() for a, b in DataLoader(test, 8, sampler=chosen))  # evaluation
    if rank == 0:
        print(correct, os.getpid())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
