"""What ``elastune check`` finds in programs that do not come to the same everywhere, and in those that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.program_check import PAGE, Checked, ShortRun, check_program, judge
from elastune.train.program.source import of_workers, unseeded

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
ONE = ShortRun("a", 2, ({"loss": 1.0},))


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
    other = ShortRun("b", 2, ({"loss": 1.0},))
    assert [(each.kind, each.lines) for each in judge(text, ONE, ONE, other, {})] == [("workers", (1,))]
    assert [(each.kind, each.lines) for each in judge(text, ONE, other, other, {})] == [("random", (2,))]
    assert list(judge(text, ONE, ONE, ONE, {})) == []


def test_a_metric_of_workers_is_told_once_and_one_that_never_repeats_not() -> None:
    one, two = (ShortRun("a", 2, ({"loss": value, "seconds_": value},) * 2) for value in (1.0, 2.0))
    again = ShortRun("a", 2, ({"loss": 1.0, "seconds_": 1.5},) * 2)
    (found,) = judge("", one, again, two, {})
    assert found.kind == "metric"
    assert found.finding == "the metric 'loss' is 1 on one worker, 2.0 on two"


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
    page, _, section = PAGE.partition("#")
    headings = [line for line in Path(page).read_text().splitlines() if line.startswith("## ")]
    assert section in {heading[3:].lower().replace(" ", "-").replace("`", "") for heading in headings}
    assert command_here("check", path, "--json").json["problems"][0]["kind"] == "metric"
