"""A session of one worker in this process, for tests and benchmarks of training functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from elastune.adapt.policies.base import Policy
from elastune.core.journal.records import Record
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group
from elastune.train.session import Session


def lone_session(
    out: Path,
    *,
    config: dict[str, Any] | None = None,
    send: Callable[[Record], None] = lambda record: None,
    stop_requested: Callable[[], bool] = lambda: False,
    group: Group | None = None,
    policies: Mapping[str, type[Policy]] = MappingProxyType({}),
    **spec: Any,
) -> Session:
    """A session as worker processes get it, alone on the CPU. ``spec``: fields of ``RunSpec``, ``execution`` too."""
    spec.setdefault("execution", ExecutionSettings(num_slots=4))
    spec.setdefault("checkpoint_every_steps", 0)
    run = RunSpec(Program(out / "none.py"), out, **spec)
    return Session(
        run,
        WorkerGroup(group or Group()),
        torch.device("cpu"),
        config=config or {},
        send=send,
        stop_requested=stop_requested,
        policies=policies,
    )
