"""``elastune init``: a first program to edit, or your own plain training loop rewritten for a session.

The rewriting finds the few lines that change in the syntax of the program. It changes only what is certain: a loop
over ``range(...)`` epochs around a loop over batches with one ``.backward()``.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli.output import OK, print_lines
from elastune.core.errors import UserError

# --- rewriting a plain training loop ---

PAGE = "see docs/programs.md"


@dataclass
class _PlainLoop:
    """A plain training loop: its loops over epochs and batches, its function, and the names of its objects."""

    epochs: ast.For
    batches: ast.For
    home: ast.FunctionDef | None
    models: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    schedulers: list[str] = field(default_factory=list)

    @property
    def prepared(self) -> str:
        return ", ".join([*self.models, *self.optimizers, *self.schedulers])


def from_plain(text: str, name: str) -> str:
    """Return the program ``text`` of the file ``name`` as a program for ``elastune run``.

    Raises:
        UserError: If the text has no such loop, or the loop is in a place where it cannot be rewritten.
    """
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise UserError("a program must be Python", f"{name}:{error.lineno}: {error.msg}", "mend it first") from None
    plain_loop = _loop_of(module, name)
    _trained_by(plain_loop, plain_loop.home or module)
    if not plain_loop.optimizers or not plain_loop.models:
        rule = "the optimizer is built of model.parameters() beside the loop"
        raise UserError(rule, f"none found in {name}", f"change the lines by hand: {PAGE}")
    lines = text.splitlines()
    for node in sorted(_edits(plain_loop, text), key=lambda edit: edit[0], reverse=True):
        (row, start, stop), new = node
        lines[row] = lines[row].encode()[:start].decode() + new + lines[row].encode()[stop:].decode()
    indent = " " * plain_loop.epochs.col_offset
    lines.insert(
        plain_loop.epochs.lineno - 1, f"{indent}{plain_loop.prepared} = session.prepare({plain_loop.prepared})"
    )
    return "\n".join(_called(lines, plain_loop, module, name)) + "\n"


def _loop_of(module: ast.Module, name: str) -> _PlainLoop:
    homes: list[ast.FunctionDef | None] = [None, *(n for n in module.body if isinstance(n, ast.FunctionDef))]
    loops: list[_PlainLoop] = []
    for home in homes:
        body = module.body if home is None else home.body
        for loop in (node for top in body for node in _within(top) if isinstance(node, ast.For)):
            inner = [node for node in loop.body if isinstance(node, ast.For) and _backward(node)]
            if len(inner) == 1 and _is_range(loop.iter):
                loops.append(_PlainLoop(loop, inner[0], home))
    if len(loops) != 1 or len(_backward(loops[0].batches)) != 1:
        rule = "a plain program has one loop over epochs, with range(...), around one over batches with one .backward()"
        raise UserError(rule, f"{len(loops)} of them in {name}", f"change the lines by hand: {PAGE}")
    return loops[0]


def _within(top: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of the statement ``top``; none of a function or class."""
    if isinstance(top, (ast.FunctionDef, ast.ClassDef)):
        return
    yield from ast.walk(top)


def _backward(loop: ast.For) -> list[ast.Call]:
    calls = (node for node in ast.walk(loop) if isinstance(node, ast.Call))
    return [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "backward" and not c.args]


def _is_range(node: ast.expr) -> bool:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
    return called and len(node.args) == 1  # type: ignore[attr-defined]


def _trained_by(plain_loop: _PlainLoop, home: ast.FunctionDef | ast.Module) -> None:
    for node in (n for top in home.body if top.lineno < plain_loop.epochs.lineno for n in _within(top)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.targets) == 1):
            continue
        target, made = node.targets[0], ast.unparse(node.value.func)
        if not isinstance(target, ast.Name):
            continue
        owners = [
            ast.unparse(call.func.value)
            for call in ast.walk(node.value)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "parameters"
        ]
        if "lr_scheduler." in made or made.endswith("LR"):
            plain_loop.schedulers.append(target.id)
        elif owners and all(owner.isidentifier() for owner in owners):
            plain_loop.optimizers.append(target.id)
            plain_loop.models += [owner for owner in dict.fromkeys(owners) if owner not in plain_loop.models]


def _edits(plain_loop: _PlainLoop, text: str) -> Iterator[tuple[tuple[int, int, int], str]]:
    """The edits: places (line from 0, first and last byte), each with its new text."""

    def put(node: ast.expr, new: str) -> tuple[tuple[int, int, int], str]:
        if node.lineno != node.end_lineno or node.end_col_offset is None:
            raise UserError("a line that changes is one line", ast.unparse(node)[:80], "write it on one")
        return (node.lineno - 1, node.col_offset, node.end_col_offset), new

    assert isinstance(plain_loop.epochs.iter, ast.Call)
    yield put(plain_loop.epochs.iter, f"session.epochs({ast.unparse(plain_loop.epochs.iter.args[0])})")
    batches = plain_loop.batches.iter
    while isinstance(batches, ast.Call) and batches.args and ast.unparse(batches.func) in ("enumerate", "tqdm"):
        batches = batches.args[0]
    yield put(batches, f"session.batches({ast.get_source_segment(text, batches)})")
    (backward,) = _backward(plain_loop.batches)
    assert isinstance(backward.func, ast.Attribute)
    yield put(backward, f"session.backward({ast.get_source_segment(text, backward.func.value)})")
    for node in ast.walk(plain_loop.batches):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("clip_grad_norm_") and len(node.args) == 2:
            yield put(node, f"session.clip_grad_norm_({ast.get_source_segment(text, node.args[1])})")


def _called(lines: list[str], plain_loop: _PlainLoop, module: ast.Module, name: str) -> list[str]:
    """Return ``lines``, which have one more line before the loop, with a function ``train(session)``."""
    home, moved = plain_loop.home, plain_loop.epochs.lineno
    guards = [n for n in module.body if isinstance(n, ast.If) and "__name__" in ast.unparse(n.test)]
    if home is not None:
        needed = len(home.args.args) - len(home.args.defaults)
        if needed or home.args.posonlyargs or home.args.vararg:
            rule = "the loop is in a function that needs no arguments, or in the file itself"
            raise UserError(rule, f"{home.name}({ast.unparse(home.args)}) in {name}", "read them within, from config")
        row = home.lineno - 1
        others = ", " if home.args.args else ""
        lines[row] = lines[row].replace(f"{home.name}(", f"{home.name}(session{others}", 1)
        for guard in guards:  # elastune run starts it
            shift = int(guard.lineno >= moved)
            lines[guard.lineno - 1 + shift : (guard.end_lineno or guard.lineno) + shift] = []
        more = ["", "", "def train(session):", f"    {home.name}(session)"] if home.name != "train" else []
        return [*_stripped(lines), *more]
    names = {*plain_loop.models, *plain_loop.optimizers, *plain_loop.schedulers}
    first = min(n.lineno for n in module.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in names)
    inside = {name for n in module.body if n.lineno >= first for name in _stored(n)}
    for function in (n for n in module.body if isinstance(n, ast.FunctionDef) and n.lineno < first):
        local_names = {a.arg for a in function.args.args} | _stored(function)
        read = {t.id for t in ast.walk(function) if isinstance(t, ast.Name)} - local_names
        if read & inside:
            rule = "what a function uses is given to it, or built before the model"
            raise UserError(rule, f"{function.name} uses {', '.join(sorted(read & inside))}", "put the loop in main()")
    body = [f"    {line}" if line.strip() else line for line in lines[first - 1 :]]
    return [*_stripped(lines[: first - 1]), "", "", "def train(session):", *body]


def _stored(top: ast.AST) -> set[str]:
    """The names that are assigned within ``top``."""
    return {n.id for n in ast.walk(top) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _stripped(lines: list[str]) -> list[str]:
    """The lines without empty lines at the end."""
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines


# --- elastune init ---

FIRST_PROGRAM = Path(__file__).parent.parent / "first_program.py"


def init(
    file: Annotated[Path, typer.Argument(help="The file to write. It must not exist yet.")] = Path("train.py"),
    plain: Annotated[
        Path | None, typer.Option("--from", help="A Python file with a plain training loop, to be rewritten.")
    ] = None,
) -> int:
    """Write a first program, or rewrite a plain training loop.

    FILE is then a program that runs as it is. Its comments say what to put in its place.

    With --from, FILE is your plain training loop with the lines changed that must change; the command shows them. Then
    elastune check FILE tells what else keeps the program from the same results on any number of workers.
    """
    if file.suffix != ".py":
        raise UserError("a program must be a Python file", file, "give it the ending .py")
    before = ""
    if plain is None:
        text = FIRST_PROGRAM.read_text().replace(" train.py ", f" {file} ")
    else:
        try:
            before = plain.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                "a plain program must be a file that can be read", f"{plain}: {error}", "check it"
            ) from None
        text = from_plain(before, plain.name)
    try:
        with file.open("x") as new:
            new.write(text)
    except FileExistsError:
        raise UserError("elastune init overwrites nothing", file, "give another name: elastune init mine.py") from None
    except OSError as error:
        rule = "the first program must be written to a folder that is there"
        raise UserError(rule, f"{file}: {error.strerror}", "check the path") from None
    if plain is not None:
        changed = difflib.unified_diff(before.splitlines(), text.splitlines(), str(plain), str(file), n=0, lineterm="")
        print_lines(*changed)
    print(f"{file} is written. Next: elastune {'run' if plain is None else 'check'} {file}", end="")
    print(" --workers 2" if plain is None else "")
    return OK
