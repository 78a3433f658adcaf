"""What ``elastune check`` finds in programs that do not come to the same everywhere, and in those that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.program_check import Checked, check_program
from elastune.train.program.source import of_workers, unseeded
from elastune.train.proof.compare import Leaf, PassRecord, RunRecord, StepRecord
from elastune.train.proof.findings import PAGE, ShortRun, TrainingProblem, judge

PROGRAM = """
import numpy as np, torch
from torch.utils.data import TensorDataset

config = {{"file": ""}}

def train(session):
    model = torch.nn.Linear(4, 1)
    {before}
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(1):
        for (x,) in session.batches(TensorDataset(torch.ones(16, 4)), batch_size=8):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        {after}
        session.report(steps=session.step)
"""
LEAF = Leaf(1.0, (1.0,), "1")


def short_run(sha256: str, rank: int = 0, *, loss: float = 1.0, reports: tuple[dict[str, float], ...] = ()) -> ShortRun:
    """A run of one step, whose only slot worker ``rank`` ran."""
    one = PassRecord(0, rank, 1.0, (0,), 1, (loss,), {"w": LEAF})
    record = StepRecord(1, 0, (one,), {}, {"w": LEAF}, {"w": LEAF})
    return ShortRun(sha256, 1, RunRecord((record,), tuple((1, each) for each in reports)))


ONE = short_run("a", reports=({"loss": 1.0},))


@dataclass
class Made:
    """The short runs of a check, as they came out."""

    slots: ShortRun | str = ONE
    again: ShortRun | str = ONE
    workers: ShortRun | str = ONE
    whole: ShortRun | str = ONE
    resumed: ShortRun | str = ONE
    files: dict[str, int] = field(default_factory=dict)
    num_slots: int = 1

    def quiet(self, *, whole: bool, salt: int = 0) -> ShortRun | str:
        return self.whole


def judged(text: str = "", **runs: Any) -> list[TrainingProblem]:
    return list(judge(text, Made(**runs)))


@pytest.fixture
def here(cluster: LocalCluster, forked_from: Callable[[LocalCluster], AbstractContextManager[None]]) -> Iterator[None]:
    """Checks run on the tests' own cluster."""
    with forked_from(cluster):
        yield


def checked(folder: Path, before: str = "", after: str = "") -> Checked:
    path = folder / "mine.py"
    path.write_text(PROGRAM.format(before=before or "pass", after=after or "pass"))
    return check_program(Program(path), {"file": str(folder / "log")})


def test_nothing_is_found_in_a_program_without_fault(here: None, tmp_path: Path) -> None:
    found = checked(tmp_path, after="open(f'{session.config[\"file\"]}{session.rank}', 'w').close()")
    assert found.problems == ()
    assert (found.steps, len(found.sha256)) == (2, 64)
    assert sorted(path.name for path in tmp_path.glob("log*")) == ["log0", "log1"]


def test_random_weights_and_files_of_all_are_found_with_their_lines(here: None, tmp_path: Path) -> None:
    random = "model.weight.data += np.random.default_rng().random()"
    files = "open(session.config['file'], 'a').close(); torch.save({}, session.config['file'] + '.pt')"
    found = checked(tmp_path, random, files).problems
    assert [(each.kind, each.lines) for each in found] == [("random", (9,)), ("files", (16,)), ("files", (16,))]
    assert found[1].as_line("mine.py").startswith(f"mine.py:16: all workers write {tmp_path}/log. Write it under")


def test_a_program_that_fails_on_two_workers_is_told_why(here: None, tmp_path: Path) -> None:
    (found,) = checked(tmp_path, after="session.rank or session.sum(1.0)").problems
    assert found.kind == "fails on two workers"
    assert "mine.py:16" in found.finding


def test_a_program_that_does_not_train_is_told_why(here: None, tmp_path: Path) -> None:
    (found,) = checked(tmp_path, before="raise ValueError('odd')").problems
    assert (found.kind, "ValueError: odd (mine.py:9)" in found.finding) == ("fails", True)


def test_what_depends_on_workers_is_told_from_what_is_random() -> None:
    text = "lr = 0.1 * session.size\nx = time.time()"
    other = short_run("b", rank=1, loss=2.0)
    (found,) = judged(text, workers=other)
    assert (found.kind, found.lines) == ("workers", (1,))
    assert "in step 1 the loss of slot 0 on worker 1 is 2 times as large" in found.finding
    assert [(each.kind, each.lines) for each in judged(text, again=other, workers=other)] == [("random", (2,))]
    assert judged(text) == []


def test_a_metric_of_workers_is_told_once_and_one_that_never_repeats_not() -> None:
    one, two = (short_run("a", reports=({"loss": value, "seconds_": value},) * 2) for value in (1.0, 2.0))
    again = short_run("a", reports=({"loss": 1.0, "seconds_": 1.5},) * 2)
    (found,) = judged(slots=one, again=again, workers=two)
    assert found.kind == "metric"
    assert found.finding == "the metric 'loss' is 1 on one worker, 2.0 on two"
    (padded,) = judged("x = DistributedSampler(test_set)", slots=one, again=again, workers=two)
    assert (padded.lines, "pads it" in padded.fix) == ((1,), True)


def test_runs_that_fail_are_told_with_their_way() -> None:
    assert [each.kind for each in judged(slots="odd")] == ["fails"]
    assert [each.kind for each in judged(again="odd")] == ["random"]
    assert [each.kind for each in judged(workers="odd")] == ["fails on two workers"]
    assert [each.kind for each in judged(resumed="odd")] == ["fails when resumed"]
    assert [each.kind for each in judged(whole="odd", num_slots=4)] == ["passes"]


@pytest.mark.parametrize(
    ("line", "draws"),
    [
        ("random.Random()", True),
        ("random.Random(3)", False),
        ("np.random.default_rng()", True),
        ("np.random.default_rng(seed=session.seed)", False),
        ("torch.rand(3)", False),
        ("uuid.uuid4().hex", True),
        ("secrets.token_hex(4)", True),
    ],
)
def test_what_no_seed_decides(line: str, draws: bool) -> None:
    assert unseeded(f"\nx = {line}") == ([2] if draws else [])


def test_who_asks_for_the_rank() -> None:
    assert of_workers("x.size\nsession.rank\nself.session.size\ndist.get_rank()\naccelerator.process_index") == [
        2,
        3,
        4,
        5,
    ]


def test_the_command_tells_a_line_each(command_here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM.format(before="pass", after="session.report(rank=session.rank)"))
    said = command_here("check", path)
    assert said.code == 1
    assert said.out.splitlines() == [
        f"mine.py: the metric 'rank' is 0 on one worker, 0.5 on two. Add it up over workers by session.sum or "
        f"session.mean, and report that. See {PAGE}"
    ]
    assert "--steps must be from 1" in command_here("check", path, "--steps", 0).line
    assert "--slots must be from 1" in command_here("check", path, "--slots", 0).line
    page, _, section = PAGE.partition("#")
    headings = [line for line in Path(page).read_text().splitlines() if line.startswith("## ")]
    assert section in {heading[3:].lower().replace(" ", "-").replace("`", "") for heading in headings}
    assert command_here("check", path, "--json").json["problems"][0]["kind"] == "metric"
