"""Words of a command line behind ``--``: arguments of the program's own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typer.core import TyperCommand

from elastune.core.errors import UserError

if TYPE_CHECKING:
    import click

SEPARATOR = "--"


class ProgramCommand(TyperCommand):
    """A command whose FILE may be followed by ``--`` and arguments of the program's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse ``args``, and refuse a word that stands beside FILE without ``--`` in between."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        own = list(ctx.params.get("arguments") or ())
        before = given[: len(given) - len(own)]
        # A journal has FILE behind the separator, too, where nothing can be taken for an option.
        if own and SEPARATOR not in before[-2:]:
            rule = "a command takes one FILE; what is for the program stands behind --"
            raise UserError(rule, shlex.join(own), f"elastune {self.name} FILE {SEPARATOR} {shlex.join(own)}")
        return rest


class ResumeCommand(TyperCommand):
    """A command that hands all words that it does not know on, and keeps ``--``, which ends the options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse ``args`` up to ``--``; the others are the last of the context's own."""
        options, own = split(args)
        rest = super().parse_args(ctx, options)
        if own is not None:
            ctx.args = [*ctx.args, SEPARATOR, *own]
        return rest


def split(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The words before ``--`` and those behind it; None without ``--``."""
    if SEPARATOR not in words:
        return list(words), None
    at = list(words).index(SEPARATOR)
    return list(words[:at]), list(words[at + 1 :])
