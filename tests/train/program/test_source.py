"""What a journal keeps of a program's source, and the first line in which it differs from what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.train.program.source import check_unedited, differences, reported_metrics, source_of

FILE = '''"""A program."""
import torch
from torch import nn
from parts import model
import registry
import elastune

WIDTH = 16
config = {"lr": 0.1, "epochs": 3, "seed": 1}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.1, 1.0)}

@registry.add
def unnamed():
    return 7

class Patient(elastune.Policy):
    limit = 3

    def after_step(self, run):
        """Wait."""
        if run.step > self.limit:
            run.stop()

class Net(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, WIDTH),
            nn.Dropout(p),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, x):
        return self.layers(x)

def unused():
    return 1

def train(session):
    """Train."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in session.epochs(3):
        model.step(net, optimizer)

if __name__ == "__main__":
    print("begin")
'''
MODULE = "from . import losses\n\ndef step(net, optimizer):\n    # a comment\n    return losses.of(net)\n"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "registry.py").write_text("def add(function):\n    return function\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "model.py").write_text(MODULE)
    (tmp_path / "parts" / "losses.py").write_text("def of(net):\n    return 1.0\n")
    path = tmp_path / "program.py"
    path.write_text(FILE)
    return Program(path)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("Adam(", "AdamW(", "train"),
        ("lr=0.01", "lr=0.02", "train"),
        ("p=0.1", "p=0.5", "Net.__init__"),
        ("nn.Dropout(p)", "nn.Dropout(p, True)", "Net.__init__"),
        ("limit = 3", "limit = 4", "Patient"),
        ("WIDTH = 16", "WIDTH = 32", "WIDTH"),
        ('"epochs": 3', '"epochs": 5', "config"),
        ("return 7", "return 8", "unnamed"),
        ("import torch\n", "import numpy as torch\n", "imports"),
        ("session.epochs(3)", "session.epochs(4)", "train"),
    ],
)
def test_a_change_is_told_with_its_file_line_and_part(program: Program, old: str, new: str, part: str) -> None:
    begun = json.loads(json.dumps(source_of(program)))
    assert FILE.count(old) == 1
    text = FILE.replace(old, new)
    program.path.write_text(text)
    pairs = zip(FILE.splitlines(), text.splitlines(), strict=False)
    line = next(number for number, (was, now) in enumerate(pairs, 1) if was != now)
    assert differences(begun, program) == [f"program.py, line {line}, in {part}"]


def test_where_a_list_has_grown_its_statement_is_told_and_further_changes_are_counted(program: Program) -> None:
    begun = source_of(program)
    text = FILE.replace("nn.Linear(WIDTH, 1),\n", "nn.Linear(WIDTH, 1),\n            nn.ReLU(),\n")
    program.path.write_text(text)
    line = text[: text.index("self.layers = ")].count("\n") + 1
    assert differences(begun, program) == [f"program.py, line {line}, in Net.__init__"]
    text = text.replace("WIDTH = 16", "WIDTH = 1").replace("class Patient", "class Waiting").replace("p=0.1", "p=0.2")
    program.path.write_text(text)
    *_, last = differences(begun, program)
    assert last == "and 3 more"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Train."""', '"""Train it, with care."""'),
        ('        """Wait."""\n', ""),
        ("WIDTH = 16", "# how wide\n\nWIDTH  =  16  # units"),
        ("nn.Linear(4, WIDTH),\n            nn.Dropout(p),", "nn.Linear(4, WIDTH), nn.Dropout(p),"),
        ("0.1, 1.0", "0.01, 1.0"),
        ("return 1\n", "return 2\n"),
        ('print("begin")', 'print("start")'),
        ('"""A program."""\n', ""),
    ],
)
def test_what_changes_no_training_is_no_change(program: Program, old: str, new: str) -> None:
    begun = source_of(program)
    assert FILE.count(old) == 1
    program.path.write_text(FILE.replace(old, new))
    assert differences(begun, program) == []


def test_the_users_own_modules_count_wherever_they_lie_and_installed_ones_do_not(
    program: Program, tmp_path: Path
) -> None:
    begun = source_of(program)
    assert list(begun) == ["program.py", "parts/__init__.py", "parts/losses.py", "parts/model.py", "registry.py"]
    (tmp_path / "parts" / "losses.py").write_text('def of(net):\n    """One."""\n    return 2.0\n')
    assert differences(begun, program) == ["parts/losses.py, line 3, in of"]
    (tmp_path / "elsewhere" / "registry.py").write_text("def add(function):\n    return None\n")
    assert differences(begun, program)[-1] == "registry.py, line 2, in add"
    with pytest.raises(UserError, match=r"must not be edited .*parts/losses.py, line 3, in of; registry.py, line 2"):
        check_unedited(program, begun)


def test_a_program_that_looks_names_up_may_use_all_of_its_file(tmp_path: Path) -> None:
    text = "def a():\n    return 1\n\ndef train(session):\n    globals()[session.config['which']]()\n"
    (tmp_path / "named.py").write_text(text)
    begun = source_of(Program(tmp_path / "named.py"))
    (tmp_path / "named.py").write_text(text.replace("return 1", "return 2"))
    assert differences(begun, Program(tmp_path / "named.py")) == ["named.py, line 2, in a"]


def test_what_cannot_be_read_is_not_compared(program: Program, tmp_path: Path) -> None:
    begun = source_of(program)
    program.path.write_text("def train(session:\n")
    assert differences(begun, program) == [], "whoever loads it says what is wrong"
    check_unedited(program, begun)
    assert source_of(Program(tmp_path / "none.py")) == {}
    assert differences({}, Program(Path(__file__))) == [], "a journal of before this was kept"


def test_a_file_of_any_length_takes_little_room(tmp_path: Path) -> None:
    body = "".join(f"    x{n} = {n}\n" for n in range(3000))
    (tmp_path / "long.py").write_text(f"def train(session):\n{body}")
    begun = source_of(Program(tmp_path / "long.py"))
    assert len(json.dumps(begun)) < 100
    (tmp_path / "long.py").write_text(f"def train(session):\n{body.replace('= 2000', '= 2001')}")
    assert differences(begun, Program(tmp_path / "long.py")) == ["long.py, line 1, in train"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def train(session): session.report(loss=1, accuracy=2)", {"loss", "accuracy"}),
        ("def train(session):\n    session.report(loss=1)\n    session.report(late=1)", {"loss", "late"}),
        ("def train(session): session.report(**{'loss': 1})", None),
        ("def train(session): pass", None),
        ("from elastune.adapters import fabric\ndef train(session): session.report(loss=1)", None),
        ("import neighbour\ndef train(session):\n    neighbour.go(session)\n    session.report(loss=1)", None),
    ],
)
def test_reported_metrics_are_known_where_the_file_names_them_all(
    tmp_path: Path, text: str, names: set[str] | None
) -> None:
    (tmp_path / "neighbour.py").write_text("def go(session): session.report(other=1)")
    (tmp_path / "named.py").write_text(text)
    assert reported_metrics(Program(tmp_path / "named.py")) == names
