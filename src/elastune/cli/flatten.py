"""Groups of options as dataclasses: Typer sees each field as an option, and the journal keeps the command line.

``elastune resume`` gives the kept command line again (``resumed_words``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from elastune.cli.program_words import split
from elastune.core.run import CommandLine

# --- the command line that the journal keeps ---

NOT_REPEATED = {
    "out",
    "resume",
    "json",
    "chaos",
    "chaos_verify",
    "accept_changes",
    "dry_run",
}  # ``elastune resume`` does not repeat these options


def command_line_of(name: str, parameters: Sequence[Parameter], values: Mapping[str, Any]) -> CommandLine:
    """Return the words of the command ``name`` that differ from its defaults, one word an option: "--workers=2"."""
    options: list[str] = []
    files: list[str] = []
    for parameter in parameters:
        value = values[parameter.name]
        if parameter.name in NOT_REPEATED or value is None or value == parameter.default:
            continue
        info = next(each for each in parameter.annotation.__metadata__ if isinstance(each, OptionInfo | ArgumentInfo))
        if isinstance(info, ArgumentInfo):
            files += map(str, value if isinstance(value, list | tuple) else [value])
            continue
        option = _option(info, parameter.name)
        if value is True:
            options.append(option)
        else:
            options += [f"{option}={each}" for each in (value if isinstance(value, list | tuple) else [value])]
    return CommandLine((name, *options, "--", *files), str(Path.cwd()))


def resumed_words(earlier: CommandLine, changes: Sequence[str], out: Path) -> list[str]:
    """Return the words that continue the command line ``earlier`` in ``out``.

    Each option among ``changes`` replaces the same option of ``earlier``; a ``--set`` replaces that of the same
    setting. With other epochs an earlier ``--max-steps`` no longer counts. Words of ``changes`` behind ``--`` replace
    the program's own arguments.
    """
    name, *rest = earlier.words
    end = rest.index("--")
    options, program_words = split(changes)
    fresh = _joined(options)
    replaced = {_key(word) for word in fresh}
    if replaced & {"--epochs", "--set=epochs"}:  # an earlier --max-steps would end the run before its epochs
        replaced |= {"--epochs", "--max-steps"}
    kept = [word for word in rest[:end] if _key(word) not in replaced]
    behind = rest[end:] if program_words is None else [*rest[end : end + 2], *program_words]
    return [name, *kept, *fresh, f"--out={out}", "--resume", *behind]


def _option(info: OptionInfo, name: str) -> str:
    """The option as Typer names it: Typer stores the first declared name in place of the default."""
    named = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
    return next((word for word in named if word.startswith("--")), f"--{name.replace('_', '-')}")


def _joined(words: Sequence[str]) -> list[str]:
    """Options with their values in one word each: ["--workers", "2"] becomes ["--workers=2"]."""
    joined: list[str] = []
    for word in words:
        if word.startswith("--") or not joined or "=" in joined[-1]:
            joined.append(word)
        else:
            joined[-1] += f"={word}"
    return joined


def _key(word: str) -> str:
    option, _, value = word.partition("=")
    return f"{option}={value.partition('=')[0]}" if option == "--set" else option


# --- groups of options ---


def flatten(command: Callable[..., int]) -> Callable[..., int]:
    """Return ``command`` with the fields of its dataclass parameters as keyword parameters in their place.

    Typer reads the signature of the returned function, so each field becomes an option. A parameter of the type
    ``CommandLine`` is no option: the command receives its own command line in it.
    """
    hints = get_type_hints(command, include_extras=True)
    command_lines = [name for name, kind in hints.items() if kind is CommandLine]
    groups = {
        name: kind for name, kind in hints.items() if name not in ("return", *command_lines) and is_dataclass(kind)
    }
    flat: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in command_lines:
            continue
        flat += _fields_of(groups[name]) if name in groups else [_keyword(name, hints[name], parameter.default)]

    @wraps(command)
    def call(**values: Any) -> int:
        words = {name: command_line_of(command.__name__, flat, values) for name in command_lines}
        grouped = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})  # type: ignore[operator]
            for name, kind in groups.items()
        }
        return command(**values, **grouped, **words)

    call.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call


def _fields_of(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        _keyword(f.name, hints[f.name], Parameter.empty if f.default is MISSING else f.default) for f in fields(group)
    ]


def _keyword(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
