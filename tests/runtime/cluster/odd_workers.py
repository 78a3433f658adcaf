"""Workers that misbehave, that have children of their own, or that need torch."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from elastune.testing.kits.cluster_workers import FINISHED, report_of

NAP = [sys.executable, "-c", "import time; time.sleep(100)"]


def die(spec, place, client):
    how = spec.config["how"]
    client.report(report_of(0))
    print("about to die", how, flush=True)
    if how == "_exit":
        os._exit(9)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "abort":
        os.abort()
    return 0


def with_family(spec, place, client):
    """A forked child and a program of its own; then spin, with the interpreter's lock, until stopped."""
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    program = subprocess.Popen(NAP)
    client.report(report_of(0, place.rank, worker=os.getpid(), child=child, program=program.pid))
    while not client.stop_requested():
        sum(range(1000))
    return 3


def with_daemon(spec, place, client):
    """Leave a process behind that has left the process group."""
    daemon = subprocess.Popen(NAP, start_new_session=True)
    client.report(report_of(0, daemon=daemon.pid))
    return 0


def with_loaders(spec, place, client):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = iter(DataLoader(TensorDataset(torch.arange(100)), num_workers=2, persistent_workers=True))
    next(loader)
    client.report(report_of(0, worker=os.getpid(), **{f"loader{i}": p.pid for i, p in enumerate(loader._workers)}))
    if spec.config["how"] == "return":
        return 0
    if spec.config["how"] == "raise":
        raise RuntimeError("with loaders")
    time.sleep(100)
    return 0


def garble(spec, place, client):
    """Say something that is no record, from rank 1, and wait to be ended."""
    client.report(report_of(0, place.rank))
    if place.rank == 1:
        garbage = {
            "text": b"hello\n",
            "json": b'{"kind":"nothing"}\n',
            "bytes": bytes(range(256)) + b"\n",
            "endless": b"x" * (2 << 20),
        }[spec.config["garbage"]]
        while client._outbox.size_bytes:  # another thread may be sending it
            time.sleep(0.001)
        client._socket.sendall(garbage)
        client.report(report_of(1, place.rank))
        time.sleep(100)
    client.report(report_of(1, place.rank))
    client.report(FINISHED)
    return 0


def too_long(spec, place, client):
    try:
        client.report(report_of(0, **{"m" * (1 << 20): 1.0}))
    except ValueError as error:
        print(error)
        return 5
    return 0


def surroundings(spec, place, client):
    print(Path.cwd(), os.environ.get("ELASTUNE_TEST"), os.environ["OMP_NUM_THREADS"], os.environ["GLOO_SOCKET_IFNAME"])
    print("stdin:", repr(sys.stdin.read()), "session:", os.getsid(0) == os.getpid() == os.getpgrp())
    print("signals:", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    targets = []
    for number in range(256):
        with suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{number}").split(":")[0])
    print("descriptors:", sorted(targets))
    return 0


def all_reduce(spec, place, client):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(spec.execution.threads)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    client.report(report_of(0, place.rank, threads=torch.get_num_threads(), groups=len(optimizer.param_groups)))
    meeting = f"file://{spec.out / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=place.rank, world_size=place.world)
    total = torch.tensor([10.0**place.rank])
    dist.all_reduce(total)
    dist.destroy_process_group()
    client.report(report_of(1, place.rank, total=float(total)))
    client.report(FINISHED)
    return 0


def flood(spec, place, client):
    """Report far more than fits into the connection."""
    for step in range(int(spec.config["count"])):
        client.report(report_of(step, **{"m" * 100_000: 1.0}))
    client.report(FINISHED)
    return 0


def speak_and_die(spec, place, client):
    for step in range(200):
        client.report(report_of(step))
    os.kill(os.getpid(), signal.SIGKILL)
