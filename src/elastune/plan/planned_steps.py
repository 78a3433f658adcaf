"""What the record of a cluster's plan says of steps, of any means and batch: its constants, in the physical form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.journal.entry import Entry
from elastune.journal.records import PlanMade
from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.terms import CONSTANTS, seconds
from elastune.plan.steps.work import chain_of

OWN = ("replicated", "zero", "sharded", "tensor", "pipeline")  # parts of mechanisms that the step model speaks of

UNTOLD = 1e-12  # seconds of a constant that plans of before did not have


def plan_told(entries: Sequence[Entry]) -> PlanMade | None:
    """The last plan that a journal tells of."""
    made = [entry.record for entry in entries if isinstance(entry.record, PlanMade)]
    return made[-1] if made else None


def predicted_step(made: PlanMade, means: Means, batch: int) -> float | None:
    """Seconds by the plan's physical form; None for mechanisms that it does not speak of."""
    if any(part not in OWN for part in means.mechanism.split("+")):
        return None
    size, mesh = made.found["size"], means.first_mesh
    micro = min(means.micro_batch or batch, math.ceil(batch / mesh.batch))
    columns = (batch, micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, made.asked["workers_each"])
    splits = StepSplits(*(np.array([each], float) for each in columns))
    known = {
        name: size[name]
        for name in ("whole_flops", "tensor_sums", "summed_bytes", "gathered", "divided", "fullest", "fullest_bytes")
        if name in size
    }
    work = chain_of(size["layers"], size["flops"], size["kept_bytes"], size["gradient_bytes"], **known)
    sharded = np.array(["sharded" in means.mechanism.split("+")])
    constants = np.array([made.constants.get(name, UNTOLD) for name in CONSTANTS])
    return float(seconds(constants, work, splits, sharded)[0])


def check_program(made: PlanMade, program: object) -> None:
    """Raise ``UserError`` where ``made`` is of another program than ``program``: its path, or a mapping that has it."""
    path = str(program.get("path", "")) if isinstance(program, Mapping) else str(program)
    if Path(path).resolve() != Path(made.program).resolve():
        raise UserError("a plan must be of the program that ran", f"{made.program}, not {path}", "use another --plan")
