"""Groups of options as dataclasses: how Typer reads a group, and the groups that several commands take."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from elastune.cli import options
from elastune.cli.options import split
from elastune.cli.output import choose_device, choose_out, use_data
from elastune.core import notation
from elastune.core.errors import UserError
from elastune.core.fields import Notation, Setting, setting, settings_of
from elastune.core.journal import logs
from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import settled
from elastune.core.run import OPEN, CommandLine, ExecutionSettings, Place, Program

if TYPE_CHECKING:
    from elastune.cli.chaos import Faults
    from elastune.runtime.preemption import NoticeSource


# Groups of options as dataclasses: Typer sees each field as an option, and the journal keeps the command line.
#
# ``elastune resume`` gives the kept command line again (``resumed_words``).

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
@dataclass(frozen=True)
class Chosen:
    """Options for some settings of a dataclass. The command gets the values by name, without those left open.

    ``Annotated[Taken, Chosen(kind)]`` is the type of the parameter; ``Taken`` is called with the values by name.

    Attributes:
        kind: The dataclass.
        without: The names of the settings that the command does not have.
        defaults: Other defaults than those of ``kind``.
        open: The names of the settings without a default.
    """

    kind: type
    without: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    open: tuple[str, ...] = ()

    def default(self, name: str, usual: Any) -> Any:
        """The default of the setting ``name``, whose ``usual`` one is that of ``kind``."""
        return None if name in self.open else self.defaults.get(name, usual)

    @property
    def usual(self) -> dict[str, Any]:
        """The defaults that count as given: those of ``kind`` for other settings than ``open``, and ``defaults``."""
        defaults = {
            each.name: each.default for each in fields(self.kind) if each.name not in (*self.open, *self.without)
        }
        return {**defaults, **self.defaults}


@dataclass(frozen=True)
class _Group:
    """A parameter of a command that becomes options: how it is built, and the value of each option from its text."""

    build: Callable[..., Any]
    options: tuple[Parameter, ...]
    read: Mapping[str, Callable[[Any], Any]]


def flatten(command: Callable[..., int]) -> Callable[..., int]:
    """Return ``command`` with the fields of its dataclass parameters as keyword parameters in their place.

    Typer reads the signature of the returned function, so each field becomes an option: a setting (``core/fields.py``),
    or a field whose annotation has the ``typer.Option``. A parameter ``Annotated[..., Chosen(kind)]`` receives the
    settings of ``kind`` as a mapping. A parameter of the type ``CommandLine`` is no option: the command receives its
    own command line in it.
    """
    hints = get_type_hints(command, include_extras=True)
    command_lines = [name for name, kind in hints.items() if kind is CommandLine]
    groups = {
        name: group
        for name, kind in hints.items()
        if name not in ("return", *command_lines) and (group := _group(kind)) is not None
    }
    flat: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in command_lines:
            continue
        flat += groups[name].options if name in groups else [_keyword(name, hints[name], parameter.default)]

    @wraps(command)
    def call(**values: Any) -> int:
        words = {name: command_line_of(command.__name__, flat, values) for name in command_lines}
        grouped = {name: _built(group, values) for name, group in groups.items()}
        return command(**values, **grouped, **words)

    call.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return call


def _built(group: _Group, values: dict[str, Any]) -> Any:
    """Take the values of the group's options out of ``values``, and build the group of them."""
    from_options = {each.name: values.pop(each.name) for each in group.options}
    changed = {
        each.name: from_options[each.name]
        for each in group.options
        if each.default is Parameter.empty or from_options[each.name] != each.default
    }
    return group.build(**{name: group.read.get(name, _as_it_is)(value) for name, value in changed.items()})


def _as_it_is(value: Any) -> Any:
    return value


def _group(kind: Any) -> _Group | None:
    """The options of a parameter of the type ``kind``; None for a parameter that is one option itself."""
    if is_dataclass(kind) and isinstance(kind, type):
        return _group_of(Chosen(kind), kind)
    chosen = next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Chosen)), None)
    if chosen is None:
        return None
    return _group_of(chosen, lambda **values: kind.__origin__({**chosen.usual, **values}))


def _group_of(chosen: Chosen, build: Callable[..., Any]) -> _Group:
    kind, settings = chosen.kind, settings_of(chosen.kind)
    hints = _hints(kind, {name for name, each in settings.items() if each.notation is not None})
    options: list[Parameter] = []
    read: dict[str, Callable[[Any], Any]] = {}
    for each in fields(kind):
        default = chosen.default(each.name, each.default)
        if each.name in chosen.without:
            continue
        if (setting := settings.get(each.name)) is not None:
            options.append(_option_parameter(each.name, hints[each.name], default, setting))
            if setting.notation is not None:
                read[each.name] = partial(_read, setting.notation, setting.option_of(each.name))
        elif any(isinstance(info, OptionInfo | ArgumentInfo) for info in getattr(hints[each.name], "__metadata__", ())):
            options.append(_keyword(each.name, hints[each.name], Parameter.empty if default is MISSING else default))
    return _Group(build, tuple(options), read)


def _hints(kind: type, without: set[str]) -> dict[str, Any]:
    """The types of the fields of ``kind``, but for those that a notation reads: only type checkers load their types."""
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        annotations = {
            name: text for name, text in vars(base).get("__annotations__", {}).items() if name not in without
        }
        names = vars(sys.modules[base.__module__])
        hints |= get_type_hints(SimpleNamespace(__annotations__=annotations), names, include_extras=True)
    return {**dict.fromkeys(without), **hints}


def _read(notation: Notation, option: str, text: Any) -> Any:
    return notation.read(text, option)


def _option_parameter(name: str, hint: Any, default: Any, setting: Setting) -> Parameter:
    """The parameter from which Typer makes the option of a setting."""
    notation = setting.notation
    metavar = setting.metavar or (notation.metavar if notation is not None else None) or None
    panel = setting.panel or None
    info = typer.Option(setting.option_of(name), help=setting.help, metavar=metavar, rich_help_panel=panel)
    kinds = (get_origin(hint), *get_args(hint))
    if notation is not None and not notation.many:
        return _keyword(name, Annotated[str | None, info], None if default is MISSING else notation.write(default))
    if notation is not None or Sequence in kinds or tuple in kinds:
        of = Path if Path in (inner for each in kinds for inner in (each, *get_args(each))) else str
        return _keyword(name, Annotated[list[of] | None, info], None)  # type: ignore[valid-type]
    if str in kinds or hint is str or Literal in kinds:
        hint = str | None if default is None else str
    elif default is None and NoneType not in kinds:
        hint = hint | None
    return _keyword(name, Annotated[hint, info], Parameter.empty if default is MISSING else default)


def _keyword(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


# Groups of options that several commands take, and the values that each group makes of its options.


@dataclass(frozen=True)
class ExecutionOptions:
    """The execution settings of a command line.

    Attributes:
        given: The values by the names of the fields of ``ExecutionSettings``. What is left out, others decide.
    """

    chosen: Mapping[str, Any]

    def __post_init__(self) -> None:
        if (slots := self.chosen.get("num_slots", 1)) < 1:
            raise UserError("a run has at least one slot", f"{slots} slots", "leave --slots out or raise it")
        if (blocks := self.chosen.get("virtual_tensor", 1)) < 1:
            raise UserError("virtual blocks must be from 1 on", blocks, "leave --virtual-tensor out or raise it")

    @property
    def mode(self) -> str:
        """The mode, "exact" or "fast"."""
        return str(self.chosen["mode"])

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of --mesh, or None."""
        return self.chosen.get("mesh")

    def on(self, workers: int | None, *, local: bool = True) -> ExecutionSettings:
        """The execution settings for ``workers`` or for the workers of --mesh. The job checks most values.

        ``local``: whether the workers run on this machine. Other hosts may have devices that this machine lacks.
        """
        device = choose_device(self.chosen["device"], local=local)
        return ExecutionSettings(**{**self.chosen, "device": device, "workers": workers or 0})

    def execution(
        self, workers: int | None, most_workers: int | None = None, learners: int = 1, *, local: bool = True
    ) -> ExecutionSettings:
        """The execution settings, with as many slots as the training needs; arguments as in ``settled`` and ``on``."""
        device = choose_device(self.chosen["device"], local=local)
        return settled({**self.chosen, "device": device}, workers, most_workers, learners)


Execution = Annotated[
    ExecutionOptions, Chosen(ExecutionSettings, without=("workers",), defaults={"device": "auto"}, open=OPEN)
]
FastExecution = Annotated[
    ExecutionOptions,
    Chosen(ExecutionSettings, without=("workers",), defaults={"device": "auto", "mode": "fast"}, open=OPEN),
]
WorkerExecution = Annotated[
    ExecutionOptions,
    Chosen(
        ExecutionSettings,
        without=("workers", "num_slots", "mesh", "copies", "topology", "bucket_bytes"),
        defaults={"device": "auto"},
        open=OPEN,
    ),
]


@dataclass(frozen=True)
class OutputOptions:
    """The folder of data, and the form of the output."""

    data: options.Data = None
    json: options.Json = False

    def program(self, file: Path, arguments: Sequence[str] | None, out: Path, *, resume: bool) -> Program:
        """The program in ``file``. Its data folder is absolute, so that commands in a journal work in any folder.

        ``arguments``: its own; without any, a command that goes on in ``out`` has those that it was begun with.
        """
        words = tuple(arguments or ())
        if resume and not words:
            from elastune.runtime.job.resumption import arguments_at_start

            words = arguments_at_start(out)
        return Program(file, data=None if self.data is None else self.data.resolve(), arguments=words)

    def choose(self, out: str | Path | None, file: Path, command: str, *, resume: bool) -> Path:
        """Make the data folder known to the program, and return the folder for the results of ``command``."""
        use_data(self.data)
        return choose_out(out, file, command, resume)


@dataclass(frozen=True)
class CommandOptions:
    """A command as the program: what trains, its search space, and how its output becomes metrics."""

    command: str | None = setting(
        None,
        'Train by this command instead of a FILE, such as "python train.py --lr {lr}". Names in braces are replaced '
        "by settings; {workers}, {seed} and {folder} need none. See docs/commands-as-programs.md.",
        metavar="TEXT",
        panel="Search",
    )
    space: Path | None = setting(
        None,
        "The search space of --command: a Python file that defines space(trial), or a YAML file with lines such as "
        "lr: {low: 0.001, high: 0.1, log: true}.",
        metavar="FILE",
        panel="Search",
    )
    metrics: Sequence[str] = setting(
        (),
        'How the output of --command becomes metrics: json (lines such as {"epoch": 1, "accuracy": 0.9}), or '
        'NAME=REGEX with one group, such as "accuracy=acc: ([0-9.]+)". May be repeated. [default: json]',
        metavar="json|NAME=REGEX",
        panel="Search",
    )

    def source(self, file: Path | None) -> Path:
        """The file after which results are named. Raises ``UserError`` unless there is either FILE or --command."""
        from elastune.train.program.command import files_of, parse_command

        if self.command is None:
            if beside := "--space" if self.space is not None else "--metrics" if self.metrics else "":
                raise UserError(f"{beside} belongs to --command", "no --command", "add --command, or leave it out")
            if file is None:
                raise UserError("a search needs a program", "none", "give FILE, or --command and --space")
            return file
        if file is not None:
            raise UserError("a search has either FILE or --command", f"both, {file}", "leave one of them out")
        if self.space is None:
            raise UserError("--command needs a search space", "no --space", "--space space.yaml")
        command = parse_command(self.command, self.metrics)
        return next(iter(files_of(command)), Path(Path(command.words[0]).name))

    def program(self) -> Program | None:
        """The program of --command; None without. Raises ``UserError``."""
        from elastune.train.program.command import parse_command

        if self.command is None or self.space is None:
            return None
        return Program(self.space, command=parse_command(self.command, self.metrics))


@dataclass(frozen=True)
class LogOptions:
    """What this command and its workers log."""

    log_level: str | None = setting(
        None,
        "Log what happens to workers and to the run, from this level on: the command and agents to stderr, workers to "
        "their logs in OUT/logs. [default: $ELASTUNE_LOG_LEVEL, or nothing]",
        metavar="debug|info|warning|error",
        panel=options.OUTPUT,
    )
    log_format: str | None = setting(
        None,
        "Form of these lines. [default: $ELASTUNE_LOG_FORMAT, or text]",
        metavar="text|json",
        panel=options.OUTPUT,
    )

    def begin(self, **facts: str) -> None:
        """Log from now on in this process and in all that it starts; ``facts``: as of ``core.journal.logs.describe``.

        Raises ``UserError`` for a wrong level or format.
        """
        given = logs.from_environment(os.environ)
        chosen = logs.LogSettings(self.log_level or given.level, self.log_format or given.format)
        os.environ.update(chosen.variables)
        logs.begin(chosen)
        logs.describe(**facts)


@dataclass(frozen=True)
class NoticeOptions:
    """The sources of notices that this machine will be taken away."""

    notice_file: Path | None = setting(
        None,
        "A file that appears when this machine is about to be taken away. The command then stops in good order and "
        "exits with code 75.",
        panel="Cluster",
    )
    notice_url: str | None = setting(
        None,
        "A URL that answers 404 until this machine is about to be taken away. It is asked again and again. The command "
        "then stops as for --notice-file.",
        panel="Cluster",
    )
    notices: str | None = setting(
        None,
        "A cloud whose metadata service says when this machine is about to be taken away. The command then stops as "
        "for --notice-file. =URL asks another address, such as a proxy.",
        metavar="aws|google|azure[=URL]",
        panel="Cluster",
    )
    notice_seconds: float = setting(
        120.0, "Seconds between a notice and the machine's end, where the notice does not say.", panel="Cluster"
    )

    def sources(self) -> list[NoticeSource]:
        """The sources to watch. Raises ``UserError`` for a --notice-seconds out of range."""
        from elastune.runtime.preemption import CloudNotice, FileNotice, UrlNotice

        if not 0 < self.notice_seconds <= notation.LONGEST_S:
            raise UserError("--notice-seconds must be above 0", self.notice_seconds, "such as 120")
        file, url = self.notice_file, self.notice_url
        sources: list[NoticeSource] = [] if file is None else [FileNotice(file, self.notice_seconds)]
        sources += [] if url is None else [UrlNotice(url, self.notice_seconds)]
        return sources if self.notices is None else [*sources, CloudNotice(self.notices)]


@dataclass(frozen=True)
class FaultOptions:
    """The faults to inject into a run."""

    chaos: str | None = setting(
        None,
        "Inject faults, for tests: kill, stop, join, leave, notice, reshape, corrupt:gradient and its like (see "
        "docs/verify.md). At random with a rate per second "
        '("kill:0.05/s,stop"; 0.05/s where none is given), or once ("kill@40%" of the run, "kill@step:120").',
        metavar="FAULTS",
        panel="Faults",
    )
    chaos_verify: bool = setting(
        False,
        "With --chaos: train again on one worker without faults, and compare. Exit code 1 where the states differ, and "
        "where no fault, or not every one with a point of its own, has happened.",
        panel="Faults",
    )

    def choose(self, mode: str, place: Place | None) -> Faults:
        """The faults of a run in ``mode``. ``place``: the worker's place if another launcher has started it."""
        from elastune.cli.chaos import Faults

        return Faults.of(self.chaos, self.chaos_verify, mode, place)
