"""``hosts.py``'s program for Ray Train: torchrun's loop under its elastic trainer, a checkpoint every k steps.

ray_train.py SIZE GLOBAL_BATCH FOLDER CHECKPOINT_EVERY ADDRESS LOW HIGH; runs on the head's host, in Ray Train's venv
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

import ray
import torch
import torch.nn.functional as F
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.parallel import DistributedDataParallel
from workload import TickLog, build, emulate, samples

GROWS_S = 1.0  # how often it looks for room for more workers; 60 by default
FAILURES = 1000


def loop(config: dict) -> None:
    torch.set_num_threads(1)
    rank, world = train.get_context().get_world_rank(), train.get_context().get_world_size()
    model, optimizer = build(config["size"])
    step = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            kept = torch.load(Path(folder) / "kept.pt", weights_only=True)
        step = kept["step"]
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    wrapped = DistributedDataParallel(model)
    data, log, batch = samples(), TickLog(Path(config["folder"])), config["batch"]
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
        if step % config["every"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    kept = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(kept, Path(folder) / "kept.pt")
                train.report({"step": step}, checkpoint=train.Checkpoint(folder) if rank == 0 else None)


def main(size: str, batch: int, folder: Path, every: int, address: str, low: int, high: int) -> None:
    ray.init(address=address, _node_ip_address=address.rpartition(":")[0], log_to_driver=False)
    TorchTrainer(
        loop,
        train_loop_config={"size": size, "batch": batch, "folder": str(folder), "every": every},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(
            num_workers=(low, high),
            resources_per_worker={"CPU": 1},
            placement_strategy="SPREAD",
            elastic_resize_monitor_interval_s=GROWS_S,
        ),
        run_config=train.RunConfig(
            name="hosts",
            storage_path=str(folder / "ray"),
            failure_config=train.FailureConfig(max_failures=FAILURES),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    *first, every, address, low, high = sys.argv[1:]
    main(first[0], int(first[1]), Path(first[2]), int(every), address, int(low), int(high))
