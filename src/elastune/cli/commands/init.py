"""``elastune init``: a first program to edit, or your own plain training script converted to a program.

The conversion itself is in ``cli.convert``. A converted program is then compared with its script, step by step.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options
from elastune.cli.output import FAILED, OK, print_lines
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.cli.convert.conversion import Conversion

FIRST_PROGRAM = Path(__file__).parent.parent / "first_program.py"


def init(
    file: Annotated[Path, typer.Argument(help="The file to write. It must not exist yet.")] = Path("train.py"),
    arguments: options.Arguments = None,
    plain: Annotated[
        Path | None, typer.Option("--from", metavar="PLAIN.py", help="A plain training script, to be converted.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Whether a converted program is compared with its script.")
    ] = True,
) -> int:
    """Write a first program, or convert a plain training script.

    FILE is then a program that runs as it is. Its comments say what to put in its place.

    With --from, FILE is your plain script with the lines changed that must change; the command shows them. What could
    not be converted for certain has a comment that begins with "elastune:", and one line here.

    Then both train: the lines of elastune check FILE --against PLAIN.py follow. ARGS are the script's own. The exit
    code is 1 where the first steps differ. --no-check leaves the comparison out.
    """
    if file.suffix != ".py":
        raise UserError("a program must be a Python file", file, "give it the ending .py")
    if plain is None:
        _write(file, FIRST_PROGRAM.read_text().replace(" train.py ", f" {file} "))
        print(f"{file} is written. Next: elastune run {file} --workers 2")
        return OK
    try:
        before = plain.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("a plain program must be a file that can be read", f"{plain}: {error}", "check it") from None
    from elastune.cli.convert.conversion import convert

    converted = convert(before, plain.name)
    _write(file, converted.text)
    changed = difflib.unified_diff(
        before.splitlines(), converted.text.splitlines(), str(plain), str(file), n=0, lineterm=""
    )
    print_lines(*changed)
    return _tell(file, plain, converted, tuple(arguments or ()), check=check)


def _write(file: Path, text: str) -> None:
    try:
        with file.open("x") as new:
            new.write(text)
    except FileExistsError:
        raise UserError("elastune init overwrites nothing", file, "give another name: elastune init mine.py") from None
    except OSError as error:
        rule = "the first program must be written to a folder that is there"
        raise UserError(rule, f"{file}: {error.strerror}", "check the path") from None


def _tell(file: Path, plain: Path, converted: Conversion, arguments: tuple[str, ...], *, check: bool) -> int:
    """Print what is not certain in a converted program, and whether it trains as its script does."""
    print_lines(*(f"{file}:{line}: {words}" for line, words in converted.marks))
    given = " ".join(["", "--", *arguments]) if arguments else ""
    if not check:
        print(f"{file} is written. Next: elastune check {file} --against {plain}{given}")
        return OK
    from elastune.core.run import Program
    from elastune.runtime.job.program_check import check_against
    from elastune.runtime.job.run import JobFailed

    try:
        compared = check_against(Program(file, arguments=arguments), plain, {})
    except JobFailed as error:
        detail = error.failure.detail
    except UserError as error:
        detail = str(error)
    else:
        print_lines(compared.as_line(file.name))
        same = not compared.problem
        print(f"{file} is written. Next: elastune {'run' if same else 'check'} {file}{given}")
        return OK if same else FAILED
    print_lines(f"{file.name}: not compared with {plain.name}: {detail}")
    print(f"{file} is written. Next: change that, then elastune check {file} --against {plain}{given}")
    return FAILED
