"""``elastune init``: a first program, to be made one's own; or one's own, as a program."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli.from_plain import from_plain
from elastune.cli.output import OK, say
from elastune.core.errors import UserError

FIRST_PROGRAM = Path(__file__).parent.parent / "first_program.py"


def init(
    file: Annotated[Path, typer.Argument(help="The file to write. It must not exist yet.")] = Path("train.py"),
    plain: Annotated[
        Path | None, typer.Option("--from", help="A Python file with a plain training loop, to be rewritten.")
    ] = None,
) -> int:
    """Write a first program, or rewrite a plain training loop.

    FILE is then a program that runs as it is. Its comments say what to put in its place.

    With --from, FILE is your plain training loop with the lines changed that must change; the command shows them. Then
    elastune check FILE tells what else keeps the program from the same results on any number of workers.
    """
    if file.suffix != ".py":
        raise UserError("a program must be a Python file", file, "give it the ending .py")
    before = ""
    if plain is None:
        text = FIRST_PROGRAM.read_text().replace(" train.py ", f" {file} ")
    else:
        try:
            before = plain.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                "a plain program must be a file that can be read", f"{plain}: {error}", "check it"
            ) from None
        text = from_plain(before, plain.name)
    try:
        with file.open("x") as new:
            new.write(text)
    except FileExistsError:
        raise UserError("elastune init overwrites nothing", file, "give another name: elastune init mine.py") from None
    except OSError as error:
        rule = "the first program must be written to a folder that is there"
        raise UserError(rule, f"{file}: {error.strerror}", "check the path") from None
    if plain is not None:
        changed = difflib.unified_diff(before.splitlines(), text.splitlines(), str(plain), str(file), n=0, lineterm="")
        say(*changed)
    print(f"{file} is written. Next: elastune {'run' if plain is None else 'check'} {file}", end="")
    print(" --workers 2" if plain is None else "")
    return OK
