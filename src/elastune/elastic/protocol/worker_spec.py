"""What one worker is to do, and how that is JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from elastune.core.divergence import Divergence
from elastune.core.errors import UserError
from elastune.core.run import Adapt, Elastic, Means, Place, Program, RunSpec
from elastune.core.start_from import StartFrom
from elastune.core.sync_plan import SyncPlan
from elastune.core.sync_schedule import SyncSchedule


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """A worker's task, and the surroundings to do it in.

    ``entry`` is the ``module:function`` to call; ``environment`` the whole environment; ``folder`` the working
    directory; ``import_path`` Python's ``sys.path``. They are the controller's, as at the start of the run: what
    started the worker's process may be older. Where ``adds`` is true that process has surroundings of its own, on
    another machine perhaps: environment and import path are what comes to those. ``place.device`` is for the launcher
    to say.
    """

    entry: str
    spec: RunSpec
    place: Place
    environment: dict[str, str]
    folder: str
    import_path: list[str]
    adds: bool = False


def spec_to_json(spec: WorkerSpec | None) -> dict[str, Any] | None:
    """``spec`` as what JSON can hold, but for paths."""
    if spec is None:
        return None
    plain = dataclasses.asdict(spec)
    plain["spec"]["means"] = spec.spec.means.to_json()
    plain["spec"]["sync_schedule"] = str(spec.spec.sync_schedule)
    return plain


def spec_from_json(fields: Any) -> WorkerSpec | None:
    """What ``spec_to_json`` was given. Raises ``ValueError`` for anything else."""
    if fields is None or isinstance(fields, WorkerSpec):
        return fields
    try:
        told = dict(fields["spec"])
        data = told["program"]["data"]
        program = Program(Path(told["program"]["path"]), told["program"]["train"], data and Path(data))
        known = {"program": program, "out": Path(told["out"]), "means": Means.from_json(told["means"])}
        for name in ("parent", "from_dcp", "spool"):
            known[name] = None if told[name] is None else Path(told[name])
        known["start_from"] = None if told["start_from"] is None else StartFrom.from_json(told["start_from"])
        known["sync"] = SyncPlan(**told["sync"])
        known["sync_schedule"] = SyncSchedule.parse(told["sync_schedule"])
        known["elastic"] = Elastic(**told["elastic"])
        known["adapt"] = Adapt(**{name: tuple(texts) for name, texts in told["adapt"].items()})
        known["divergence"] = Divergence(told["divergence"]["factor"], tuple(told["divergence"]["metrics"]))
        return WorkerSpec(**{**fields, "spec": RunSpec(**{**told, **known}), "place": Place(**fields["place"])})
    except (KeyError, TypeError, AttributeError, UserError) as error:
        raise ValueError(f"no worker's specification: {error!r}") from None
