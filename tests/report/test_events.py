"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.records import Entry, Measured, Restarted, RunFinished, RunStarted
from elastune.report.tensorboard import FOLDER, EventFiles, write_events

SEEN = Measured(10, 0, 640, 1.0, 2, 64, 0.05, {"noise_scale": (400.0, 30.0), "odd": (float("nan"), None)})
STARTED = RunStarted("p.py", {}, 0, {})


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    result = EventAccumulator(str(folder), size_guidance={TENSORS: 0})
    result.Reload()
    return result


def scalars(folder, tag):
    return [(e.wall_time, e.step, pytest.approx(e.value)) for e in read(folder).Scalars(tag)]


def test_all_that_a_journal_tells_is_there(adapting_entries, tmp_path):
    entries = read(write_events(adapting_entries, tmp_path))
    tags = set(entries.Tags()["scalars"])
    assert {"signals/loss", "signals/noise_scale", "standard_errors/noise_scale", "metrics/accuracy"} <= tags
    assert {"run/batch_size", "run/lr", "run/workers"} <= tags
    measured = [(e.at, e.record) for e in adapting_entries if isinstance(e.record, Measured)]
    result = entries.Scalars("run/batch_size")
    assert [(e.step, e.value) for e in result] == [(m.step, m.batch_size) for _, m in measured]
    assert [e.wall_time for e in result] == [at for at, _ in measured]
    texts = {tag: entries.Tensors(tag) for tag in entries.Tags()["tensors"]}
    (failed,) = texts["failures/Mine/text_summary"]
    assert b"ZeroDivisionError" in failed.tensor_proto.string_val[0]
    lines = [e.tensor_proto.string_val[0].decode() for e in texts["decisions/gns/text_summary"]]
    assert len(lines) == 5
    assert lines[0].startswith("step 132: gns: batch 32 -> 64")


def test_written_again_it_replaces_what_was_there(adapting_entries, tmp_path):
    write_events(adapting_entries, tmp_path)
    folder = write_events(adapting_entries, tmp_path)
    assert len(list(folder.iterdir())) == 1
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER], "nothing temporary is left"


def test_what_a_resumed_run_took_back_is_left_out(tmp_path):
    again = replace(STARTED, resumed_step=10)
    records = [
        STARTED,
        SEEN,
        replace(SEEN, step=20),
        again,
        replace(SEEN, step=15),
        RunFinished("s", 1, 15, 1, 1.0, {}),
    ]
    entries = [Entry(100.0 + i, record) for i, record in enumerate(records)]
    folder = write_events(entries, tmp_path)
    assert scalars(folder, "signals/noise_scale") == [(101.0, 10, 400.0), (104.0, 15, 400.0)]
    assert "signals/odd" not in read(folder).Tags()["scalars"], "what is not finite is left out"


def test_live_files_hide_what_a_restart_took_back(tmp_path):
    with EventFiles(tmp_path) as events:
        for at, record in enumerate([STARTED, SEEN, replace(SEEN, step=20), Restarted(10), replace(SEEN, step=15)]):
            events.observe(record, at=100.0 + at)
    assert [step for _, step, _ in scalars(tmp_path / FOLDER, "run/lr")] == [10, 15]


def test_files_of_a_run_that_goes_on_are_left_alone(adapting_entries, run_entries, tmp_path, study_entries):
    write_events(adapting_entries[:-1], tmp_path)
    with pytest.raises(UserError, match="has not ended"):
        write_events(adapting_entries[:-1], tmp_path)
    with pytest.raises(UserError, match="need a run"):
        write_events(study_entries, tmp_path)


def test_nobody_else_pays_for_it():
    """Nor for what else takes most of a second to load, where a command may not need it."""
    rooms = (
        "elastune.cli.results, elastune.report.page, elastune.tuning.study.run, elastune.tuning.frontier.find_frontier"
    )
    heavy = "{'tensorboard', 'sklearn', 'pandas', 'scipy.stats'}"
    code = f"import sys, {rooms}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"
