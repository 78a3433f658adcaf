"""A network whose AdamW state is about 100 MB, for the benchmark of reshapes: made data, a few steps.

Worker ``kill`` kills itself in a step among ``of`` workers, the ninth or later. Each writes what it was doing, and
when, into the folder ``log``.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastune.elastic.worker import elastic_group
from elastune.parallel.sync import owned

config = {"width": 2304, "epochs": 1, "kill": -1, "of": 4, "log": ""}


class Timeline:
    """Spans of wall and CPU time, the latter of the main thread; gloo's threads are not in it."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self._began = time.time(), time.thread_time()

    def watch(self, owner: Any, name: str) -> None:
        """A span for every call of the function ``name`` of ``owner``."""
        called = getattr(owner, name)

        @functools.wraps(called)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.time(), time.thread_time()
            try:
                return called(*args, **kwargs)
            finally:
                self._add(name, began)

        setattr(owner, name, timed)

    def stepped(self) -> None:
        """A span since the last step's end."""
        self._add("step", self._began)
        self._began = time.time(), time.thread_time()

    def _add(self, name: str, began: tuple[float, float]) -> None:
        cpu_s = time.thread_time() - began[1]
        self.spans.append({"name": name, "at": began[0], "s": time.time() - began[0], "cpu_s": cpu_s})

    def write(self, folder: str, worker: int) -> None:
        if folder:
            Path(folder, f"{worker}.json").write_text(json.dumps(self.spans))


def train(session) -> None:
    timeline, worker, width = Timeline(), session.state.workers.worker, session.config["width"]
    doomed = session.config["kill"], session.config["of"]
    timeline.watch(elastic_group.ElasticWorkerGroup, "recover")
    timeline.watch(elastic_group.ViewComms, "take")
    timeline.watch(owned, "place")
    sizes = (784, width, width, width, 10)
    model = nn.Sequential()
    for i, (a, b) in enumerate(pairwise(sizes)):
        model.append(nn.Linear(a, b))
        if i < len(sizes) - 2:
            model.append(nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = session.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(512, 784, generator=generator), torch.randint(0, 10, (512,), generator=generator))
    for _ in session.epochs(session.config["epochs"]):
        for x, y in session.batches(data, batch_size=32):
            session.backward(F.cross_entropy(model(x), y))
            if session.ends_step and session.step >= 8 and (worker, session.size) == doomed:
                timeline.spans.append({"name": "kill", "at": time.time()})
                timeline.write(session.config["log"], worker)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                timeline.stepped()
    timeline.write(session.config["log"], worker)
