"""DistributedDataParallel with a sampler, a process group, ranks from the environment, and a barrier."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank, world_size):
    store = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def main():
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    setup(rank, world_size)
    torch.manual_seed(12)
    x = torch.rand(80, 4)
    dataset = TensorDataset(x, (x > 0.5).float())
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=10, sampler=sampler)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    ddp_model = DDP(model)
    loss_fn = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(inputs), labels)
            loss.backward()
            optimizer.step()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", len(ddp_model.module))
    cleanup()


if __name__ == "__main__":
    main()
