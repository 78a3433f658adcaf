"""``elastic_peers.py``'s program for torchft: one replica, as its own DDP example is written. Runs in torchft's venv.

torchft_train.py SIZE BATCH_OF_A_REPLICA FOLDER LIGHTHOUSE TIMEOUT_S; it leaves after a step at SIGTERM
"""

import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed import TCPStore
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo
from workload import TickLog, build, samples


def main(size: str, batch: int, folder: Path, lighthouse: str, timeout_s: float) -> None:
    torch.set_num_threads(1)
    model, inner = build(size)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    timeout = timedelta(seconds=timeout_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        replica_id="replica",
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), OptimizerWrapper(manager, inner)
    data, log, discarded = samples(), TickLog(folder), 0
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))
    while not leaving:
        index = torch.randint(0, len(data), (batch,))
        x, y = (tensor[index] for tensor in data.tensors)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            log.write(manager.current_step(), manager.num_participants(), manager.participating_rank() or 0, discarded)
        else:
            discarded += 1  # its samples are not seen again: the loader has moved on
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
