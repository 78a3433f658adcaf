"""The search space of a command, and the checks before any trial starts."""

import shlex
import sys
from pathlib import Path

import optuna
import pytest

from elastune.core.command import TrainingCommand
from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.train.program.command import check_executable, check_values, files_of, parse_command, read_space
from elastune.train.program.load import load_as_guest
from elastune.train.program.source import differences, program_digest, source_of
from elastune.train.program.space import corners

RESERVED = ("policy", "mode", "workers")


def space_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return path


def test_a_yaml_file_is_a_space(tmp_path: Path) -> None:
    read = read_space(
        space_file(
            tmp_path,
            "lr: {low: 1e-3, high: 0.1, log: true}\nlayers: {low: 1, high: 3}\nwidth: {low: 8, high: 32, step: 8}\n"
            "act: {choices: [relu, tanh]}\nepochs: 5\nname: base\n",
        )
    )
    assert read.constants == {"epochs": 5, "name": "base"}
    values = read.space(optuna.trial.FixedTrial({"lr": 0.01, "layers": 2, "width": 16, "act": "tanh"}))
    assert values == {"lr": 0.01, "layers": 2, "width": 16, "act": "tanh"}
    kinds = {name: type(each).__name__ for name, each in corners(read.space, 0)[0].distributions.items()}
    assert kinds == {
        "lr": "FloatDistribution",
        "layers": "IntDistribution",
        "width": "IntDistribution",
        "act": "CategoricalDistribution",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a name and a range"),
        ("- lr", "a name and a range"),
        ("1: 2", "a name and a range"),
        ("lr: {low: 1", "must be YAML"),
        ("lr: !!python/object/apply:os.system [true]", "must be YAML"),
        ("lr: [0.1, 0.2]", "choices"),
        ("lr: null", "choices"),
        ("lr: {low: 1}", "no low and high"),
        ("lr: {low: 1, high: 2, base: 3}", "base"),
        ("lr: {low: one, high: 2}", "low of a range must be a finite number"),
        ("lr: {low: .nan, high: 2}", "low of a range must be a finite number"),
        ("lr: {low: true, high: 2}", "low of a range must be a finite number"),
        ("lr: {low: 3, high: 2}", "from low to high"),
        ("lr: {low: 0, high: 2, log: true}", "above 0"),
        ("lr: {low: 1, high: 2, log: maybe}", "true or false"),
        ("lr: {low: 1, high: 2, step: 0}", "a step must be above 0"),
        ("lr: {choices: []}", "choices"),
        ("lr: {choices: [[1]]}", "choices"),
        ("lr: {choices: [1], low: 2}", "choices"),
    ],
)
def test_a_wrong_space_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        read_space(space_file(tmp_path, text))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_space_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_space(tmp_path / "space.yaml")


def test_a_python_file_is_a_space(tmp_path: Path) -> None:
    path = tmp_path / "space.py"
    path.write_text(
        "config = {'epochs': 3}\nobjectives = {'accuracy': 'max'}\n"
        "def space(trial): return {'lr': trial.suggest_float('lr', 0.1, 1)}\n"
    )
    loaded = load_as_guest(Program(path, command=TrainingCommand(("a", "{lr}", "{epochs}", "{workers}"))))
    assert loaded.config == {"lr": None, "epochs": 3}
    assert loaded.objectives == {"accuracy": "max"}
    assert loaded.space is not None
    path.write_text("spaces = 1")
    with pytest.raises(UserError, match=r"must define space\(trial\)"):
        load_as_guest(Program(path, command=TrainingCommand(("a",))))


@pytest.mark.parametrize(
    ("words", "space", "config", "epochs", "says"),
    [
        ("a {lr} {depth}", "lr: {low: 1, high: 2}", {"depth": None}, None, "{depth}"),
        ("a {lr}", "lr: {low: 1, high: 2}\nwd: {low: 1, high: 2}", {}, None, "add {wd} to the command"),
        ("a {lr}", "lr: {low: 1, high: 2}", {"wd": 1}, None, "add {wd} to the command"),
        ("a {lr}", "lr: {low: 1, high: 2}", {}, 3, "add {epochs} to the command"),
        ("a {policy}", "policy: {choices: [a, b]}", {}, None, "elastune's own names"),
    ],
)
def test_settings_and_placeholders_must_fit(
    tmp_path: Path, words: str, space: str, config: dict[str, object], epochs: int | None, says: str
) -> None:
    samples = corners(read_space(space_file(tmp_path, space)).space, 0)
    with pytest.raises(UserError) as refused:
        check_values(TrainingCommand(tuple(shlex.split(words))), config, samples, RESERVED, epochs)
    assert says in str(refused.value)


def test_settings_that_fit_pass(tmp_path: Path) -> None:
    samples = corners(read_space(space_file(tmp_path, "lr: {low: 1, high: 2}\nworkers: {low: 1, high: 2}")).space, 0)
    command = TrainingCommand(("a", "{lr}", "{workers}", "{seed}", "{folder}", "{epochs}", "{wd}"))
    check_values(command, {"wd": 0.1, "epochs": None}, samples, RESERVED, 3)


@pytest.mark.parametrize(
    ("text", "metrics", "says"),
    [
        ("a 'b", (), "closed quotes"),
        ("a | b", (), "no shell"),
        ("a > b", (), "no shell"),
        ("", (), "must name a command"),
        ("a", ("json", "acc=([0-9])"), "either json or expressions"),
    ],
)
def test_a_wrong_command_line_is_refused(text: str, metrics: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_command(text, metrics)


def test_a_command_must_name_a_program_that_starts() -> None:
    check_executable(TrainingCommand((sys.executable,)))
    with pytest.raises(UserError, match="can be started"):
        check_executable(TrainingCommand(("no-such-program",)))


def test_an_edit_of_the_script_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nif __name__ == '__main__':\n    print(1)\n")
    program = Program(tmp_path / "space.yaml", command=parse_command(f"python {script} {{lr}}"))
    assert files_of(parse_command(f"python {script} {script} gone.py")) == [script]
    before, digest = source_of(program), program_digest(program)
    assert differences(before, program) == []
    script.write_text("import sys\n# a comment\nif __name__ == '__main__':\n    print(2)\n")
    assert differences(before, program) == [f"{script}, line 4, in top-level code"]
    assert program_digest(program) != digest
