"""What the memory of a run's workers held."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.core.mesh import Mesh
from elastune.core.text import byte_count, count
from elastune.journal.records import LayersDivided, WorkerMemory
from elastune.plan.copies import serial_text
from elastune.plan.state_bytes import ideal_share
from elastune.report.gather import RunStory
from elastune.report.tables.tables import Table

KINDS = ("parameters", "gradients", "optimizer", "copies", "activations", "peak")


def memory_table(run: RunStory) -> Table:
    """Bytes of each worker, measured in one step."""
    told = run.finished.memory if run.finished else []
    rows = tuple((str(each.rank), *(byte_count(getattr(each, kind)) for kind in KINDS)) for each in told)
    header = ("rank", "parameters", "gradients", "optimizer state", "of it copies", "step's activations", "whole peak")
    note = "Activations: the most that a step needed beside the others. Peak: of the whole process, or of torch's "
    divided = run.started.means.get("mechanism", "replicated") != "replicated"
    note += f"allocator on a GPU. All measured. {_balance(told) if divided else ''}"
    return Table("Memory by worker", header, rows, frozenset(range(7)), note=note.strip() if rows else "")


def divided_lines(divided: LayersDivided | None, mesh: Mesh | None = None) -> tuple[str, ...]:
    """How much of a model the tensor axis divides, what its workers do with the rest, and what that bounds.

    ``mesh``: the one that it is told of; None: several. Empty where no layers were divided.
    """
    if divided is None:
        return ()
    each = "runs it on slots of its own (TrunkByData)" if divided.apart else "runs it on the same samples"
    whole = divided.whole / max(1, divided.whole + divided.divided)
    return (
        f"{divided.divided:,} of {divided.divided + divided.whole:,} trained numbers are in layers of "
        f"{count(divided.blocks, 'virtual block')}; the others lie whole on each worker along tensor, which {each}.",
        f"{serial_text(whole, None, mesh)}.",
    )


def memory_line(told: Sequence[WorkerMemory]) -> str:
    """The most that one worker had of each, in one line; "" where nobody knows."""
    if not told:
        return ""

    def most(kind: str) -> str:
        return byte_count(max((value for each in told if (value := getattr(each, kind)) is not None), default=None))

    copies = f" ({most('copies')} of it copies)" if any(each.copies for each in told) else ""
    return (
        f"parameters {most('parameters')}, gradients {most('gradients')}, optimizer {most('optimizer')}{copies}, "
        f"activations {most('activations')}, peak {most('peak')} on a worker at most"
    )


def _balance(told: Sequence[WorkerMemory]) -> str:
    """How far the fullest worker is from an equal share of the optimizer's state, which is divided."""
    held, once = sum(each.optimizer for each in told), sum(each.optimizer - each.copies for each in told)
    if len(told) < 2 or not once:
        return ""
    copies = round(held / once)
    share, most = ideal_share(once, copies, len(told)), max(each.optimizer for each in told)
    modelled = (
        f"{byte_count(round(share))} of optimizer state ({count(copies, 'holder')} / {len(told)} workers of the whole)"
    )
    return f"Modelled: {modelled}; the fullest worker has {most / share:.3g} x that."
