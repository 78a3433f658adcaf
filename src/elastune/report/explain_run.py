"""A run in words, from its journal alone: whether its batch was too large, how its model lay on workers, what that
took, and what else would have."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.core.mechanism_name import MechanismName
from elastune.core.mesh import Mesh
from elastune.core.run import Means
from elastune.core.text import byte_count, count, duration, plain
from elastune.journal.entry import Entry
from elastune.journal.records import Compiled, LayersDivided, Regrouped, RunStarted, StagesCut, WorkerMemory
from elastune.plan.state_bytes import StateBytes, state_of_worker
from elastune.report.explain import Explanation, Part
from elastune.report.gather import RunStory
from elastune.report.tables.accepted import accepted_lines
from elastune.report.tables.adapting import batch_line, gather_adaptation
from elastune.report.tables.decision_text import stages_line
from elastune.report.tables.memory import divided_lines
from elastune.report.tables.sync_story import gather_sync

OTHERS = ("replicated", "zero", "sharded", "tensor", "pipeline")
"""Mechanisms that a run's own is put beside."""
MOST_COPIES = 3
"""Further holders of each part, beyond those along ``data``, that are thought of."""


def explain_run(run: RunStory, entries: Sequence[Entry]) -> Explanation:
    """Put a run into words, finished or not."""
    parts = (
        Part("Accepted changes", tuple(f"{line[:1].upper()}{line[1:]}." for line in accepted_lines(entries))),
        Part("Batch and noise scale", _batch(entries)),
        Part("How workers agreed", _agreed(entries)),
        Part("Divided layers", divided_lines(run.divided, _last_mesh(Means.from_json(run.started.means), entries))),
        Part("Stages", _stages(entries)),
        Part("Compiling", _compiling(entries)),
        Part("Memory of a worker", _memory(run, entries)),
    )
    return Explanation(tuple(part for part in parts if part.lines))


def _batch(entries: Sequence[Entry]) -> tuple[str, ...]:
    """What the noise scale says of the global batch; nothing where it was not measured."""
    line = batch_line(gather_adaptation(entries))
    return (line,) if line else ()


def _agreed(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Every strategy and topology; nothing where the run asked for none and had none."""
    story = gather_sync(entries)
    words = {"strategy": "", "topology": "sums by "}
    return tuple(
        f"From step {each.step} on: {words[each.which]}{plain(each.what, 120)} ({plain(each.why, 300)})."
        for each in (story.all if story.any else ())
    )


def _stages(entries: Sequence[Entry]) -> tuple[str, ...]:
    """Every cut that the run had, in order."""
    cuts = [stages_line(entry.record) for entry in entries if isinstance(entry.record, StagesCut)]
    return tuple(f"{line}." for line in dict.fromkeys(cuts))


def _compiling(entries: Sequence[Entry]) -> tuple[str, ...]:
    """What torch.compile took, worker by worker; nothing where nobody compiled."""
    told: dict[int, list[Compiled]] = {}
    for entry in entries:
        if isinstance(entry.record, Compiled):
            told.setdefault(entry.record.worker, []).append(entry.record)
    return tuple(
        f"Worker {worker} compiled for {duration(sum(each.seconds for each in found))}, the last time up to step "
        f"{found[-1].step}; steps that it did so in are not in the times of steps."
        for worker, found in sorted(told.items())
    )


def _memory(run: RunStory, entries: Sequence[Entry]) -> tuple[str, ...]:
    end, means = run.finished, Means.from_json(run.started.means)
    told = end.memory if end is not None else []
    if end is None or not told:
        return ("Not known before a run has ended well after three steps: then it is measured, and modelled by that.",)
    name, mesh = means.parts, _last_mesh(means, entries)
    undivided = _undivided(run.divided) if name.tensor else 0.0
    once = float(sum(each.optimizer - each.copies for each in told))
    if not name.dividing:
        once /= len(told)
    once /= 1 + undivided * (mesh.tensor - 1)  # each worker along that axis has told of that part
    parameters = 4.0 * end.context.parameters if end.context is not None else 0.0
    fullest = max(told, key=lambda each: each.parameters + each.gradients + each.optimizer)
    lines = [f"Measured, the fullest of {count(len(told), 'worker')} ({name}, {mesh}): {_told(_measured(fullest))}."]
    if name.foreign or not parameters:
        return tuple(lines)
    whole = StateBytes(parameters, parameters, once)
    copies = means.copies or 1
    if once and name.dividing:  # by as many as come nearest to what was measured

        def missed(copies: int) -> float:
            return abs(state_of_worker(whole, name, mesh, copies, undivided).optimizer - fullest.optimizer)

        copies = min(range(mesh.data, min(mesh.workers, mesh.data + MOST_COPIES) + 1), key=missed)
    evenly = f"if all that is divided divides evenly ({count(copies, 'holder')} of each part)"
    lines.append(f"Modelled, {evenly}: {_told(state_of_worker(whole, name, mesh, copies, undivided))}.")
    for other in OTHERS if mesh.workers > 1 else ():
        if other != str(name):
            word, grid = MechanismName.parse(other), MechanismName.parse(other).mesh(mesh.workers)
            held = state_of_worker(whole, word, grid, copies, undivided)
            lines.append(f"Modelled under {word} ({grid}): {_told(held)}.")
    return tuple(lines)


def _undivided(found: LayersDivided | None) -> float:
    """The part of the model that the tensor axis leaves whole; 0 where nobody has told."""
    return 0.0 if found is None else found.whole / max(1, found.whole + found.divided)


def _last_mesh(means: Means, entries: Sequence[Entry]) -> Mesh:
    """How workers stood at the end. ``means``: of the last start; what stood before it says nothing."""
    found = means.first_mesh
    for entry in entries:
        match entry.record:
            case RunStarted():
                found = means.first_mesh
            case Regrouped(mesh=mesh, members=members):
                found = Mesh.parse(mesh) if mesh else Mesh(data=len(members))
    return found


def _measured(of: WorkerMemory) -> StateBytes:
    return StateBytes(of.parameters, of.gradients, of.optimizer, of.copies)


def _told(state: StateBytes) -> str:
    copies = f" ({byte_count(round(state.copies))} of it copies)" if state.copies else ""
    return (
        f"{byte_count(round(state.total))}: parameters {byte_count(round(state.parameters))}, gradients "
        f"{byte_count(round(state.gradients))}, optimizer {byte_count(round(state.optimizer))}{copies}"
    )
