"""torchrun's program of ``elastic_peers.py`` and ``hosts.py``: its documentation's loop, a checkpoint every k steps.

Started by ``python -m torch.distributed.run`` as: torchrun_train.py SIZE GLOBAL_BATCH FOLDER CHECKPOINT_EVERY
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from workload import TickLog, build, emulate, samples


def main(size: str, batch: int, folder: Path, every: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(size)
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        step = kept["step"]
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    wrapped = DistributedDataParallel(model)
    data, log = samples(), TickLog(folder)
    share = batch // world
    while True:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(step * batch // len(data)))
        at = step * batch % len(data) + rank * share
        x, y = (tensor[order[at : at + share]] for tensor in data.tensors)
        emulate(len(x))
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log.write(step, world, rank)
        if rank == 0 and step % every == 0:
            fresh = checkpoint.with_suffix(".new")
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, fresh)
            os.replace(fresh, checkpoint)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
