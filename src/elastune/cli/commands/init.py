"""``elastune init``: a first program, to be made one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastune.cli.output import OK
from elastune.core.errors import UserError

FIRST_PROGRAM = Path(__file__).parent.parent / "first_program.py"


def init(file: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")] = Path("train.py")) -> int:
    """Write FILE: a program that runs as it is, with comments that say what to put in its place."""
    if file.suffix != ".py":
        raise UserError("a program must be a Python file", file, "give it the ending .py")
    text = FIRST_PROGRAM.read_text().replace(" train.py ", f" {file} ")
    try:
        with file.open("x") as new:
            new.write(text)
    except FileExistsError:
        raise UserError("elastune init overwrites nothing", file, "give another name: elastune init mine.py") from None
    except OSError as error:
        rule = "the first program must be written to a folder that is there"
        raise UserError(rule, f"{file}: {error.strerror}", "check the path") from None
    print(f"{file} is written. Next: elastune run {file} --workers 2")
    return OK
