"""What stays of a trial that is over: a policy decides, the journal tells, ensembles and transfer find it there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from elastune.cluster.run_files import RunFiles
from elastune.journal.records import ArtifactKept, ArtifactRemoved
from elastune.journal.trials import TrialLife, TrialTable
from elastune.search.analysis.front import nondominated
from elastune.train.checkpoints.checkpoint import of_step

Kept = Literal["state", "nothing"]


class Retention(Protocol):
    """Asked when a trial ends well, and again when another one that ended may have overtaken it."""

    def keep(self, trial: TrialLife, standing: Mapping[int, tuple[float, ...]]) -> Kept:
        """What to keep. ``standing``: the values of the complete trials so far; smaller is better."""
        ...


class KeepNothing:
    """Results are in the journal: what was trained goes."""

    def keep(self, trial: TrialLife, standing: Mapping[int, tuple[float, ...]]) -> Kept:
        return "nothing"


class KeepState:
    """Every trial's newest checkpoint stays: later trials begin with it."""

    def keep(self, trial: TrialLife, standing: Mapping[int, tuple[float, ...]]) -> Kept:
        return "state"


class KeepFront:
    """The newest checkpoints of the trials that no other dominates stay."""

    def keep(self, trial: TrialLife, standing: Mapping[int, tuple[float, ...]]) -> Kept:
        if trial.number not in standing:
            return "nothing"
        on_front = nondominated(np.array(list(standing.values()), dtype=float))
        return "state" if dict(zip(standing, on_front, strict=True))[trial.number] else "nothing"


class Keeper:
    """Does what ``policy`` decides with the trials' folders in ``out``."""

    def __init__(self, policy: Retention, files: RunFiles, out: Path) -> None:
        self._policy = policy
        self._files = files
        self._out = out

    def ended(
        self, number: int, folder: Path, table: TrialTable, standing: Mapping[int, tuple[float, ...]]
    ) -> list[ArtifactKept | ArtifactRemoved]:
        """Trial ``number``, which ran in ``folder``, ended well. Returns what to record."""
        told: list[ArtifactKept | ArtifactRemoved] = []
        if self._policy.keep(table.trials[number], standing) == "nothing":
            self._files.remove(folder)
        elif (kept := self._artifact(table.trials[number], folder)) is not None:
            told.append(kept)
        for other, artifact in table.artifacts.items():
            if other != number and self._policy.keep(table.trials[other], standing) == "nothing":
                self._files.remove((self._out / artifact.path).parents[1])
                told.append(ArtifactRemoved(other))
        return told

    def _artifact(self, life: TrialLife, folder: Path) -> ArtifactKept | None:
        """The newest checkpoint of a trial; None where it has none."""
        found = self._files.checkpoints(folder)
        run = life.finished.run if life.finished is not None else None
        if not found or run is None:
            return None
        path = of_step(folder / "checkpoints", found[-1]).relative_to(self._out)
        return ArtifactKept(life.number, found[-1], path.as_posix(), run.sha256)
