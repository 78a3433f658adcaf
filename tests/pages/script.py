"""The train.py of the page on commands: a script that knows nothing of elastune, on one process or on several."""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

several = "WORLD_SIZE" in os.environ
if several:
    dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(256, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
model = nn.Linear(6, 3)
model = DistributedDataParallel(model) if several else model
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
sampler = DistributedSampler(data, shuffle=True) if several else None
loader = DataLoader(data, args.batch_size, shuffle=sampler is None, sampler=sampler)
for epoch in range(args.epochs):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    accuracy = (model(x).argmax(1) == data.tensors[1]).float().mean().item()
    if not several or dist.get_rank() == 0:
        print(json.dumps({"epoch": epoch + 1, "accuracy": accuracy}))
if several:
    dist.destroy_process_group()
