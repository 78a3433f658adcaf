"""The user's file: what it may be, and one line for everything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.train.program.load import load, merge

TRAIN = "def train(session): pass\n"


def program(folder: Path, text: str) -> Program:
    path = folder / "mine.py"
    path.write_text(text)
    return Program(path)


def test_a_whole_program(tmp_path: Path) -> None:
    text = (
        TRAIN + "config = {'lr': 0.1, 'layers': (1, 2)}\nobjectives = {'accuracy': 'max'}\ndef space(trial): return {}"
    )
    loaded = load(program(tmp_path, text))
    assert loaded.config == {"lr": 0.1, "layers": [1, 2]}
    assert loaded.objectives == {"accuracy": "max"}
    assert callable(loaded.space)
    assert callable(loaded.train)


def test_constraints_stand_beside_the_space(tmp_path: Path) -> None:
    assert load(program(tmp_path, TRAIN + "constraints = ['seconds <= 60']")).constraints == ("seconds <= 60",)
    assert load(program(tmp_path, TRAIN)).constraints == ()


def test_only_train_is_needed_and_it_may_have_another_name(tmp_path: Path) -> None:
    path = program(tmp_path, "def fit(session): pass").path
    loaded = load(Program(path, "fit"))
    assert (loaded.space, loaded.objectives, loaded.config) == (None, {}, {})


def test_neighbours_are_importable_and_main_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 7")
    text = f"import neighbour_of_mine\nconfig = {{'v': neighbour_of_mine.VALUE}}\n{TRAIN}if __name__ == '__main__': 1/0"
    assert load(program(tmp_path, text)).config == {"v": 7}


def test_dataclasses_and_pickles_find_the_module(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
    load(program(tmp_path, text + TRAIN))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must define train"),
        ("train = 3", "must define train"),
        ("def train(session:\n", "mine.py:1"),
        ("x = 1\ny = 1 / 0\n" + TRAIN, "mine.py:2"),
        ("raise ValueError('two\\nlines')\n" + TRAIN, "ValueError: two lines"),
        ("import not_a_module_of_anyone\n" + TRAIN, "not_a_module_of_anyone"),
        ("import sys\nsys.exit('bye')\n" + TRAIN, "sys.exit('bye')"),
        ("def f(): f()\nf()\n" + TRAIN, "RecursionError"),
        (TRAIN + "config = [1]", "config must be a dict"),
        (TRAIN + "config = {1: 2}", "config must be a dict"),
        (TRAIN + "config = {'f': print}", "config values must be"),
        (TRAIN + "config = {'x': float('nan')}", "config values must be"),
        (TRAIN + "config = {}\nconfig['me'] = config", "config values must be"),
        (TRAIN + "space = {'lr': 1}", "space must be a function"),
        (TRAIN + "objectives = ['accuracy']", "objectives must map"),
        (TRAIN + "objectives = {'accuracy': 1}", "objectives must map"),
        (TRAIN + "constraints = 'seconds <= 60'", "constraints must be a list of texts"),
        (TRAIN + "constraints = [60]", "constraints must be a list of texts"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load(program(tmp_path, text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(TRAIN)
    (tmp_path / "bytes.py").write_bytes(b"\x00\xff\xfe")
    for path in (tmp_path / "absent.py", tmp_path, tmp_path / "notes.txt", tmp_path / "bytes.py"):
        with pytest.raises(UserError, match="a program must"):
            load(Program(path))


def test_errors_that_the_file_raises_for_its_user_pass(tmp_path: Path) -> None:
    text = "from elastune.core.errors import UserError\nraise UserError('data must exist', 'none', 'make some')"
    with pytest.raises(UserError, match="data must exist"):
        load(program(tmp_path, text))


def test_settings_must_be_known_where_any_are_declared() -> None:
    assert merge({"lr": 1, "n": 2}, {"lr": 3}) == {"lr": 3, "n": 2}
    assert merge({}, {"anything": 3}) == {"anything": 3}
    with pytest.raises(UserError, match="got rl"):
        merge({"lr": 1}, {"rl": 3})


def test_an_edit_of_equal_size_within_a_second_counts(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    for digit in "123":
        path.write_text(f"config = {{'lr': {digit}}}\ndef train(session): pass\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert load(Program(path)).config == {"lr": int(digit)}


def test_a_setting_of_a_group_makes_it_where_there_is_no_config() -> None:
    assert merge({}, {"optim.lr": 0.1, "optim.betas": [0.9], "epochs": 2}) == {
        "optim": {"lr": 0.1, "betas": [0.9]},
        "epochs": 2,
    }
    assert merge({"optim": {"lr": 1, "name": "sgd"}}, {"optim.lr": 0.1}) == {"optim": {"lr": 0.1, "name": "sgd"}}
    with pytest.raises(UserError, match=r"either a value or a group of values \(got optim and optim.lr\)"):
        merge({}, {"optim": 1, "optim.lr": 0.1})
