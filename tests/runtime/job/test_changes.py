"""A run whose program has changed is refused before anything is written, or goes on and says from where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastune.cli import main
from elastune.core.errors import UserError
from elastune.core.journal.records import (
    ChangesAccepted,
    Checkpointed,
    Entry,
    Record,
    Reported,
    RunStarted,
    StepsCompleted,
    encode_entry,
)
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.elastic.wire.contact import write_contact
from elastune.report.explain import explain_run
from elastune.report.overviews import gather_run
from elastune.report.page import write_report
from elastune.report.sample_ledger import ledger, lines
from elastune.report.worker_changes import gather_changes
from elastune.runtime.job.resumption import accepted_changes, find_surviving_workers, with_source

TEXT = "rate = 0.1\n\ndef train(session):\n    for _ in session.epochs(3):\n        print(rate)\n"


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    (tmp_path / "mine.py").write_text(TEXT)
    (tmp_path / "out").mkdir()
    return with_source(
        RunSpec(Program(tmp_path / "mine.py"), tmp_path / "out", execution=ExecutionSettings(), resume=True)
    )


def started(spec: RunSpec) -> RunStarted:
    return RunStarted(str(spec.program.path), {}, 0, ExecutionSettings().to_json(), source=spec.source)


def write(out: Path, *records: Record) -> list[Entry]:
    entries = [Entry(1_700_000_000.0 + n, record) for n, record in enumerate(records)]
    (out / "journal.jsonl").write_bytes(b"".join(encode_entry(entry) + b"\n" for entry in entries))
    return entries


def edit(spec: RunSpec) -> None:
    spec.program.path.write_text(TEXT.replace("0.1", "0.2"))


SAVED = (Reported(1, 10, 640, 1.0, {"loss": 1.0}), Checkpointed(10, "checkpoints/10"))


def test_an_edited_program_is_refused_and_named_and_nothing_is_written(
    spec: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    write(spec.out, started(spec), *SAVED)
    assert accepted_changes(spec) is None
    edit(spec)
    before = {path: path.read_bytes() for path in spec.out.rglob("*")}
    with pytest.raises(UserError, match=r"begun with \(got mine.py, line 1, in rate\).*--accept-changes"):
        accepted_changes(spec)
    code = main(["run", str(spec.program.path), "--out", str(spec.out), "--device", "cpu", "--resume"])
    assert code == 2
    assert "mine.py, line 1, in rate" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in spec.out.rglob("*")} == before


def test_accepted_changes_are_told_with_the_place_where_they_begin(spec: RunSpec) -> None:
    write(spec.out, started(spec), *SAVED)
    edit(spec)
    result = accepted_changes(replace(spec, accept_changes=True))
    assert result == ChangesAccepted(["mine.py, line 1, in rate"], step=10, epoch=1)


def test_without_a_checkpoint_nothing_is_mixed(spec: RunSpec) -> None:
    write(spec.out, started(spec), SAVED[0])
    edit(spec)
    assert accepted_changes(spec) is None
    write(spec.out, replace(started(spec), source={}), *SAVED)
    assert accepted_changes(spec) is None, "a journal that does not tell"


def test_what_was_accepted_is_the_program_from_then_on(spec: RunSpec) -> None:
    begun = started(spec)
    edit(spec)
    write(spec.out, begun, *SAVED, replace(started(with_source(spec)), resumed_step=10), ChangesAccepted(["x"], 10, 1))
    assert accepted_changes(spec) is None
    spec.program.path.write_text(TEXT)
    with pytest.raises(UserError, match="line 1, in rate"):
        accepted_changes(spec)


def test_workers_that_have_outlived_their_controller_are_not_taken_over_by_another_program(spec: RunSpec) -> None:
    write_contact(spec.out, "127.0.0.1:1", "0" * 32, grace_s=60.0)
    write(spec.out, started(spec))
    assert find_surviving_workers(spec) is not None
    edit(spec)
    with pytest.raises(UserError, match=r"the program that they have loaded \(got mine.py, line 1, in rate\)"):
        find_surviving_workers(replace(spec, accept_changes=True))


def test_report_ledger_and_explain_say_from_where_on(spec: RunSpec, capsys: pytest.CaptureFixture[str]) -> None:
    result = ChangesAccepted(["mine.py, line 1, in rate", "data: 960 samples, had 1,920"], 10, 1)
    steps = [StepsCompleted(0, 1, 1, epoch, 0, 640, 640, 10 * epoch + 1, 10 * epoch + 10) for epoch in (0, 1)]
    again = replace(started(spec), resumed_step=10)
    entries = write(spec.out, started(spec), steps[0], *SAVED, again, result, steps[1])
    line = "from step 11 (epoch 2) on, 2023-11-14 22:13 UTC: mine.py, line 1, in rate; data: 960 samples, had 1,920"
    assert gather_changes(entries).accepted == (line,)
    assert lines(ledger(entries))[-2:] == (
        f"after an accepted change {line}",
        "ledger: 1,280 samples in 20 steps, each seen once",
    )
    run = gather_run(entries)
    assert run is not None
    assert f"F{line[1:]}." in str(explain_run(run, entries))
    assert f"F{line[1:]}." in write_report(spec.out).read_text()
    assert main(["report", str(spec.out), "--ledger"]) == 0
    assert line in capsys.readouterr().out
