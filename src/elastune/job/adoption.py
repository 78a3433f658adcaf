"""Going on with a run whose workers have outlived their controller."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from elastune.cluster.base import Cluster, Handle, LeftRun
from elastune.core.errors import UserError
from elastune.core.run import Means, RunSpec
from elastune.elastic.protocol.client import CONTACT_NAME, left_behind
from elastune.job.output_dir import JOURNAL
from elastune.journal.reader import read
from elastune.journal.records import Record, RunFinished, RunStarted
from elastune.train.program.source import differences


@dataclass(frozen=True)
class LeftOver:
    """What is known of a run whose workers may train without a controller.

    Attributes:
        started: How it began last.
        kept: What is in its journal since.
    """

    started: RunStarted
    kept: list[Record]


def may_adopt(spec: RunSpec) -> bool:
    """Whether ``left_over`` finds anything."""
    return left_over(spec) is not None


def left_over(spec: RunSpec) -> LeftOver | None:
    """The run in ``spec.out``, whose workers may have outlived its controller; None where nobody is left of it.

    Raises ``UserError`` where that is another run than ``spec``, which would not be done by taking them over.
    """
    if not spec.resume or left_behind(spec.out) is None:
        return None
    found = _current(spec.out)
    if found is None:
        return None
    started = found.started
    for what, then, now in (
        ("program", started.program, str(spec.program.path)),
        ("settings (--set)", started.config, dict(spec.config)),
        ("--seed", started.seed, spec.seed),
        ("--epochs", started.epochs, spec.epochs),
        ("--sync", started.sync, str(spec.sync)),
        ("--sync-schedule", started.sync_schedule, str(spec.sync_schedule)),
        ("policies and monitors", started.adapt, spec.adapt.to_json()),
    ):
        if then != now:
            rule = f"workers of this run may still train: it goes on with the same {what}"
            fix = f"say the same as before, or remove {spec.out / CONTACT_NAME} once no worker is left"
            raise UserError(rule, f"{now}, after {then}", fix)
    if changed := differences(started.source, spec.program):
        rule = "workers of this run may still train: it goes on with the program that they have loaded"
        fix = f"undo the edit, or remove {spec.out / CONTACT_NAME} once no worker is left and add --accept-changes"
        raise UserError(rule, "; ".join(changed), fix)
    return found


def adopted(spec: RunSpec, found: LeftOver, cluster: Cluster) -> Handle | None:
    """``spec``'s run, which was ``found``, as it goes on on ``cluster``; None where nobody comes back."""
    return cluster.adopt([LeftRun(replace(spec, means=Means.from_json(found.started.means)), found.kept)])[0]


def _current(out: Path) -> LeftOver | None:
    """None where the run in ``out`` has ended, or never began."""
    path = out / JOURNAL
    records = [entry.record for entry in read(path)] if path.exists() else []
    starts = [at for at, record in enumerate(records) if isinstance(record, RunStarted)]
    if not starts:
        return None
    started, kept = records[starts[-1]], records[starts[-1] + 1 :]
    assert isinstance(started, RunStarted)
    return None if any(isinstance(record, RunFinished) for record in kept) else LeftOver(started, kept)
