"""What importing a program does: random numbers by the run's seed, and no training of its own."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.sessions import lone_session

from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.train.program.load import load, load_as_guest

DRAWS = """
import random
import numpy as np
import torch
from torch.utils.data import random_split
drawn = [random.random(), np.random.rand(), torch.rand(1).item(), *random_split(range(50), [40, 10])[1].indices]
config = {"drawn": drawn}
def train(session): pass
"""
WRAPPED = """
import torch
import torch.distributed as dist
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
{top}
def train(session):
    model = torch.nn.Linear(1, 1)
    {inside}
"""


def program(folder: Path, text: str) -> Program:
    path = folder / "mine.py"
    path.write_text(text)
    return Program(path)


def test_what_is_random_at_import_follows_the_seed(tmp_path: Path) -> None:
    mine = program(tmp_path, DRAWS)
    first = load(mine, 3).config
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    assert load(mine, 3).config == first
    assert load(mine, 4).config["drawn"][:3] != first["drawn"][:3]


def test_a_guest_leaves_the_random_streams_as_they_were(tmp_path: Path) -> None:
    mine = program(tmp_path, DRAWS)

    def draws(load_between: bool) -> tuple[float, float, float]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        if load_between:
            load_as_guest(mine, 3)
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draws(load_between=True) == draws(load_between=False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dist.init_process_group('gloo')", "init_process_group at mine.py"),
        ("init_process_group('gloo')", "init_process_group at mine.py"),
        ("DDP(torch.nn.Linear(1, 1))", "DistributedDataParallel at mine.py"),
    ],
)
@pytest.mark.parametrize("where", ["top", "inside"])
def test_what_starts_workers_itself_is_refused_with_its_line(
    tmp_path: Path, line: str, message: str, where: str
) -> None:
    text = WRAPPED.format(**{"top": "", "inside": "pass", where: line})
    number = text.splitlines().index(("    " if where == "inside" else "") + line) + 1
    with pytest.raises(UserError, match=f"elastune starts the workers .*{message}:{number}") as refused:
        load(program(tmp_path, text)).train(lone_session(tmp_path))
    assert refused.value.fix
    assert "refuse" not in torch.distributed.init_process_group.__qualname__, "put back"


def test_a_library_may_make_groups(tmp_path: Path) -> None:
    """As accelerate and deepspeed do; elastune, too, makes groups while a program trains."""
    home = tmp_path / "site-packages" / "groups_of_mine"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text(
        "import torch.distributed as dist\ndef begin():\n    dist.init_process_group('none')\n"
    )
    text = "import sys\nsys.path.insert(0, {!r})\nimport groups_of_mine\ndef train(session): groups_of_mine.begin()"
    with pytest.raises(ValueError, match="RANK expected"):  # of torch's own
        load(program(tmp_path, text.format(str(home.parent)))).train(lone_session(tmp_path))


STARTS = """
import elastune
def train(session): session.config["seen"].append({use})
{before}
elastune.{call}
never = 1 / 0
{after}
"""


@pytest.mark.parametrize(
    "call",
    ["run(train)", "tune(train, lambda trial: {}, objectives={'loss': 'min'}, trials=1)", "find_frontier(train)"],
)
def test_a_call_that_starts_trainings_ends_the_import(tmp_path: Path, call: str) -> None:
    loaded = load(program(tmp_path, STARTS.format(use="value", before="value = 3", call=call, after="")))
    seen: list[int] = []
    loaded.train(lone_session(tmp_path, config={"seen": seen}))
    assert seen == [3]


def test_what_stands_behind_that_call_cannot_be_used(tmp_path: Path) -> None:
    text = STARTS.format(use="late()", before="", call="run(train)", after="def late(): return 1")
    with pytest.raises(UserError, match=r"must stand before the call .*late after mine.py:5.*__name__"):
        load(program(tmp_path, text))
