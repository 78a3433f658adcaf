"""A script as people write it for Accelerate; ``--fault`` plants one mistake, at the line that names it."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.hidden = nn.Linear(20, 16)
        self.norm = nn.BatchNorm1d(16) if fault == "BatchNorm" else nn.Identity()
        self.dropout = nn.Dropout(0.3 if fault == "seeds" else 0.0)
        self.out = nn.Linear(16, 4)
        self.counts = fault == "buffers"
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        x = self.dropout(F.relu(self.norm(self.hidden(x))))
        if self.counts:
            self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        return self.out(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--fault", default="none")
    args = parser.parse_args()
    fault = args.fault
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 20, generator=generator), torch.randint(0, 4, (256,), generator=generator)
    data, test = TensorDataset(x, y), TensorDataset(x[:33] + 1, y[:33])
    set_seed(3)  # seeds
    net = Net(fault)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * world if fault == "rate" else 0.1)  # rate
    if fault == "missing" and world > 1:
        data = Subset(data, range(128))
    loader = DataLoader(data, args.batch_size, shuffle=fault != "overlap")  # missing overlap
    model, optimizer = accelerator.prepare(net, optimizer)
    if fault != "overlap":
        loader = accelerator.prepare(loader)
    if fault == "sum":
        model = net
    for _ in range(2):
        model.train()
        for number, (xb, yb) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy((net if fault == "not reduced" else model)(xb), yb)  # BatchNorm buffers
            if fault == "loss":
                loss = loss / world
            if fault == "branch" and rank == 1 and number == 2:
                accelerator.backward(0.1 * model(xb).square().mean())  # branch
            accelerator.backward(loss)  # loss
            for p in net.parameters():
                if fault == "sum" and world > 1:
                    torch.distributed.all_reduce(p.grad)
                if fault == "averaged twice":
                    p.grad /= world
            optimizer.step()  # sum, averaged twice, not reduced
        model.eval()
        with torch.no_grad():
            loaded = DataLoader(test, 8)
            loaded = accelerator.prepare(loaded) if fault == "evaluation" else loaded
            right = sum((model(a).argmax(1) == b).sum().item() for a, b in loaded)  # evaluation
    accelerator.print(right)
    accelerator.end_training()


if __name__ == "__main__":
    main()
