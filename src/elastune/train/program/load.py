"""The user's program file: loaded once, checked, and run so that its effects on the process are undone.

It also gives adapters the session of the running program (``current_session``), gives a script's ``main()`` its
settings, and records which files a worker's program writes. Imports no torch.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import locale
import os
import random
import signal
import socket
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from elastune.adapt.policies.base import Policy
from elastune.core.command import PROVIDED, TrainingCommand
from elastune.core.errors import UserError
from elastune.core.run import Config, Program, derive
from elastune.train.program.arguments import ProgramArguments, read_in_function
from elastune.train.program.command import read_space
from elastune.train.program.errors import cause_of
from elastune.train.program.source import bound, used_by_training

if TYPE_CHECKING:
    from elastune.train.session import Session


# Refuses what starts or joins other processes in a program: elastune does both.

_OURS = Path(__file__).parents[2]
_INSTALLED = ("site-packages", "dist-packages")


@contextmanager
def launchers_refused() -> Iterator[None]:
    """Refuse ``init_process_group`` and ``DistributedDataParallel`` of the user's own lines while the block runs.

    Calls by elastune and installed packages stay as they are, and a wrapper over a ``process_group`` of the program's
    own. Without torch in this process there is nothing to do.

    Raises:
        UserError: For such a line, which it names.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    places: list[tuple[Any, str, str, str]] = [
        (dist, "init_process_group", "init_process_group", "remove the call: the workers have their group already"),
        (
            DistributedDataParallel,
            "__init__",
            "DistributedDataParallel",
            "give session.prepare the model itself, and remove the wrapper",
        ),
    ]
    if hasattr(dist, "distributed_c10d"):
        places.append((dist.distributed_c10d, *places[0][1:]))
    kept = [(home, name, getattr(home, name)) for home, name, _, _ in places]
    for (home, name, rule, fix), (_, _, call) in zip(places, kept, strict=True):
        setattr(home, name, _refusing(call, rule, fix))
    try:
        yield
    finally:
        for home, name, call in kept:
            setattr(home, name, call)


def _refusing(call: Callable[..., Any], broken_rule: str, fix: str) -> Callable[..., Any]:
    @wraps(call)
    def refuse(*args: Any, **options: Any) -> Any:
        if options.get("process_group") is not None:  # beside the training, on a group that the program has made
            return call(*args, **options)
        line = line_of_user(sys._getframe(1).f_code.co_filename, sys._getframe(1).f_lineno)
        if line:
            rule = "elastune starts the workers and sums their gradients, so a program must do neither"
            raise UserError(rule, f"{broken_rule} at {line}", fix)
        return call(*args, **options)

    return refuse


def line_of_user(file: str, line: int) -> str:
    """``train.py:12`` for a line of the user's own file; "" for one of elastune, Python or an installed package."""
    path = Path(file)
    standard = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")}
    if file.startswith("<") or any(part in _INSTALLED for part in path.parts):
        return ""
    return "" if {_OURS, *standard} & {*path.parents} else f"{path.name}:{line}"


ADAPTERS = "elastune.adapters"
FOLDER = "ELASTUNE_WATCH_WRITES"  # the environment variable for the folder of records of written files
NO_FILES = ("/proc/", "/sys/", "/dev/")  # each process has its own there, or nothing is kept
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Surrogate = Callable[[Config, int], Iterable[tuple[float, Mapping[str, float]]]]


@dataclass(frozen=True)
class LoadedProgram:
    """A user's program, loaded and checked.

    Attributes:
        train: ``train(session)``.
        space: ``space(trial)``, for tuning.
        objectives: Metric names, each with "max" or "min", for tuning.
        config: The default settings.
        policies: The policy classes that it defines, by name.
        surrogate: ``surrogate(config, workers)``, for simulation: for each epoch its seconds and the metrics reported
            after it. A file with a surrogate may lack ``train``.
        trains: Whether it defines ``train``.
        views: The file's ``views``, unchecked; None if it has none.
        constraints: Conditions that settings or metrics must fulfil, for tuning, each as a text.
        arguments: What it reads of its own command line; None: of a program that was not loaded from a file.
    """

    train: Callable[[Any], None]
    space: Callable[[Any], dict[str, Any]] | None
    objectives: dict[str, str]
    config: Config
    policies: dict[str, type[Policy]] = field(default_factory=dict)
    surrogate: Surrogate | None = None
    trains: bool = True
    views: object = None
    constraints: tuple[str, ...] = ()
    arguments: ProgramArguments | None = None

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ``UserError`` for a setting that the program's own parser would not take."""
        if self.arguments is not None:
            self.arguments.check(settings)


def load_as_guest(program: Program, seed: int = 0) -> LoadedProgram:
    """Do what ``load`` does, and undo what the import does to this process, which is not the program's."""
    with process_restored():
        return load(program, seed)


def load(program: Program, seed: int = 0, settings: Mapping[str, Any] = MappingProxyType({})) -> LoadedProgram:
    """Import the program's file (without its ``__main__`` part), and check what it defines.

    Args:
        program: The file, and its own arguments.
        seed: The run's seed: what is random while the file is imported follows it.
        settings: Settings of the run, for values that the program reads from its command line.

    Raises:
        UserError: The file breaks a rule, which the error names.
        SystemExit: Its parser has printed a help text.
    """
    path = program.path.resolve()
    if program.command is not None and path.suffix != ".py":
        space_file = read_space(path)
        config = _with_placeholders(program.command, space_file.constants)
        return LoadedProgram(_trains_by_command, space_file.space, space_file.objectives, config)
    arguments = ProgramArguments(path, program.arguments, settings)
    _seed_import(derive(seed, "import"))
    with arguments.watched(), launchers_refused():
        module = _import(path, arguments, program.train)
    if program.command is not None:
        return _loaded_for_command(module, program.command)
    if not arguments.config:
        read_in_function(arguments, module, path, program.train)
    train, space, surrogate = (getattr(module, name, None) for name in (program.train, "space", "surrogate"))
    train = training_of(module, path, arguments) if train is None else train
    if space is not None and not callable(space):
        raise UserError("space must be a function of a trial", type(space).__name__, "def space(trial): return {...}")
    if surrogate is not None and not callable(surrogate):
        fix = "def surrogate(config, workers): return [(seconds, {'accuracy': ...}), ...]"
        raise UserError("surrogate must be a function of config and workers", type(surrogate).__name__, fix)
    if not callable(train) and surrogate is None:
        raise _no_train(program)
    trains = callable(train)
    if not callable(train):

        def train(session: Any) -> None:
            raise _no_train(program)

    if folder := os.environ.get(FOLDER):
        train = watched(train, path, Path(folder))
    train = in_session(_started(train, arguments))
    config = {**arguments.config, **_config(module)}
    arguments.names_known = bool(config)
    parts = _objectives(module), config, _policies(module), surrogate, trains
    views, constraints = getattr(module, "views", None), _constraints(module)
    return LoadedProgram(train, space, *parts, views=views, constraints=constraints, arguments=arguments)


def _loaded_for_command(module: ModuleType, command: TrainingCommand) -> LoadedProgram:
    """The search space of a command, from a Python file."""
    space = getattr(module, "space", None)
    if not callable(space):
        rule = "the file of --space must define space(trial)"
        raise UserError(rule, module.__file__, "def space(trial): return {'lr': trial.suggest_float('lr', ...)}")
    config = _with_placeholders(command, _config(module))
    return LoadedProgram(_trains_by_command, space, _objectives(module), config, constraints=_constraints(module))


def _with_placeholders(command: TrainingCommand, config: Config) -> Config:
    """``config``, and None for each placeholder to which the space or ``--set`` must give a value."""
    names = [name for name in command.placeholders if name not in PROVIDED]
    names += ["batch_size"] if "batch_per_worker" in command.placeholders else []
    return {**dict.fromkeys(names), **config}


def _trains_by_command(session: Any) -> None:
    raise UserError("a command trains in processes of its own", "train(session)", "use elastune tune --command")


def _started(train: Callable[[Any], None], arguments: ProgramArguments) -> Callable[[Any], None]:
    """``train`` with the program's own command line."""

    @wraps(train)
    def started(session: Any) -> None:
        with arguments.watched(trains=True), launchers_refused():
            train(session)

    return started


def _seed_import(seed: int) -> None:
    """Seed Python's ``random`` and, where they are loaded, torch and NumPy: a controller may load neither."""
    if "torch" in sys.modules:
        from elastune.train.rng import seed_everything

        seed_everything(seed)
        return
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def load_functions(program: Program, names: Iterable[str], seed: int = 0) -> dict[str, Callable[..., Any] | None]:
    """Import a program's file and return its functions ``names``; None for a function that it lacks.

    ``seed``: that of its trainings, so that what is random at import, such as a split of the data, is as it was there.

    Raises:
        UserError: The file cannot be imported.
    """
    path = program.path.resolve()
    arguments = ProgramArguments(path, program.arguments, {})
    _seed_import(derive(seed, "import"))
    with arguments.watched():
        module = _import(path, arguments)
    functions = {name: getattr(module, name, None) for name in names}
    return {name: function if callable(function) else None for name, function in functions.items()}


def _no_train(program: Program) -> UserError:
    rule = f"a program must define {program.train}(session)"
    return UserError(rule, program.path, f"add 'def {program.train}(session):' to it")


class _FromSource(SourceFileLoader):
    """Compiles the present content of a file, instead of taking Python's cached bytecode.

    Python takes the cache if size and time (to the second) are equal, which a quick edit of one digit keeps.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


_importing: list[Path] = []  # programs whose files run at this moment


class _StartedAgain(BaseException):
    """A file that is imported for a training asks for a training. Not an ``Exception``, so that it is not caught."""


def end_import() -> None:
    """End the import of a program that calls ``elastune.run``, ``tune`` or ``find_frontier`` at its top level.

    Controller and workers import the file of the call, and would come to the call again. What the training needs must
    stand before it.
    """
    if _importing:
        raise _StartedAgain


def _check_stands_before(path: Path, train: str, error: BaseException) -> None:
    """Raise ``UserError`` where the training uses what follows the line that ended the import of ``path``."""
    at = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)][-1]
    used = used_by_training(ast.parse(path.read_bytes()), train)
    late = [name for each in used if each.lineno > at for name in bound(each)]
    if late:
        rule = "what a training uses must stand before the call that starts it"
        fix = 'move the call to the end of the file, below if __name__ == "__main__":'
        raise UserError(rule, f"{late[0]} after {line_of_user(str(path), at)}", fix)


def _import(path: Path, arguments: ProgramArguments, train: str = "train") -> ModuleType:
    if not path.is_file():
        raise UserError("a program must be an existing Python file", path, "check the path")
    if path.suffix != ".py":
        raise UserError("a program must be a Python file", path, "give it the ending .py")
    name = f"elastune_program_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as running the file would
    _importing.append(path)
    try:
        spec.loader.exec_module(module)
    except _StartedAgain as error:
        _check_stands_before(path, train, error)
    except (UserError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        if arguments.printed:
            raise
        raise _import_failed(path, error) from None
    except BaseException as error:  # noqa: BLE001 - whatever the user's file raises is the user's to see
        raise _import_failed(path, error) from None
    finally:
        _importing.remove(path)
    return module


def _import_failed(path: Path, error: BaseException) -> UserError:
    value = f"{path}: {cause_of(error, str(path))}"
    return UserError("a program must import without errors", value, "fix that line")


def _objectives(module: ModuleType) -> dict[str, str]:
    objectives = getattr(module, "objectives", {})
    if not isinstance(objectives, dict) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in objectives.items()
    ):
        raise UserError("objectives must map names to 'max' or 'min'", objectives, "objectives = {'accuracy': 'max'}")
    return dict(objectives)


def _constraints(module: ModuleType) -> tuple[str, ...]:
    constraints = getattr(module, "constraints", ())
    if not isinstance(constraints, list | tuple) or not all(isinstance(each, str) for each in constraints):
        raise UserError("constraints must be a list of texts", constraints, "constraints = ['seconds <= 60']")
    return tuple(constraints)


def _policies(module: ModuleType) -> dict[str, type[Policy]]:
    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return {name: kind for name, kind in classes.items() if issubclass(kind, Policy) and kind is not Policy}


def _config(module: ModuleType) -> Config:
    config = getattr(module, "config", {})
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise UserError("config must be a dict with text keys", type(config).__name__, "config = {'lr': 0.1}")
    try:
        return dict(json.loads(json.dumps(config, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            "config values must be numbers, text, booleans or lists", error, "keep objects out of it"
        ) from None


# --- settings ---
def merge(config: Config, changes: Config) -> Config:
    """Return ``config`` with ``changes``.

    If a program declares a config, it must contain the name of every change. ``optim.lr`` names ``lr`` in ``{"optim":
    {"lr": 0.1}}``, and makes it where there is no config.

    Raises:
        UserError: The config lacks a name, or a name stands for a value and for a group.
    """
    names = {*config, *flat_names(config)}
    unknown = sorted(name for name in changes if name not in names)
    if unknown and config:
        fix = f"known: {', '.join(sorted(flat_names(config)))}"
        raise UserError("a setting must be one of the program's config", ", ".join(unknown), fix)
    merged: dict[str, Any] = dict(config)
    for name, value in changes.items():
        if name in config or "." not in name:
            merged[name] = value
        else:
            _set_nested(merged, name.split("."), value)
    return merged


def flat_names(config: Mapping[str, Any], within: str = "") -> list[str]:
    """Return the names of all settings; those of a nested config with a dot: "optim.lr"."""
    names: list[str] = []
    for name, value in config.items():
        nested = isinstance(value, dict) and value
        names += flat_names(value, f"{within}{name}.") if nested else [f"{within}{name}"]
    return names


def setting_of(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of a setting by its name, such as "optim.lr"; None if there is none."""
    if name in config:
        return config[name]
    first, dot, rest = name.partition(".")
    inner = config.get(first)
    return setting_of(inner, rest) if dot and isinstance(inner, dict) else None


def _set_nested(config: dict[str, Any], path: list[str], value: Any) -> None:
    """Set the value at ``path``, on copies of the dicts along it."""
    first, *rest = path
    if not rest:
        config[first] = value
        return
    inner = config.get(first, {})
    if not isinstance(inner, dict):
        rule = "a setting is either a value or a group of values"
        raise UserError(rule, f"{first} and {'.'.join(path)}", "leave one of them out")
    config[first] = dict(inner)
    _set_nested(config[first], rest, value)


# --- the session of the running program ---
def current_session() -> Session:
    """Return the session of the run that this code is part of.

    Returns:
        The session that ``train(session)`` was given.

    Raises:
        UserError: Outside of a run.

    Example:
        >>> def log(loss):  # somewhere below train(session)
        ...     if elastune.current_session().rank == 0:
        ...         print(loss)
    """
    return _newest().session  # type: ignore[no-any-return]


def at_end(call: Callable[[], None]) -> None:
    """Call ``call`` once the program's lines have ended, also by ``end_program``."""
    _newest().at_end.append(call)


def end_program() -> NoReturn:
    """Leave the program's lines early: its training has ended. Raises ``ProgramOver``."""
    _newest()
    raise ProgramOver


def in_session(train: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``train`` such that its session is the current one while it runs."""

    @wraps(train)
    def entered(session: Any) -> None:
        entry = _Entered(session)
        _entered.append(entry)
        try:
            with suppress(ProgramOver):
                train(session)
            for call in entry.at_end:
                call()
        finally:
            _entered.remove(entry)

    return entered


class ProgramOver(BaseException):
    """Raised to leave the program's lines early, as its run is over.

    Not an ``Exception``, so that programs do not catch it.
    """


@dataclass
class _Entered:
    session: Any
    at_end: list[Callable[[], None]] = field(default_factory=list)


_entered: list[_Entered] = []


def _newest() -> _Entered:
    if not _entered:
        raise UserError("this belongs into a run", "no run", "start the file with 'elastune run FILE'")
    return _entered[-1]


# --- scripts with a main() that use an adapter ---
def training_of(module: ModuleType, path: Path, arguments: ProgramArguments) -> Callable[[Any], None] | None:
    """The ``main()`` of a file that uses an adapter, as a training function; None for any other file.

    The settings are written into the file's ``config``, if it has one, before ``main`` begins. Otherwise those that no
    parser was seen to read become arguments of its command line: ``lr=0.1`` is ``--lr 0.1``.
    """
    main = getattr(module, "main", None)
    if not callable(main) or not _uses_adapter(module) or not _takes_nothing(main):
        return None

    def train(session: Any) -> None:
        settings = dict(session.config)
        declared: Any = getattr(module, "config", None)
        unread = {name: value for name, value in settings.items() if name not in arguments.config}
        if declared:
            declared.update(settings)
        more = [] if declared else as_arguments(unread)
        before, sys.argv = sys.argv, [str(path), *arguments.words, *more]
        try:
            main()
        finally:
            sys.argv = before

    return train


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Settings as arguments for argparse: True is an option without a value; False and None are left out."""
    arguments: list[str] = []
    for name, value in settings.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not False and value is not None:
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name}", *map(str, values)]
    return arguments


def _uses_adapter(module: ModuleType) -> bool:
    homes = (getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values())
    return any(isinstance(home, str) and home.startswith(ADAPTERS) for home in homes)


def _takes_nothing(main: Callable[..., Any]) -> bool:
    try:
        inspect.signature(main).bind()
    except (TypeError, ValueError):
        return False
    return True


# --- files that a program writes ---
def watched(train: Callable[[Any], None], program: Path, folder: Path) -> Callable[[Any], None]:
    """``train``, with a record of the files that it writes, in one file of ``folder`` for each worker."""

    @wraps(train)
    def recorded(session: Any) -> None:
        import torch  # a controller need not have torch to load a program

        watch, save = _Watch(program), cast(Any, torch.save)
        sys.addaudithook(watch.on_event)

        def save_noted(value: Any, file: Any, *more: Any, **options: Any) -> None:  # torch writes without Python's open
            watch.note(file)
            save(value, file, *more, **options)

        setattr(torch, "save", save_noted)  # noqa: B010 - the declared type is narrower
        try:
            train(session)
        finally:
            watch.watches, torch.save = False, save
            (folder / f"{session.rank}.json").write_text(json.dumps(watch.lines_by_path))

    return recorded


def written_by_several(folder: Path) -> dict[str, int]:
    """The files that more than one worker has written, and the program's lines that do it."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    for file in sorted(folder.glob("*.json")):
        for path, line in json.loads(file.read_text()).items():
            lines.setdefault(path, line)
            counts[path] = counts.get(path, 0) + 1
    return {path: line for path, line in lines.items() if counts[path] > 1}


class _Watch:
    """Records every file that is opened for writing below a line of ``program``, with the first such line."""

    def __init__(self, program: Path) -> None:
        self.lines_by_path: dict[str, int] = {}
        self.watches = True
        self._program = str(program)

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook. Python cannot remove audit hooks, so ``watches`` switches it off."""
        if self.watches and event == "open" and _writes(arguments[1], arguments[2]):
            self.note(arguments[0])

    def note(self, path: Any) -> None:
        line = self._line()
        if line and isinstance(path, (str, bytes, os.PathLike)):
            name = os.path.abspath(os.fsdecode(path))
            if not name.startswith(NO_FILES):
                self.lines_by_path.setdefault(name, line)

    def _line(self) -> int:
        frame: Any = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self._program:
                return int(frame.f_lineno)
            frame = frame.f_back
        return 0


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & WRITING)


# --- undoing what a program does to the process ---
@contextmanager
def process_restored() -> Iterator[None]:
    """Undo what the user's code does to the process that it runs in.

    Restored are the folder, umask, environment, descriptors 1 and 2, ``sys.stdout`` and ``sys.stderr``, signal
    handlers, warnings, locale, recursion limit, the default time-out of sockets and the random streams of the CPU. A
    child that the code has forked and that returns from the code ends.
    """
    process = os.getpid()
    with ExitStack() as stack:
        for descriptor in (1, 2):
            with suppress(OSError):  # the descriptor was closed before
                _keep_open(stack, descriptor)
        _keep_folder(stack)
        _keep_streams(stack)
        stack.callback(os.umask, _umask())
        stack.callback(_restore_environment, dict(os.environ))
        stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())
        stack.callback(locale.setlocale, locale.LC_ALL, locale.setlocale(locale.LC_ALL))
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE):
                stack.callback(signal.signal, number, signal.getsignal(number))
        stack.enter_context(warnings.catch_warnings())
        _lend_streams(stack)
        try:
            yield
        finally:
            if os.getpid() != process:
                os._exit(0)


def _keep_open(stack: ExitStack, descriptor: int) -> None:
    kept = os.dup(descriptor)
    stack.callback(os.close, kept)
    stack.callback(os.dup2, kept, descriptor)


def _keep_folder(stack: ExitStack) -> None:
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, folder)
    stack.callback(os.fchdir, folder)


def _keep_streams(stack: ExitStack) -> None:
    """Put back where random streams stand, of those that are loaded now."""
    stack.callback(random.setstate, random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        stack.callback(numpy.random.set_state, numpy.random.get_state())
    if (torch := sys.modules.get("torch")) is not None:
        stack.callback(torch.set_rng_state, torch.get_rng_state())


def _umask() -> int:
    """The present mask; reading it requires setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _restore_environment(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def _lend_streams(stack: ExitStack) -> None:
    """Give the code streams of its own on the same files, which it may close; a handler that it made may keep them."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        stack.callback(setattr, sys, name, before)
        try:
            lent = open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        except OSError:
            continue
        if before is not None and not before.closed:
            before.flush()
        setattr(sys, name, lent)
        stack.callback(_flush, lent)


def _flush(stream: TextIO) -> None:
    with suppress(ValueError, OSError):  # closed by the code
        stream.flush()
