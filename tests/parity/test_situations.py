"""The table of situations: plain loop, one slot, four slots, two workers, cut and resumed, and what ``check`` names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.situations import SITUATIONS, Cell, Situation
from tests.support.sessions import lone_session

from elastune.core.journal.records import Record, Reported
from elastune.core.run import ExecutionSettings, Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.program_check import ShortRunsOfProgram, by_batch, judge_against, plain_request
from elastune.train.program.load import load, process_restored
from elastune.train.proof.compare import first_difference, read_run
from elastune.train.proof.findings import ShortRun, judge
from elastune.train.proof.plain import observe
from elastune.train.proof.recorder import Recorder, Recording
from elastune.train.step import StopTraining

STEPS, SLOTS = 6, 4
ROUNDING, COARSE = 1e-3, 5e-2  # of steps whose gradients are summed in another order; under autocast


class HereAndOnTwo(ShortRunsOfProgram):
    """Short runs on one worker in this process; those on two workers as always."""

    def _run(self, name: str, *, workers: int = 1, **options: Any) -> ShortRun:
        options.pop("cluster", None)
        return super()._run(name, workers=workers) if workers > 1 else self.here(name, **options)

    def here(
        self,
        name: str,
        *,
        num_slots: int | None = None,
        steps: int | None = None,
        resume: bool = False,
        until_epoch: int | None = None,
        recording: dict[str, Any] | None = None,
        **recorded: Any,
    ) -> ShortRun:
        folder = self._folder / f"{name}-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        records: list[Record] = []
        what = recording or {"epoch_steps": self._epoch_steps, **recorded}
        with process_restored():
            session = lone_session(
                self._folder / name,
                send=records.append,
                execution=ExecutionSettings(num_slots=num_slots or self.num_slots),
                max_steps=steps or self._steps,
                until_epoch=until_epoch,
                resume=resume,
                checkpoint_every_steps=None,
            )
            session.state.recorder = Recorder(Recording(str(folder), **what), self._program.path)
            try:
                with suppress(StopTraining):
                    load(self._program).train(session)
                session.finish()
            except Exception as error:
                raise Refused(str(error)) from error
        assert session.trained is not None
        digest = session.trained.fingerprint(session.state.workers)
        reports = [(each.step, each.metrics) for each in records if isinstance(each, Reported)]
        return ShortRun(digest, session.step, read_run(folder, reports))

    def _once(self, name: str, make: Callable[[], ShortRun | str]) -> ShortRun | str:
        def made() -> ShortRun | str:
            try:
                return make()
            except Refused as error:
                return str(error)

        return super()._once(name, made)


class Refused(Exception):
    """A run here failed."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    one_slot: Cell
    four_slots: Cell
    two_workers: Cell
    resumed: Cell
    verdict: tuple[str, ...]
    noted: tuple[str, ...]


def plain_beside_one_slot(situation: Situation, runs: HereAndOnTwo, folder: Path) -> Cell:
    """The plain script, fed with the samples of a run in one slot."""
    script = folder / "plain.py"
    script.write_text(situation.plain)
    (folder / "plain").mkdir()
    try:
        mine = runs.here("against", num_slots=1, recording={"beginning": True}).record
    except Refused:
        return "refused"
    records = max(folder.glob("against-*"), key=lambda path: path.stat().st_mtime)
    outcome = observe(plain_request(by_batch(mine), script, (), records, folder / "plain", 0))
    if outcome.problem:
        return "otherwise"
    found = judge_against("plain.py", by_batch(mine), read_run(folder / "plain"), outcome)
    return "otherwise" if found.problem or found.apart > 0 else "equal"


def cell(one: ShortRun | str, other: ShortRun | str, most: float = 0.0) -> Cell:
    if isinstance(one, str) or isinstance(other, str):
        return "refused"
    if most == 0:
        return "equal" if one.sha256 == other.sha256 else "otherwise"
    coarse = any(each.coarse for step in other.record.steps for each in step.passes)
    apart = first_difference(one.record, other.record, most=COARSE if coarse else most)
    return "equal" if apart is None else "otherwise"


def row(situation: Situation, cluster: LocalCluster, folder: Path) -> Row:
    path = folder / "program.py"
    path.write_text(situation.program)
    runs = HereAndOnTwo(Program(path), {}, folder, cluster, cluster, STEPS, 0, SLOTS)
    one_slot = plain_beside_one_slot(situation, runs, folder)
    found = list(judge(situation.program, runs))
    resumed = "refused" if isinstance(runs.slots, str) else cell(runs.slots, runs.resumed)
    return Row(
        one_slot,
        cell(runs.whole, runs.slots, ROUNDING),
        cell(runs.slots, runs.workers),
        resumed,  # type: ignore[arg-type]
        tuple(sorted({each.kind for each in found if not each.note})),
        tuple(sorted({each.kind for each in found if each.note})),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.name)
def test_a_situation(situation: Situation, cluster: LocalCluster, tmp_path: Path) -> None:
    assert torch.get_num_threads() == 1, "rounding depends on it"
    expected = Row(
        situation.one_slot,
        situation.four_slots,
        situation.two_workers,
        situation.resumed,
        situation.verdict,
        situation.noted,
    )
    assert row(situation, cluster, tmp_path) == expected


def test_nothing_is_silently_otherwise() -> None:
    assert len(SITUATIONS) >= 30
    for each in SITUATIONS:
        cells = each.four_slots, each.two_workers, each.resumed
        assert "otherwise" not in cells or each.verdict or each.noted, each.name
