"""A plain PyTorch script with argparse and DistributedDataParallel: elastune tunes it as it is.

torchrun --nproc-per-node 2 examples/plain_ddp/train.py --lr 0.1
elastune tune --command "torchrun --standalone --nproc-per-node {workers} examples/plain_ddp/train.py --lr {lr}
    --batch-size {batch_per_worker} --epochs {epochs}" --space examples/plain_ddp/space.yaml --workers 2 --trials 10
"""

import argparse
import json

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of each process in a step")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    inputs, labels = rings(np.random.default_rng(0), 2400)
    train_x, train_y, valid_x, valid_y = inputs[:2000], labels[:2000], inputs[2000:], labels[2000:]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    shuffle = torch.Generator().manual_seed(args.seed)

    for epoch in range(1, args.epochs + 1):
        order = torch.randperm(len(train_x), generator=shuffle)
        whole = args.batch_size * world
        for step in range(len(order) // whole):
            mine = order[step * whole + rank : (step + 1) * whole : world]
            optimizer.zero_grad()
            F.cross_entropy(model(train_x[mine]), train_y[mine]).backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                accuracy = (model.module(valid_x).argmax(1) == valid_y).float().mean().item()
            print(json.dumps({"epoch": epoch, "accuracy": accuracy}))
        dist.barrier()
    dist.destroy_process_group()


def rings(random, samples):
    """Points in three noisy rings around the origin, and the ring of each."""
    labels = random.integers(0, 3, samples)
    radius = labels + 1 + random.normal(0, 0.25, samples)
    angle = random.uniform(0, 2 * np.pi, samples)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return torch.tensor(points, dtype=torch.float32), torch.tensor(labels)


if __name__ == "__main__":
    main()
