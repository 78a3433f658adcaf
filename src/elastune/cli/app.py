"""The command line: its commands, and how every error becomes one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from importlib.metadata import version
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from elastune.cli.commands.agent import agent, deploy
from elastune.cli.commands.checks import check, doctor
from elastune.cli.commands.class_trees import classes, join, tree
from elastune.cli.commands.dashboard import dashboard
from elastune.cli.commands.folders import logs, ls, stop
from elastune.cli.commands.init import init
from elastune.cli.commands.plan import plan
from elastune.cli.commands.report import explain, export, report
from elastune.cli.commands.resize import reshape, resize
from elastune.cli.commands.reuse import ensemble, predict, soup, transfer
from elastune.cli.commands.run import resume_by, run
from elastune.cli.commands.search import frontier, tune
from elastune.cli.commands.simulate import simulate
from elastune.cli.commands.trials import budget, trials
from elastune.cli.options import HelpCommand, ProgramCommand, ResumeCommand, split
from elastune.cli.output import FAILED, INTERRUPTED, OK, WRONG, finish_copies, print_error, results_alone, stopped_code
from elastune.core.errors import UserError
from elastune.core.plugins import Plugins
from elastune.runtime.job.interrupts import Interrupted
from elastune.runtime.job.output import discard_refused, release_unused

# What click raises for a bad command line. Older Typers take it from click, newer ones bring their own.
_BadUsage = cast(type[Exception], typer.BadParameter.__mro__[2])
INSTALLED = Plugins("elastune.commands", "command")
"""Commands of other packages: each is a function, or a Typer app with commands of its own."""


class _Commands(TyperGroup):
    """The commands of elastune and those of other packages, whose modules are imported when they are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands, *(name for name in INSTALLED.names() if name not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; for a command of another package one that has its name and help, but imports nothing."""
        if cmd_name in self.commands or cmd_name not in INSTALLED.names():
            return self.commands.get(cmd_name)
        return TyperCommand(cmd_name, help=f"A command of {INSTALLED.package(cmd_name) or 'another package'}.")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is about to run; imports the module of a command of another package."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name not in self.commands:
            command = _installed_command(name)
        return name, command, rest


def _installed_command(name: str) -> Any:
    """The command that another package offers as ``name``. Raises ``UserError`` if it cannot be used."""
    offered = INSTALLED.load(name)
    if not (isinstance(offered, typer.Typer) or callable(offered)):
        raise UserError("an installed command must be a function or a Typer app", repr(offered), INSTALLED.fix(name))
    if isinstance(offered, typer.Typer):
        commands = offered
    else:
        commands = typer.Typer(add_completion=False, rich_markup_mode=None)
        commands.command(name)(_keep_interrupts(offered))
    try:
        return typer.main.get_command(commands)
    except Exception as error:  # an app without commands, or a parameter of a type that Typer lacks
        rule = f"Typer must accept an installed command: {type(error).__name__}: {error}"
        raise UserError(rule, name, INSTALLED.fix(name)) from error


app = typer.Typer(
    name="elastune",
    cls=_Commands,
    help="Train and tune PyTorch models on a changing set of workers, so that accuracy never pays for scale.\n\n"
    "Begin with elastune init, then elastune run train.py --workers 2. elastune COMMAND --help explains a command.\n\n"
    "Exit codes: 0 done, 1 failed, 2 wrong input (one line says which), 75 ended by SIGTERM, or the machine is "
    "being taken away (go on with --resume), 130 interrupted by Ctrl-C.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich takes "[default: ...]" and lists in brackets for its own marks, and drops them
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"elastune {version('elastune')}")
        raise typer.Exit(OK)


@app.callback()
def _options_of_all(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass


def _keep_interrupts(command: Callable[..., int]) -> Callable[..., int]:
    """Return ``command`` with Ctrl-C raised as ``Interrupted``: Typer would turn it into an exit code silently."""

    @wraps(command)
    def call(*args: Any, **options: Any) -> int:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            raise Interrupted from None

    return call


def _run_words(words: list[str]) -> int:
    """Run another command line; ``elastune resume`` continues by it."""
    return int(app(args=words, prog_name="elastune", standalone_mode=False) or OK)


resume = resume_by(_run_words)
MORE_OPTIONS = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
}  # options of the command that ``elastune resume`` repeats
WITH_ARGUMENTS = init, run, check, tune, frontier, plan  # of the program's own
ABOUT_RESULTS = report, explain, predict, ensemble, soup, transfer, classes, join, export
for command in (
    init,
    run,
    resume,
    check,
    ls,
    stop,
    logs,
    dashboard,
    trials,
    budget,
    resize,
    reshape,
    tune,
    simulate,
    frontier,
    tree,
    plan,
    *ABOUT_RESULTS,
    doctor,
    agent,
    deploy,
):
    kind = ResumeCommand if command is resume else ProgramCommand if command in WITH_ARGUMENTS else HelpCommand
    settings = MORE_OPTIONS if command is resume else None
    app.command(cls=kind, context_settings=settings)(_keep_interrupts(command))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and copy its results where they belong.

    Args:
        arguments: The words after ``elastune``; None for those of this process.

    Returns:
        The exit code, as ``elastune --help`` lists them.
    """
    code = _run(arguments)
    try:
        finish_copies()
    except UserError as error:
        return _fail(str(error), FAILED)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with results_alone() if "--json" in split(words)[0] else nullcontext():
            code = app(args=words, prog_name="elastune", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else OK  # a command of another package may return anything
    except UserError as error:
        discard_refused()
        return _fail(str(error), WRONG)
    except SystemExit as end:  # the program's own parser has printed its help, or a command of another package ends
        if isinstance(end.code, str):
            return _fail(end.code, FAILED)
        return end.code if isinstance(end.code, int) else OK
    except _BadUsage as error:
        message = getattr(error, "format_message", error.__str__)()
        if not message:  # no command was named: the help was shown
            return WRONG
        if message.startswith("Usage:"):  # likewise, by a Typer that leaves the showing to its caller
            sys.stderr.write(f"{message}\n")
            return WRONG
        context = getattr(error, "ctx", None)
        path = getattr(context, "command_path", "elastune")
        return _fail(f"{message.rstrip('.')}: see '{path} --help'", WRONG)
    except Interrupted:
        return _fail("interrupted", stopped_code())
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its exit
        return FAILED
    except OSError as error:
        if (gone := _removed_folder()) is not None:
            return _fail(f"the working directory must exist (got {gone} was removed): go into one that exists", WRONG)
        return _fail(f"the system refused (got {error}): check the path, its permissions and free space", WRONG)
    finally:
        release_unused()


def _removed_folder() -> str | None:
    """The working directory, if it was removed: the system's errors do not name it then."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.environ.get("PWD", "it")
    except OSError:
        return None
    return None


def _fail(message: str, code: int) -> int:
    print_error(message)
    return code
