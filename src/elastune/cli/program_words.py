"""Words of a command line behind ``--``: arguments of the program's own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from elastune.cli.help import HelpCommand
from elastune.core.errors import UserError

SEPARATOR = "--"


# Typer has a context class of its own in newer versions: ``Any`` here fits both.
class ProgramCommand(HelpCommand):
    """A command whose FILE may be followed by ``--`` and arguments of the program's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args``, and refuse a word that stands beside FILE without ``--`` in between."""
        words = list(args)
        rest = super().parse_args(ctx, args)
        program_words = list(ctx.params.get("arguments") or ())
        before = words[: len(words) - len(program_words)]
        # A journal has FILE behind the separator, too, where nothing can be taken for an option.
        if program_words and SEPARATOR not in before[-2:]:
            rule = "a command takes one FILE; what is for the program stands behind --"
            raise UserError(
                rule, shlex.join(program_words), f"elastune {self.name} FILE {SEPARATOR} {shlex.join(program_words)}"
            )
        return rest


class ResumeCommand(HelpCommand):
    """A command that hands all words that it does not know on, and keeps ``--``, which ends the options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args`` up to ``--``; the others are the last of the context's own."""
        options, program_words = split(args)
        rest = super().parse_args(ctx, options)
        if program_words is not None:
            ctx.args = [*ctx.args, SEPARATOR, *program_words]
        return rest


def split(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The words before ``--`` and those behind it; None without ``--``."""
    if SEPARATOR not in words:
        return list(words), None
    at = list(words).index(SEPARATOR)
    return list(words[:at]), list(words[at + 1 :])
