"""A run in words: what its journal says of its model on its workers."""

from __future__ import annotations

from dataclasses import replace

from elastune.core.journal.records import (
    DataContext,
    Entry,
    LayersDivided,
    Record,
    Regrouped,
    RunContext,
    RunFinished,
    RunStarted,
    StagesDivided,
    WorkerMemory,
)
from elastune.report.document import Note
from elastune.report.explain import explain_run
from elastune.report.overviews import gather_run
from elastune.report.page import run_page

MIB = 1 << 20
CONTEXT = RunContext(DataContext(), MIB, "cpu", "a processor", 2)  # 4 MiB of parameters
STARTED = RunStarted("f.py", {}, 0, {"workers": 4, "mechanism": "zero", "mesh": "shard=4"})
HELD = [WorkerMemory(rank, 4 * MIB, 2 * MIB, 4 * MIB, 2 * MIB) for rank in range(4)]
FINISHED = RunFinished("0" * 64, 4, 9, 90, 1.0, {}, context=CONTEXT, memory=HELD)


def explained(*records: Record) -> dict[str, tuple[str, ...]]:
    entries = [Entry(float(i), record) for i, record in enumerate(records)]
    run = gather_run(entries)
    assert run is not None
    return {part.title: part.lines for part in explain_run(run, entries).parts}


def test_memory_is_told_as_measured_and_as_modelled_beside_other_mechanisms() -> None:
    lines = explained(STARTED, FINISHED)["Memory of a worker"]
    held = "10 MiB: parameters 4 MiB, gradients 2 MiB, optimizer 4 MiB (2 MiB of it copies)."
    assert lines == (
        f"Measured, the fullest of 4 workers (zero, shard=4): {held}",
        f"Modelled, if all that is divided divides evenly (2 holders of each part): {held}",
        "Modelled under replicated (data=4): 16 MiB: parameters 4 MiB, gradients 4 MiB, optimizer 8 MiB.",
        "Modelled under sharded (shard=4): 8 MiB: parameters 2 MiB, gradients 2 MiB, optimizer 4 MiB "
        "(2 MiB of it copies).",
        "Modelled under tensor (tensor=4): 8 MiB: parameters 2 MiB, gradients 2 MiB, optimizer 4 MiB "
        "(2 MiB of it copies).",
        "Modelled under pipeline (pipeline=4): 8 MiB: parameters 2 MiB, gradients 2 MiB, optimizer 4 MiB "
        "(2 MiB of it copies).",
    )


def test_after_a_reshape_it_is_the_last_mesh() -> None:
    alone = [WorkerMemory(0, 4 * MIB, 4 * MIB, 8 * MIB, 0)]
    reshaped = Regrouped(2, [0], planned=True, step=5, pause_s=0.1, discarded=0)
    ended = replace(FINISHED, memory=alone)
    measured, modelled = explained(STARTED, reshaped, ended)["Memory of a worker"]
    assert "1 worker (zero, data=1): 16 MiB" in measured
    assert "each part): 16 MiB" in modelled
    (resumed, *_) = explained(STARTED, reshaped, ended, STARTED, FINISHED)["Memory of a worker"]
    assert "4 workers (zero, shard=4)" in resumed


def test_before_the_end_nothing_is_known() -> None:
    (line,) = explained(STARTED)["Memory of a worker"]
    assert line.startswith("Not known before")


def test_what_tensor_leaves_whole_is_in_the_model() -> None:
    """Half of the model is divided into blocks, with two holders each; four workers have the other half."""
    started = replace(STARTED, execution={"workers": 4, "mechanism": "tensor", "mesh": "tensor=4", "virtual_tensor": 4})
    held = WorkerMemory(0, 3 * MIB, 3 * MIB, 6 * MIB, MIB)
    ended = replace(FINISHED, memory=[replace(held, rank=rank) for rank in range(4)])
    result = explained(started, LayersDivided(4, MIB // 2, MIB // 2, apart=True), ended)
    line, serial = result["Divided layers"]
    assert line.startswith("524,288 of 1,048,576 trained numbers are in layers of 4 virtual blocks;")
    assert line.endswith("runs it on slots of its own (DataParallelTrunk).")
    assert serial.startswith("tensor leaves 50% of parameters whole on each worker (the serial share)")
    assert "62% on tensor=4" in serial
    measured, modelled, replicated, *_ = result["Memory of a worker"]
    assert measured.split(": ", 1)[1] == modelled.split(": ", 1)[1]
    assert "(2 holders of each part): 12 MiB" in modelled
    assert replicated.endswith("16 MiB: parameters 4 MiB, gradients 4 MiB, optimizer 8 MiB.")


def test_the_page_of_a_run_tells_what_tensor_leaves_whole() -> None:
    started = replace(STARTED, execution={"workers": 2, "mechanism": "tensor", "mesh": "tensor=2", "virtual_tensor": 4})
    records = started, LayersDivided(4, 3 * MIB, MIB, apart=False), FINISHED
    run = gather_run([Entry(float(i), record) for i, record in enumerate(records)])
    assert run is not None
    (section,) = (each for each in run_page(run).sections if each.title == "Divided layers")
    whole, serial = (part.text for part in section.parts if isinstance(part, Note))
    assert whole.endswith("which runs it on the same samples.")
    assert serial.startswith("tensor leaves 25% of parameters whole on each worker (the serial share)")
    plain = gather_run([Entry(0.0, STARTED), Entry(1.0, FINISHED)])
    assert plain is not None
    assert "Divided layers" not in [each.title for each in run_page(plain).sections]


def test_every_cut_of_a_pipeline_is_told_once() -> None:
    cut = StagesDivided(["the input", "blocks.2"], [0.6, 0.4], "counted operations")
    assert explained(STARTED, cut, cut)["Stages"] == (
        "2 stages, by counted operations, each from its first layer on: the input 60%, blocks.2 40%.",
    )
