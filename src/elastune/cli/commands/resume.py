"""``elastune resume``: go on with what is in an output folder, by its journal alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options
from elastune.cli.given import again
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.core.command import CommandGiven

Call = Callable[[list[str]], int]
RESUMABLE = ("run", "tune", "frontier", "tree")


def resume_by(call: Call) -> Callable[..., int]:
    """Return the command, which goes on by ``call``: the command line of these words."""

    def resume(
        context: typer.Context,
        out: Annotated[str, typer.Argument(metavar="OUT", help="The output folder of a run, a study or a frontier.")],
        workers: Annotated[str | None, typer.Option(metavar="N|LOW:HIGH", help="Other workers than before.")] = None,
        epochs: Annotated[
            int | None,
            typer.Option(help="Train for more epochs than before, in all. An earlier --max-steps no longer counts."),
        ] = None,
        max_steps: Annotated[int | None, typer.Option(help="End after this many steps, in all.")] = None,
        json: options.Json = False,
    ) -> int:
        """Go on with a run, a study or a frontier.

        File, options and cluster are those of the command that began it; its journal has them. Other options of that
        command may be given behind OUT, such as --trials 40 or --set epochs=20. They replace what was said before. What
        would change the result of what is there already is refused.

        --json: the object of that command.
        """
        changes = [f"--{name}={value}" for name, value in (("workers", workers), ("epochs", epochs)) if value]
        changes += [] if max_steps is None else [f"--max-steps={max_steps}"]
        given = _given(out)
        words = again(given, [*changes, *context.args, *(["--json"] if json else [])], Path(out).resolve())
        there = Path(given.folder)
        if not there.is_dir() and not Path(words[-1]).exists():
            command = shlex.join(["elastune", *words])
            rule = "a command is given again in the folder that it was given in"
            raise UserError(rule, f"no folder {there}", f"go to where {words[-1]} is, and give it yourself: {command}")
        with chdir(there) if there.is_dir() else nullcontext():
            return call(words)

    return resume


def _given(out: str) -> CommandGiven:
    """The command that the results in ``out`` are of, as it was given last."""
    from elastune.job.mirror import is_url
    from elastune.job.output_dir import JOURNAL
    from elastune.journal.reader import read
    from elastune.journal.records import RunStarted, StudyStarted

    if out.startswith("-"):
        raise UserError("the output folder comes first", out, "elastune resume OUT, and options behind it")
    if is_url(out):
        raise UserError("elastune resume needs a folder", out, f"give the command again with --resume --out {out}")
    told = [entry.record for entry in read(Path(out) / JOURNAL)]
    begun = [record for record in told if isinstance(record, RunStarted | StudyStarted)]
    if not begun:
        raise UserError("only a run, a study or a frontier can be resumed", out, "name the folder of one")
    commands = [record.command for record in begun if record.command is not None]
    if not commands:
        fix = f"give its command again with --resume --out {out}; in Python, call it again with resume=True"
        raise UserError("elastune resume needs the command line that began it", f"none in the journal of {out}", fix)
    words = commands[-1].words
    if not words or words[0] not in RESUMABLE or "--" not in words:
        rule = "the command in a journal must be as elastune wrote it"
        raise UserError(
            rule, shlex.join(words)[:100] or "none", f"give the command yourself, with --resume --out {out}"
        )
    return commands[-1]
