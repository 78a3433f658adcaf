"""Options by which a training begins with another model's weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from elastune.core.errors import UserError
from elastune.core.start_from import StartFrom, parse_renames


@dataclass(frozen=True)
class Beginning:
    """With what a training begins."""

    start_from: Annotated[
        Path | None,
        typer.Option(
            "--start-from",
            metavar="SOURCE",
            help="Begin with those weights that fit of a run's folder, a trial's folder or a safetensors file. See "
            "docs/transfer.md.",
        ),
    ] = None
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="THERE=HERE",
            help="Beginning of tensors' names in SOURCE, and what it is here: backbone.=encoder. May be repeated.",
        ),
    ] = None
    fresh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Tensors that are not taken from SOURCE, such as 'head.*'. May be repeated."
        ),
    ] = None

    def choose(self) -> StartFrom | None:
        """What the options say. Raises ``UserError``, for a source that is not there, too."""
        if self.start_from is None:
            if self.rename or self.fresh:
                raise UserError("--rename and --fresh are of --start-from", "none", "add --start-from SOURCE")
            return None
        if not self.start_from.exists():
            fix = "name the folder of a run or a trial, or a safetensors file"
            raise UserError("--start-from must be there", self.start_from, fix)
        return StartFrom(self.start_from.resolve(), parse_renames(tuple(self.rename or ())), tuple(self.fresh or ()))
