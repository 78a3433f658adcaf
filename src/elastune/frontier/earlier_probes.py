"""Steps that earlier runs have measured, from their journals: of the same program and settings on like hardware.

A journal counts only where all is alike that a step's time depends on, but for the mesh and the samples of a pass,
which are what it tells of. Others are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Config, Means, Program
from elastune.job.output_dir import JOURNAL
from elastune.journal.reader import read
from elastune.journal.records import RunContext, RunFinished, RunStarted, WorkerMemory

FEWEST_STEPS = 8  # of a median that counts


@dataclass(frozen=True)
class EarlierProbe:
    """``step_s`` of ``mesh`` in passes of ``micro`` samples, and what its workers held."""

    mesh: Mesh
    micro: int
    step_s: float
    memory: Sequence[WorkerMemory]


def earlier_probes(
    folders: Iterable[Path], program: Program, config: Config, like: RunContext | None
) -> tuple[EarlierProbe, ...]:
    """From the runs in ``folders``, each that of a run, or one that has such folders; the last of like ones counts.

    Args:
        folders: Where to look.
        program: Of which the runs must be.
        config: That they must have been given.
        like: Data, model, hardware and software that they must have had; None: nothing is known, and nothing counts.

    Raises:
        UserError: For a folder without a journal, and for a journal that cannot be read.
    """
    found: dict[tuple[Mesh, int], EarlierProbe] = {}
    for journal in (each for folder in folders for each in journals_in(folder)):
        probe = _probe_of(journal, program, config, like)
        if probe is not None:
            found[probe.mesh, probe.micro] = probe
    return tuple(found.values())


def journals_in(folder: Path) -> list[Path]:
    """Of a run's folder, or of the folders in it. Raises ``UserError`` where there are none."""
    found = sorted([*folder.glob(JOURNAL), *folder.glob(f"*/{JOURNAL}")])
    if not found:
        raise UserError("earlier runs must have journals", str(folder), "name a run's folder, or one that has such")
    return found


def _probe_of(journal: Path, program: Program, config: Config, like: RunContext | None) -> EarlierProbe | None:
    records = [entry.record for entry in read(journal)]
    started = [record for record in records if isinstance(record, RunStarted)]
    finished = [record for record in records if isinstance(record, RunFinished)]
    if len(started) != 1 or len(finished) != 1 or like is None:
        return None
    begun, end = started[0], finished[0]
    means = Means.from_json(begun.means)
    plain = Means(
        mode="fast",
        mesh=means.mesh,
        mechanism=means.mechanism,
        micro_batch=means.micro_batch,
        num_slots=means.num_slots,
        copies=means.copies,
    )
    alike = (
        (Path(begun.program).resolve(), begun.config, end.context) == (program.path.resolve(), dict(config), like)
        and plain == means
        and begun.sync == "allreduce"
        and not begun.sync_schedule
        and not any(begun.adapt.values())
        and (end.workers, end.hosts) == (means.workers, 1)
    )
    if not alike or means.micro_batch is None or end.step_s is None or end.steps < FEWEST_STEPS:
        return None
    return EarlierProbe(means.first_mesh, means.micro_batch, end.step_s, tuple(end.memory))
