"""The source of a program: which part of it decides what is trained, how the journal keeps it, where it changed.

The journal keeps no text. It keeps eight digits of a digest for each statement that decides what is trained, and for
each element of a long list in it. Lines that may make a program differ from run to run, or from worker to worker, are
found without running it.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.run import Program, ProgramSource
from elastune.train.program.command import files_of

DIGITS = 8
MOST_MODULES = 500
PARSED_BYTES = 200_000  # of modules, a tenth of a second; beyond that a module's bytes are digested, with comments
MOST_STATEMENTS = 500  # of a part with a digest for each: a longer part has one digest
LONG_LIST = 3  # elements or arguments, from which on each is likely to have a line of its own
MOST_REPORTED = 3
EDITED = "the program must not be edited while its run goes on"
_INSTALLED = ("site-packages", "dist-packages")
_NOT_OWN = {*sys.stdlib_module_names, "elastune"}

_RECORDED_APART = frozenset({"config"})  # the settings, which the session gives and the journal records
PARSERS = {"absl", "click", "docopt", "fire", "hydra", "jsonargparse", "simple_parsing", "typer", "tyro"}  # of words
_BY_ANY_NAME = {"globals", "vars", "eval", "exec"}  # a program that calls one of these may use anything in its file

# Functions that draw from the machine instead of a seeded stream; those of WITHOUT_SEED only without arguments.
UNSEEDED = ("os.urandom", "uuid.uuid1", "uuid.uuid4", "random.SystemRandom", "torch.seed", "time.time", "time.time_ns")
WITHOUT_SEED = ("default_rng", "RandomState", "random.Random", "random.seed", "SeedSequence")
OF_WORKERS = ("rank", "size", "leader", "process_index", "is_main_process", "local_process_index")


@dataclass(frozen=True)
class _Part:
    """A part of a file, such as a function or a constant: its statements' digests, and their first lines."""

    digests: tuple[str, ...]
    lines: tuple[int, ...]

    @property
    def kept(self) -> str:
        if len(self.digests) > MOST_STATEMENTS:
            return _digest("".join(self.digests)) * 2  # doubled, so that it equals no statement's digest
        return "".join(self.digests)


_Files = dict[str, dict[str, _Part]]


def source_of(program: Program, modules: Collection[str] | None = None) -> ProgramSource:
    """Return digests of what decides what is trained, in ``program`` and in the user's modules that it imports.

    Comments, layout, docstrings, the search space, the objectives and ``__main__`` do not count. The program's
    ``config`` does, as a worker that joins later takes its settings from there. The user's modules are those in the
    program's folder or in ``sys.path`` outside of installed packages; they count as a whole.

    Args:
        program: The program.
        modules: The files of the modules to look at, wherever they are; None: the user's modules that it imports.

    Returns:
        Digests by file and part. Empty if the file cannot be read: then nothing can be compared.

    Example:
        >>> source_of(Program(Path("train.py")))
        {"train.py": {"train": "5d41402a", "lr": "9b74c989"}}
    """
    return {file: {name: part.kept for name, part in parts.items()} for file, parts in _read(program, modules).items()}


def differences(before: ProgramSource, program: Program) -> list[str]:
    """Return where ``program`` differs from its source ``before``: the first places, each as file, line and part.

    Args:
        before: The result of ``source_of``.
        program: The program as it is now.

    Returns:
        Empty if nothing differs, or if either source is unknown.
    """
    now = _read(program, None)
    return _changed_files(before, now) if before and now else []


def check_unedited(program: Program, recorded: ProgramSource) -> None:
    """Refuse to train beside workers that have loaded another version of the program.

    Args:
        program: The program as this worker has just loaded it.
        recorded: The source that the run was begun with; empty: unknown.

    Raises:
        UserError: The sources differ; it names the file and the line.
    """
    if not recorded:
        return
    _, *modules = recorded
    now = _read(program, modules)
    changes = _changed_files({file: parts for file, parts in recorded.items() if file in now}, now)
    if changes:
        fix = "undo the edit; or stop the run, and go on with --resume --accept-changes"
        raise UserError(EDITED, "; ".join(changes), fix)


def _changed_files(before: ProgramSource, now: _Files) -> list[str]:
    changes: list[str] = []
    for file, parts in now.items():
        if file not in before:
            changes.append(f"{file} is imported now")
        else:
            changes += _changed_parts(file, before[file], parts)
    changes += [f"{file} is not imported any more" for file in before if file not in now]
    more = len(changes) - MOST_REPORTED
    return [*changes[:MOST_REPORTED], f"and {more} more"] if more > 0 else changes


def _changed_parts(file: str, before: Mapping[str, str], now: Mapping[str, _Part]) -> list[str]:
    changes: list[tuple[int, str]] = []
    for name, part in now.items():
        digests = before.get(name)
        if digests is None:
            changes.append((part.lines[0], f"{file}, line {part.lines[0]}: {name} is new"))
        elif digests != part.kept:
            line = _first_line(digests, part)
            changes.append((line, f"{file}, line {line}, in {name}"))
    gone = [f"{file}: {name} is gone" for name in before if name not in now]
    return [*(text for _, text in sorted(changes)), *gone]


def _first_line(kept: str, part: _Part) -> int:
    """The line at which ``part`` begins to differ from its digests ``kept`` in the journal."""
    if len(part.digests) > MOST_STATEMENTS:
        return part.lines[0]
    for index, (digest, line) in enumerate(zip(part.digests, part.lines, strict=True)):
        if kept[index * DIGITS : (index + 1) * DIGITS] != digest:
            return line
    return part.lines[-1]  # the statements after it are gone


def _read(program: Program, modules: Collection[str] | None) -> _Files:
    """The parts of the program's file, then those of its modules. Empty if the program cannot be read."""
    path = program.path.resolve()
    if program.command is not None:
        return {str(file): _parts_of_module(file, parses=True, main=True) for file in files_of(program.command)}
    try:
        tree = without_docstrings(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError, RecursionError):  # loading the program reports the error
        return {}
    used = used_by_training(tree, program.train, config=True)
    files: _Files = {path.name: _parts(used)}
    if modules is None:
        files |= _imported(_wanted(tree, used), path.parent)
    else:
        for file in modules:
            where = _find(_name_of(file), [str(path.parent), *(each or "." for each in sys.path)])
            if where is not None:
                files[file] = _parts_of_module(where, parses=True)
    return files


def _wanted(tree: ast.Module, used: list[ast.stmt]) -> list[ast.stmt]:
    """The statements whose imports count: those that are used, and imports whose names no statement mentions."""
    mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bare = [
        each
        for each in tree.body
        if isinstance(each, ast.Import | ast.ImportFrom) and not mentioned & {*bound(each)} and each not in used
    ]
    return [*used, *bare]


def _imported(statements: list[ast.stmt], folder: Path) -> _Files:
    """The parts of the user's modules that ``statements`` import, directly or not, by file, in order of their names."""
    paths = _own_paths(folder)
    modules: dict[str, Path] = {}
    files: _Files = {}
    todo = sorted(_names_of_imports(statements, ""))
    parsed = 0
    while todo and len(modules) < MOST_MODULES:
        name = todo.pop(0)
        if name in modules or (where := _find(name, paths)) is None:
            continue
        modules[name] = where
        with suppress(OSError):
            parsed += where.stat().st_size
        key = name.replace(".", "/") + ("/__init__.py" if where.name == "__init__.py" else ".py")
        files[key] = _parts_of_module(where, parses=parsed <= PARSED_BYTES)
        if parsed <= PARSED_BYTES:
            package = name if where.name == "__init__.py" else name.rpartition(".")[0]
            with suppress(OSError, SyntaxError, ValueError, RecursionError):
                todo += sorted(_names_of_imports(ast.parse(where.read_bytes()).body, package) - modules.keys())
    return dict(sorted(files.items()))


def _names_of_imports(statements: list[ast.stmt], package: str) -> set[str]:
    """The modules that ``statements`` may import, with the packages that contain them."""
    names: set[str] = set()
    for statement in statements:
        if is_main(statement):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                home = ".".join([*filter(None, base), *([node.module] if node.module else [])])
                names |= {home, *(f"{home}.{alias.name}".lstrip(".") for alias in node.names)}
    whole = {name.rpartition(".")[0] for name in names}
    while whole - names:
        names |= whole
        whole = {name.rpartition(".")[0] for name in names}
    return {name for name in names if name and name.partition(".")[0] not in _NOT_OWN}


def _own_paths(folder: Path) -> list[str]:
    """The paths of the user's own modules: the program's folder, and paths without installed packages."""
    standard = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")}

    def is_own(path: str) -> bool:
        parts = Path(path).parts
        installed = any(part in _INSTALLED or part == "lib-dynload" for part in parts)
        return path not in standard and not path.endswith(".zip") and not installed

    return list(dict.fromkeys([str(folder), *(path or "." for path in sys.path if is_own(path))]))


def _find(name: str, paths: list[str]) -> Path | None:
    """The file of module ``name`` in ``paths``; None if it has no source there."""
    spec = None
    inside = paths
    for depth in range(1, name.count(".") + 2):
        whole = ".".join(name.split(".")[:depth])
        spec = PathFinder.find_spec(whole, inside)
        if spec is None:
            return None
        inside = list(spec.submodule_search_locations or ())
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _name_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _parts_of_module(path: Path, *, parses: bool, main: bool = False) -> dict[str, _Part]:
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    if parses:
        with suppress(SyntaxError, ValueError, RecursionError):
            tree = without_docstrings(ast.parse(content))
            return _parts([each for each in tree.body if main or not is_main(each)])
    return {"the file": _Part((hashlib.sha256(content).hexdigest()[:DIGITS],), (1,))}


def _parts(statements: list[ast.stmt]) -> dict[str, _Part]:
    digests: dict[str, list[tuple[str, int]]] = {}
    for statement in statements:
        name = ", ".join(sorted(set(bound(statement)) - {"*"})) or "top-level code"
        if isinstance(statement, ast.ClassDef):
            methods = [each for each in statement.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            for method in methods:
                digests.setdefault(f"{name}.{method.name}", []).extend(_digests(method, ""))
            rest = [each for each in statement.body if each not in methods]
            digests.setdefault(name, []).extend(_header(statement, ""))
            for each in rest:
                digests[name] += _digests(each, "class")
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            digests.setdefault("imports", []).extend(_digests(statement, ""))
        else:
            digests.setdefault(name, []).extend(_digests(statement, ""))
    return {
        name: _Part(tuple(digest for digest, _ in each), tuple(line for _, line in each))
        for name, each in digests.items()
    }


# --- the statements that decide what is trained ---


def program_digest(program: Program) -> str:
    """SHA-256 of the training function (and ``surrogate``) and of what they use of the file, independent of its layout.

    Two programs that agree in it train alike. Names are followed to functions, classes, constants and imports; code at
    the top level that binds no name, or is decorated, counts, too. Modules that the file imports are not followed. The
    search space, the objectives, docstrings and ``__main__`` do not count. The program's own arguments count where
    something else than ``argparse`` reads them: what that returns are settings.
    """
    if program.command is not None:
        return hashlib.sha256(repr((program.command.to_json(), source_of(program))).encode()).hexdigest()
    tree = without_docstrings(ast.parse(program.path.read_bytes()))
    used = used_by_training(tree, program.train)
    text = "\n".join(ast.unparse(statement) for statement in used)
    if program.arguments and any(map(_reads_words, used)):
        text += repr(program.arguments)
    return hashlib.sha256(text.encode()).hexdigest()


def _reads_words(node: ast.AST) -> bool:
    """Whether ``node`` reads the program's own arguments by other ways than ``argparse``."""
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("parse_args", "parse_known_args"):
        return False
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        if any(module.partition(".")[0] in PARSERS for module in modules):
            return True
    named = getattr(node, "attr", getattr(node, "id", ""))
    return named == "argv" or any(map(_reads_words, ast.iter_child_nodes(node)))


def used_by_training(tree: ast.Module, train: str, *, config: bool = False) -> list[ast.stmt]:
    """The statements of ``tree``, a program, that decide what it trains, in order.

    Args:
        tree: The program.
        train: The name of its training function.
        config: Whether its own settings count; a run may have been given others.
    """
    body = [statement for statement in tree.body if not is_main(statement)]
    binding: dict[str, set[int]] = defaultdict(set)
    for index, statement in enumerate(body):
        for name in bound(statement):
            binding[name].add(index)
    todo = [i for i, s in enumerate(body) if _acts(s) or _is_policy(s, body)]
    todo += [*(binding[train] or binding["main"]), *binding["surrogate"], *(binding["config"] if config else ())]
    used: set[int] = set()
    while todo:
        index = todo.pop()
        if index not in used:
            used.add(index)
            names = _names(body[index])
            if names & _BY_ANY_NAME:
                names = {*binding} - {"space", "objectives"}
            todo.extend(i for name in names - (set() if config else _RECORDED_APART) for i in binding.get(name, ()))
    return [body[index] for index in sorted(used)]


def without_docstrings(tree: ast.Module) -> ast.Module:
    """``tree``, changed: without texts that are statements of their own."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                setattr(node, name, [each for each in body if not _is_text(each)])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.body:
            node.body = [ast.Pass(lineno=node.lineno, col_offset=0)]
    return tree


def bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement binds; "*" if it imports all names of a module."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign() | ast.AnnAssign():
            stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            yield from (node.id for node in stored if isinstance(node.ctx, ast.Store))
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in names)


def is_main(statement: ast.stmt) -> bool:
    """Whether the statement is ``if __name__ == "__main__"``."""
    if not isinstance(statement, ast.If):
        return False
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))


def _names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _acts(statement: ast.stmt) -> bool:
    """Whether it has an effect when the file is imported, even if no code uses the names that it binds."""
    names = {*bound(statement)}
    return not names or "*" in names or bool(getattr(statement, "decorator_list", ()))


def _is_policy(statement: ast.stmt, body: list[ast.stmt]) -> bool:
    """Whether it is a policy class: a run may name it (``--policy``), so that no code of the file need use it."""
    if not isinstance(statement, ast.ClassDef):
        return False
    bases = {ast.unparse(base).rpartition(".")[2] for base in statement.bases}
    inherited = [each for each in body if isinstance(each, ast.ClassDef) and each.name in bases and each != statement]
    return "Policy" in bases or any(_is_policy(each, body) for each in inherited)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


# --- digests of statements ---


def _digests(node: ast.AST, where: str) -> Iterator[tuple[str, int]]:
    """Digests of ``node``, of the statements in it and of the elements of long lists in it, each with its line.

    ``where`` names the fields that it stands in. Line breaks have no influence.
    """
    yield from _header(node, where)
    for name, value in ast.iter_fields(node):
        if _holds_statements(value):
            for each in value:
                yield from _digests(each, f"{where}/{name}")


def _header(node: ast.AST, where: str) -> Iterator[tuple[str, int]]:
    """Digests of ``node`` without the statements in it."""
    apart: list[tuple[ast.AST, str]] = []
    text = _dumped(node, where, apart, leaves_out_statements=True)
    yield _digest(f"{where} {text}"), getattr(node, "lineno", 1)
    for each, place in apart:
        yield from _header(each, place)


def _holds_statements(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(e, ast.stmt | ast.ExceptHandler | ast.match_case) for e in value)


def _dumped(value: object, where: str, apart: list[tuple[ast.AST, str]], *, leaves_out_statements: bool = False) -> str:
    """``value`` as text, without the elements of long lists in it: those go to ``apart``, with their places."""
    if isinstance(value, ast.AST):
        fields = [
            f"{name}={_dumped(each, f'{where}/{name}', apart)}"
            for name, each in ast.iter_fields(value)
            if not (leaves_out_statements and _holds_statements(each)) and name != "type_comment"
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, list):
        nodes = [each for each in value if isinstance(each, ast.expr | ast.keyword)]
        if len(nodes) >= LONG_LIST:
            apart += [(each, f"{where}[{nth}]") for nth, each in enumerate(nodes)]
            return f"[{len(value)} elements]"
        return f"[{', '.join(_dumped(each, where, apart) for each in value)}]"
    return repr(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


# --- metrics ---


def reported_metrics(program: Program) -> set[str] | None:
    """Return the names of the metrics that a program reports, by its ``report`` calls.

    None if they cannot be known: without such a call, with names that are computed, or where another file of the
    user's, or an adapter, may report too.
    """
    sources = source_of(program)
    if program.command is not None or len(sources) != 1:
        return None
    tree = ast.parse(program.path.read_bytes())
    imported = _names_of_imports(tree.body, "") | {
        node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    if any(name.startswith("elastune.adapters") for name in imported):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node).endswith(".report")]
    names = [keyword.arg for call in calls for keyword in call.keywords]
    return None if None in names or not names else {name for name in names if name is not None}


# --- suspects: lines that may differ between runs or workers ---


def unseeded(text: str) -> list[int]:
    """The lines that draw random values which no seed decides."""
    return sorted({call.lineno for call in _calls(text) if _draws(call)})


def of_workers(text: str) -> list[int]:
    """The lines that depend on the rank of a worker, or on the number of workers."""
    tree = ast.parse(text)
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _asks(node)}
    return sorted(
        lines | {call.lineno for call in _calls(text) if _name(call).endswith(("get_rank", "get_world_size"))}
    )


def _calls(text: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _draws(call: ast.Call) -> bool:
    name = _name(call)
    if name.startswith("secrets.") or name in UNSEEDED:
        return True
    return not call.args and not call.keywords and name.endswith(WITHOUT_SEED)


def _asks(node: ast.Attribute) -> bool:
    return node.attr in OF_WORKERS and ast.unparse(node.value).endswith(("session", "accelerator"))
