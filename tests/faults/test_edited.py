"""A program that is edited while its run goes on: no worker that has loaded the edited one trains beside the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.support.elastic_runs import Ran, Runs, check_same

from elastune.core.journal.records import Record, Regrouped, RunFailed, RunFinished, WorkerGone
from elastune.core.run import Elastic, Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.program.source import EDITED, source_of

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
LINE = next(n for n, text in enumerate(PROGRAM.path.read_text().splitlines(), 1) if "Dropout(0.3)" in text)


class Edits:
    """A copy of the program, edited once two or more steps are done; then ``victim`` is killed. The edit is undone
    when a worker has been refused."""

    def __init__(self, folder: Path, victim: int) -> None:
        self.program = Program(folder / "edited.py")
        self.program.path.write_text(PROGRAM.path.read_text())
        self.begun = source_of(self.program)
        self._victim = victim
        self.done = False

    def act(self, handle: Any, records: list[Record]) -> None:
        if handle.step >= 2 and self._victim in handle.pids and not self.done:
            self.done = True
            text = self.program.path.read_text()
            self.program.path.write_text(text.replace("Dropout(0.3)", "Dropout(0.6)"))
            os.kill(handle.pids[self._victim], signal.SIGKILL)
        if any(isinstance(each, WorkerGone) and EDITED in each.why for each in records):
            self.program.path.write_text(PROGRAM.path.read_text())


def refused(ran: Ran) -> list[WorkerGone]:
    return [each for each in ran.records if isinstance(each, WorkerGone) and EDITED in each.why]


def test_a_run_goes_on_without_a_worker_that_has_loaded_the_edited_program_and_takes_one_once_that_is_undone(
    cluster: LocalCluster, tmp_path: Path, undisturbed: Ran
) -> None:
    edits = Edits(tmp_path, 1)
    ran = Runs(cluster, tmp_path, edits.program)(
        2,
        act=edits.act,
        elastic=Elastic(low=1, high=2, heartbeat_s=2.0),
        spec={"source": edits.begun},
        slow_until=lambda records: [len(each.members) for each in records if isinstance(each, Regrouped)] == [1, 2],
    )
    assert edits.done
    assert isinstance(ran.outcome, RunFinished), ran.outcome
    check_same(ran, undisturbed)
    assert [len(each.members) for each in ran.regrouped] == [1, 2]
    assert len(refused(ran)) == 1, "no other is started that would be refused, too"
    assert f"edited.py, line {LINE}, in train" in refused(ran)[0].why


def test_a_run_whose_last_worker_dies_ends_and_names_the_edit(cluster: LocalCluster, tmp_path: Path) -> None:
    edits = Edits(tmp_path, 0)
    ran = Runs(cluster, tmp_path, edits.program)(
        1,
        act=edits.act,
        elastic=Elastic(low=1, high=1, heartbeat_s=2.0),
        spec={"source": edits.begun},
        slow_until=lambda records: edits.done,
    )
    assert isinstance(ran.outcome, RunFailed), ran.outcome
    assert ran.outcome.reason == "user_error"
    assert f"edited.py, line {LINE}, in train" in ran.outcome.detail
