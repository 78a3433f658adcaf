"""The command line of a program's own: what it finds in ``sys.argv``, and what its parser makes of settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.sessions import lone_session

from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.train.program.load import LoadedProgram, load, load_as_guest, load_functions

PARSER = """
import argparse, sys
from pathlib import Path
{top}
def train(session):
{inside}
    session.config["seen"](args, sys.argv)
"""
MADE = (
    "parser = argparse.ArgumentParser()",
    "parser.add_argument('--lr', type=float, default=0.1)",
    "parser.add_argument('--steps', type=int, default=None)",
    "parser.add_argument('--data', type=Path, default=Path('here'))",
    "parser.add_argument('--kind', choices=['a', 'b'], default='a')",
    "group = parser.add_argument_group('more')",
    "group.add_argument('--sizes', type=int, nargs='*', default=[1])",
    "group.add_argument('--fast', action='store_true')",
    "args = parser.parse_args()",
)
DEFAULTS = {"lr": 0.1, "steps": None, "data": "here", "kind": "a", "sizes": [1], "fast": False}
TOP = PARSER.format(top="\n".join(MADE), inside="    global args")
INSIDE = PARSER.format(top="", inside="\n".join(f"    {line}" for line in MADE))
RETURNED = PARSER.format(
    top="def options():\n" + "\n".join(f"    {line}" for line in MADE) + "\n    return args",
    inside="    args = options()",
)
BOTH = pytest.mark.parametrize("text", [TOP, INSIDE, RETURNED], ids=["top", "inside", "returned"])


def program(folder: Path, text: str, *arguments: str) -> Program:
    path = folder / "mine.py"
    path.write_text(text)
    return Program(path, arguments=arguments)


def trained(loaded: LoadedProgram, folder: Path, **config: Any) -> tuple[dict[str, Any], list[str]]:
    """What the training function has found: its namespace, and ``sys.argv``."""
    results: list[Any] = []
    seen = {"seen": lambda args, argv: results.extend([vars(args), argv])}
    loaded.train(lone_session(folder, config={**seen, **config}))
    return results[0], results[1]


@BOTH
def test_defaults_are_the_config_and_words_replace_them(tmp_path: Path, text: str) -> None:
    before = list(sys.argv)
    assert load(program(tmp_path, text)).config == DEFAULTS
    loaded = load(program(tmp_path, text, "--lr", "0.5", "--sizes", "3", "4"))
    assert loaded.config == {**DEFAULTS, "lr": 0.5, "sizes": [3, 4]}
    args, argv = trained(loaded, tmp_path)
    assert argv == [str(tmp_path / "mine.py"), "--lr", "0.5", "--sizes", "3", "4"]
    assert (args["lr"], args["data"]) == (0.5, Path("here"))
    assert sys.argv == before


@BOTH
def test_settings_of_the_run_come_last_and_have_the_types_of_the_parser(tmp_path: Path, text: str) -> None:
    settings = {"lr": 1, "steps": 7, "data": "there", "sizes": [5], "fast": True}
    args, _ = trained(load(program(tmp_path, text, "--lr", "0.5"), 0, settings), tmp_path)
    expected = {"lr": 1.0, "steps": 7, "data": Path("there"), "sizes": [5], "fast": True, "kind": "a"}
    assert args == expected
    assert isinstance(args["lr"], float)


@BOTH
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": "much"}, r"the setting lr must be what the program's parser takes \(got 'much'"),
        ({"steps": 1.5}, "the setting steps must be what the program's parser takes"),
        ({"kind": "c"}, r"the setting kind must be one of the parser's choices \(got 'c'\): use one of a, b"),
    ],
)
def test_a_setting_that_the_parser_does_not_take_is_refused_before_the_training(
    tmp_path: Path, text: str, setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(program(tmp_path, text)).check(setting)


@BOTH
@pytest.mark.parametrize(
    ("words", "message"), [(["--wide"], "unrecognized arguments: --wide"), (["--lr", "x"], "--lr")]
)
def test_words_that_the_parser_does_not_take_are_one_line(
    tmp_path: Path, text: str, words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=rf"must be those that it takes \(got .*{message}"):
        load_as_guest(program(tmp_path, text, *words))
    assert capfd.readouterr() == ("", "")


@BOTH
def test_help_is_the_parsers_own(tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_as_guest(program(tmp_path, text, "--help"))
    assert ended.value.code == 0
    assert capfd.readouterr().out.startswith("usage: mine.py [-h] [--lr LR]")


def test_a_parser_in_another_file_is_watched_while_the_program_trains(tmp_path: Path) -> None:
    made = "\n".join(f"    {line}" for line in MADE)
    (tmp_path / "options_of_mine.py").write_text(
        f"import argparse\nfrom pathlib import Path\ndef get():\n{made}\n    return args"
    )
    text = PARSER.format(top="import options_of_mine", inside="    args = options_of_mine.get()")
    assert load(program(tmp_path, text)).config == {}
    args, _ = trained(load(program(tmp_path, text, "--steps", "3"), 0, {"lr": 0.7}), tmp_path)
    assert (args["lr"], args["steps"]) == (0.7, 3)
    for words, settings, said in (((), {"lrr": 1}, "got lrr"), (("--no",), {}, "unrecognized"), (("-h",), {}, "help")):
        with pytest.raises(UserError, match=said):
            trained(load(program(tmp_path, text, *words), 0, settings), tmp_path)


def test_words_of_its_own_that_a_program_gives_a_parser_stay_as_they_are(tmp_path: Path) -> None:
    top = "\n".join([*MADE[:-1], "args = parser.parse_args(['--lr', '3'])"])
    text = PARSER.format(top=top, inside="    global args")
    loaded = load(program(tmp_path, text, "--whatever"), 0, {"lr": 0.7})
    assert loaded.config == {}
    assert trained(loaded, tmp_path)[0]["lr"] == 3.0


@pytest.mark.parametrize("call", ["args = parser.parse_args(", "args, _ = parser.parse_known_args("])
def test_a_parser_that_is_given_the_programs_words_reads_them(tmp_path: Path, call: str) -> None:
    text = PARSER.format(top="\n".join([*MADE[:-1], f"{call}sys.argv[1:])"]), inside="    global args")
    assert load(program(tmp_path, text, "--steps", "3")).config == {**DEFAULTS, "steps": 3}
    assert trained(load(program(tmp_path, text, "--lr", "0.5"), 0, {"lr": 0.7}), tmp_path)[0]["lr"] == 0.7
    assert trained(load(program(tmp_path, text), 0, {"lr": 0.7}), tmp_path)[0]["lr"] == 0.7


def test_sub_commands_have_settings_too(tmp_path: Path) -> None:
    lines = (
        "parser = argparse.ArgumentParser()",
        "commands = parser.add_subparsers(dest='command')",
        "fit = commands.add_parser('fit')",
        "fit.add_argument('--lr', type=float, default=0.1)",
        "args = parser.parse_args()",
    )
    text = PARSER.format(top="\n".join(lines), inside="    global args")
    loaded = load(program(tmp_path, text, "fit"), 0, {"lr": 1})
    assert loaded.config == {"command": "fit", "lr": 1.0}
    assert trained(loaded, tmp_path)[0] == {"command": "fit", "lr": 1.0}


def test_a_config_of_the_file_counts_beside_the_parser(tmp_path: Path) -> None:
    text = TOP + "\nconfig = {'lr': 9, 'width': 3}"
    assert load(program(tmp_path, text)).config == {**DEFAULTS, "lr": 9, "width": 3}
    assert load(program(tmp_path, TOP + "\nconfig = vars(args) | {'data': None}", "--lr", "2")).config["lr"] == 2.0


def test_a_parser_that_needs_other_lines_of_the_function_is_left_to_the_training(tmp_path: Path) -> None:
    inside = "    first = session.config['first']\n" + "\n".join(f"    {line}" for line in MADE)
    text = PARSER.format(top="", inside=inside.replace("default=0.1", "default=first"))
    loaded = load(program(tmp_path, text))
    assert loaded.config == {}
    assert trained(loaded, tmp_path, first=0.3)[0]["lr"] == 0.3


def test_a_main_of_an_adapters_script_gets_settings_by_its_parser(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = "\n".join(f"    {line}" for line in MADE)
    uses = "import argparse, sys\nfrom pathlib import Path\nfrom elastune.adapters.accelerate import Accelerator\n"
    text = f"{uses}def main():\n{made}\n    print(args.lr, args.steps, *sys.argv[1:])\n"
    loaded = load(program(tmp_path, text, "--steps", "2"), 0, {"lr": 0.7})
    loaded.train(lone_session(tmp_path, config=loaded.config))
    assert capsys.readouterr().out == "0.7 2 --steps 2\n"


def test_functions_of_a_study_program_see_its_words(tmp_path: Path) -> None:
    text = TOP + "\ndef build(config): return args.lr"
    build = load_functions(program(tmp_path, text, "--lr", "4"), ["build"])["build"]
    assert build is not None
    assert build({}) == 4.0


def test_functions_of_a_study_program_find_what_was_random_at_import(tmp_path: Path) -> None:
    text = "import torch\ndrawn = torch.rand(1).item()\ndef train(session): ...\ndef build(config): return drawn"
    load(program(tmp_path, text), 3)
    drawn = sys.modules["elastune_program_mine"].drawn
    build, other = (load_functions(program(tmp_path, text), ["build"], seed)["build"] for seed in (3, 4))
    assert build is not None
    assert other is not None
    assert build({}) == drawn != other({})
