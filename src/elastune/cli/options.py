"""Options of the command line alone, the words behind ``--``, and how ``--help`` shows all options.

A setting names its panel where it is declared (``core/fields.py``), an option of the command line alone in its
``typer.Option``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from elastune.core.errors import UserError
from elastune.core.fields import COMMON, OUTPUT

# The options of the command line alone that several commands share. All others are settings (``core/fields.py``).

File = Annotated[Path, typer.Argument(help="The program: a Python file that defines train(session).")]
FileOrCommand = Annotated[
    Path | None,
    typer.Argument(help="The program: a Python file that defines train(session). Or use --command, without FILE."),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGUMENT", help="Arguments of the program's own, which it finds in sys.argv."),
]
AcrossChanges = Annotated[
    bool,
    typer.Option(
        "--across-changes",
        help="Of a study: compare trials that began before an accepted change of the program, its space or the data "
        "with those after it.",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object on stdout, and everything else on stderr. docs/commands.md lists its fields.",
        rich_help_panel=OUTPUT,
    ),
]
Dashboard = Annotated[
    bool,
    typer.Option(
        "--dashboard",
        help="Show the work in a browser while it goes on: the command prints the address (see elastune dashboard).",
        rich_help_panel=OUTPUT,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check all that can be checked without a worker, print what would be started, and end. No results are "
        "written.",
        rich_help_panel=OUTPUT,
    ),
]
Data = Annotated[
    Path | None, typer.Option(help="Folder of the data sets, instead of $ELASTUNE_DATA.", rich_help_panel=OUTPUT)
]


# What ``--help`` of a command shows: its options in panels, the common ones first, and two examples.

OTHERS = "Options"
PANELS = (COMMON, OTHERS, "Search", "Training", "Execution", "Cluster", "Cost", "Measurement", "Faults", OUTPUT)
"""The panels in the order of help. An option of one command alone is in ``OTHERS``."""
COMMON_OPTIONS = ("--workers", "--epochs", "--set", "--seed", "--out", "--resume", "--budget")
"""The first options of the first panel, in order."""
EXAMPLES: dict[str, tuple[str, str]] = {
    "init": ("elastune init train.py", "elastune init train.py --from plain.py"),
    "run": (
        "elastune run train.py --workers 4 --epochs 10 --set lr=0.1 --out out",
        "elastune run train.py --workers 1:8 --out out --resume",
    ),
    "resume": ("elastune resume out", "elastune resume out --workers 2 --epochs 20"),
    "check": ("elastune check train.py", "elastune check train.py --against plain.py"),
    "ls": ("elastune ls", "elastune ls runs --json"),
    "stop": ("elastune stop elastune-out/train-run-1", "elastune stop out --wait 5m"),
    "logs": ("elastune logs out --lines 100", "elastune logs out -f"),
    "dashboard": ("elastune dashboard", "elastune dashboard out --port 8080 --read-only"),
    "trials": ("elastune trials out stop 3", "elastune trials out go-on 7"),
    "budget": ("elastune budget out --trials 100", "elastune budget out --budget 2h --worker-hours 6"),
    "resize": ("elastune resize out 4", "elastune resize out 4 --cluster hosts:login1:7070 --token-file token"),
    "reshape": (
        "elastune reshape out data=1,tensor=2",
        "elastune reshape out data=2 --cluster hosts:login1:7070 --token-file token",
    ),
    "tune": (
        "elastune tune train.py --trials 50 --workers 8 --budget 30m",
        "elastune tune train.py --trials 20 --objective accuracy:max --stopping asha --keep front",
    ),
    "simulate": (
        "elastune simulate train.py --workers 2048 --trials 500",
        "elastune simulate train.py --availability trace.csv --prices prices.csv --deadline 20h",
    ),
    "frontier": (
        "elastune frontier train.py --workers 1,2,4,8 --budget 10m",
        "elastune frontier train.py --workers 1,4 --target 0.95 --quality accuracy --budget auto",
    ),
    "tree": (
        "elastune tree train.py --tree '[[0,1],[2,3]]' --workers 4",
        "elastune tree train.py --tree '[[0,1],[2,3]]' --epochs 5 --out parts",
    ),
    "plan": (
        "elastune plan train.py --nodes 16 --gpus-per-node 8 --deadline 8h",
        "elastune plan train.py --nodes 2 --device h100 --runs 64",
    ),
    "report": ("elastune report out", "elastune report out --pick accuracy=0.98"),
    "explain": ("elastune explain out", "elastune explain out --plan plan"),
    "predict": ("elastune predict out --data test", "elastune predict out --data test --json"),
    "ensemble": ("elastune ensemble out --members 8", "elastune ensemble out --members 4 --out ensemble.safetensors"),
    "soup": ("elastune soup out", "elastune soup out --out soup.safetensors"),
    "transfer": ("elastune transfer out --data new", "elastune transfer out --data new --json"),
    "classes": ("elastune classes out --groups 3", "elastune classes out --groups 2,5 --data test"),
    "join": ("elastune join gate parts --front flat", "elastune join gate parts --front flat --json"),
    "export": ("elastune export out --csv trials.csv", "elastune export out --safetensors weights.safetensors"),
    "doctor": ("elastune doctor", "elastune doctor --cluster hosts:7070"),
    "agent": (
        "elastune agent --join login1:7070 --token-file token",
        "elastune agent --join login1:7070 --token-file token --workers 4 --kind spot",
    ),
    "deploy": (
        "elastune deploy jobset --image IMAGE -- train.py",
        "elastune deploy skypilot --image IMAGE -- train.py",
    ),
}
"""Two command lines of each command."""


class HelpCommand(TyperCommand):
    """A command whose help has panels and examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options, panel by panel."""
        arguments, panels = [], dict[str, list[tuple[int, tuple[str, str]]]]()
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
                continue
            option = parameter.opts[0]
            common = option in COMMON_OPTIONS
            place = COMMON_OPTIONS.index(option) if common else len(COMMON_OPTIONS)
            panel = getattr(parameter, "rich_help_panel", None) or (COMMON if common else OTHERS)
            panels.setdefault(panel, []).append((place, record))
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        for panel in sorted(panels, key=PANELS.index):
            with formatter.section(panel):
                formatter.write_dl([record for _, record in sorted(panels[panel], key=lambda each: each[0])])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, unwrapped, so that they can be copied."""
        examples = EXAMPLES.get(self.name or "", ())
        if examples:
            with formatter.section("Examples"):
                for line in examples:
                    formatter.write(f"{' ' * formatter.current_indent}{line}\n")


# Words of a command line behind ``--``: arguments of the program's own.

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
