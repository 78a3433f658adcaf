"""``elastic.py``'s program for the cost of a step: blocks of an elastic run and of plain DDP take turns."""

import json
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from workload import build, samples

config = {"batch_size": 64, "folder": "", "rounds": 40, "steps": 10}


def plain_steps(session, folder, data):
    """The loop a user would write with torch alone, on a process group of its own; yields after each step."""
    store = dist.FileStore(str(folder / "store"), session.size)
    group = dist.ProcessGroup(store, session.rank, session.size)  # beside whatever the elastic run uses
    gloo = dist.ProcessGroupGloo(store, session.rank, session.size, timedelta(seconds=60))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    model, optimizer = build("small")
    wrapped = DistributedDataParallel(model, process_group=group)
    batch, share = session.config["batch_size"], session.config["batch_size"] // session.size
    while True:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
        for at in range(session.rank * share, len(data) - batch + 1, batch):
            x, y = (tensor[order[at : at + share]] for tensor in data.tensors)
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def elastic_steps(session, data):
    model, optimizer = session.prepare(*build("small"))
    for _ in session.epochs(10**9):
        for x, y in session.batches(data, batch_size=session.config["batch_size"], drop_last=True):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                yield


def train(session):
    asked, data = session.config, samples()
    folder = Path(asked["folder"])
    variants = {"elastic": elastic_steps(session, data), "ddp": plain_steps(session, folder, data)}
    times = {name: [] for name in variants}
    for turn in range(-1, asked["rounds"]):  # the first warms up
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            next(variants[name])  # start together
            started = time.perf_counter()
            for _ in range(asked["steps"]):
                next(variants[name])
            if turn >= 0:
                times[name].append((time.perf_counter() - started) / asked["steps"])
    if session.rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    session.sum(0)  # nobody leaves while another still trains
