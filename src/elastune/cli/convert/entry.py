"""Makes ``train(session)`` of what a script runs: its part below ``__main__``, or the lines from its model on."""

from __future__ import annotations

import ast
from collections.abc import Callable

from elastune.cli.convert.source_text import (
    Function,
    SourceText,
    bound_names,
    called,
    dotted,
    local_names,
    parameters,
)
from elastune.cli.convert.training_path import ENTRY, backward_calls, functions_that_train, is_optimizer, models_of
from elastune.core.errors import UserError

RESERVED = {"space", "objectives", "constraints", "views", "surrogate", "config", ENTRY}
_ADAPTERS = {
    "accelerate": "its adapter takes the script with one other import: docs/programs.md#scripts-written-for-accelerate",
    "lightning": "its adapter takes the script: docs/programs.md#lightnings-trainer",
    "pytorch_lightning": "its adapter takes the script: docs/programs.md#lightnings-trainer",
    "transformers": "Trainer has an adapter: docs/programs.md#hugging-faces-trainer",
}


def renamed(text: str, name: str) -> str:
    """Give other names to what a script calls ``train``, ``config`` and the like: elastune reads these names.

    Raises:
        UserError: The script has a ``session`` of its own.
    """
    source = SourceText(text, name)
    own = [each for each in ast.walk(source.tree) if isinstance(each, ast.Name | ast.arg)]
    for each in own:
        if "session" in (getattr(each, "id", ""), getattr(each, "arg", "")):
            raise UserError("session names elastune's session", f"{name}:{each.lineno}", "give that another name first")
    bound = bound_names(source.tree)
    for guard in _guards(source):
        bound |= {each for statement in guard.body for each in bound_names(statement)}
    taken = {each.id for each in ast.walk(source.tree) if isinstance(each, ast.Name)} | bound
    for old in sorted(bound & RESERVED):
        if old == "config" and _is_plain_config(source):
            continue
        candidates = ("train_epoch", "train_model", "train_loop") if old == ENTRY else (f"{old}_", f"plain_{old}")
        _rename(source, old, next(each for each in candidates if each not in taken))
    return source.edited()


def _is_plain_config(source: SourceText) -> bool:
    """Whether ``config`` is one dict of literal values."""
    values = [n.value for n in source.tree.body if isinstance(n, ast.Assign) and dotted(n.targets[0]) == "config"]
    if len(values) != 1 or not isinstance(values[0], ast.Dict):
        return False
    try:
        return all(isinstance(key, str) for key in ast.literal_eval(values[0]))
    except (ValueError, SyntaxError):
        return False


def _rename(source: SourceText, old: str, new: str) -> None:
    for node in ast.walk(source.tree):
        around = [each for each in source.parents(node) if isinstance(each, Function)]
        if isinstance(node, ast.Name) and node.id == old and not any(old in local_names(each) for each in around):
            source.replace(node, new)
        elif isinstance(node, (Function, ast.ClassDef)) and node.name == old and not around:
            if source.owner(node) is None if isinstance(node, Function) else True:
                _rename_definition(source, node, old, new)
        elif isinstance(node, ast.Global) and old in node.names:
            names = [new if each == old else each for each in node.names]
            start = source.start(node)
            source.cut(start, source.end(node))
            source.insert(start, f"global {', '.join(names)}")


def _rename_definition(source: SourceText, node: Function | ast.ClassDef, old: str, new: str) -> None:
    start = source.start(node)
    line = source.bytes[start:].split(b"\n", 1)[0]
    at = start + line.index(old.encode(), line.index(b" "))
    source.cut(at, at + len(old.encode()))
    source.insert(at, new)


def _guards(source: SourceText) -> list[ast.If]:
    """The blocks below ``if __name__ == "__main__":``."""
    return [n for n in source.tree.body if isinstance(n, ast.If) and "__name__" in ast.unparse(n.test)]


def with_entry(text: str, name: str) -> str:
    """Put the lines that a script runs to train into ``def train(session):``.

    Raises:
        UserError: No line of the script comes to a ``.backward()``.
    """
    source = SourceText(text, name)
    training = functions_that_train(source)

    def trains(node: ast.AST) -> bool:
        if isinstance(node, (Function, ast.ClassDef)):
            return False
        return bool(backward_calls(node)) or any(called(each) in training for each in ast.walk(node))

    if not any(trains(statement) for statement in source.tree.body):
        raise UserError("a plain script trains with loss.backward() in this file", *_without_training(source, name))
    guard = next((each for each in _guards(source) if trains(each)), None)
    if guard is not None:
        inside: list[ast.stmt] = guard.body
        others = [each for each in source.tree.body if each is not guard]
        if guard.body[0].lineno == guard.lineno:
            source.cut(source.start(guard), source.start(guard.body[0]))
            source.insert(source.start(guard.body[0]), f"def {ENTRY}(session): ")
        else:
            head_end = source.start(guard.body[0])
            colon = source.bytes.index(b":", source.end(guard.test))
            source.cut(source.start(guard), min(colon, head_end))
            source.insert(source.start(guard), f"def {ENTRY}(session)")
            first = guard.body[0]
    else:
        first_place = _first_of_training(source, trains)
        inside = source.tree.body[first_place:]
        others = source.tree.body[:first_place]
        for other in _guards(source):
            source.remove(other)
        first = inside[0]
    shared = _shared_names(source, inside, others)
    _drop_annotations(source, inside, shared)
    declaration = f"global {', '.join(sorted(shared))}" if shared else ""
    if guard is not None:
        if declaration and guard.body[0].lineno != guard.lineno:
            source.lines_before(first, declaration)
    else:
        assert first.end_lineno is not None
        head = "" if others and _blank_before(source, first) else "\n\n"
        lines = f"{head}def {ENTRY}(session):\n" + (f"    {declaration}\n" if declaration else "")
        lowest = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
        source.insert(source.start(first) - first.col_offset, lines)
        last = inside[-1].end_lineno or inside[-1].lineno
        source.shift(lowest, last, 4)
    return source.edited()


def _blank_before(source: SourceText, statement: ast.stmt) -> bool:
    above = [source.line(number).strip() for number in range(max(1, statement.lineno - 2), statement.lineno)]
    return len(above) == 2 and not any(above)


def _without_training(source: SourceText, name: str) -> tuple[str, str]:
    """The value and the fix of the error for a script without a training that is seen."""
    modules = {
        module.partition(".")[0]
        for node in ast.walk(source.tree)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    fix = next((words for module, words in _ADAPTERS.items() if module in modules), "")
    if fix:
        return f"none in {name}", fix
    if backward_calls(source.tree):
        line = backward_calls(source.tree)[0].lineno
        return f"no line of {name} calls what holds line {line}", "give the file that starts the training"
    return f"none in {name}", "give the file with the loop, or change the lines by hand"


def _first_of_training(source: SourceText, trains: Callable[[ast.stmt], bool]) -> int:
    """The first statement at the top of the file that makes a model or an optimizer, or trains."""
    models: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and is_optimizer(node.value):
            models |= {each.partition(".")[0] for each in models_of(source, node.value, source.tree)}
    for place, statement in enumerate(source.tree.body):
        if isinstance(statement, (Function, ast.ClassDef, ast.Import, ast.ImportFrom)):
            continue
        value = getattr(statement, "value", None)
        makes = isinstance(statement, (ast.Assign, ast.AnnAssign)) and bool(bound_names(statement) & models)
        if makes or (value is not None and is_optimizer(value)) or trains(statement):
            return place
    raise AssertionError("a statement trains")


def _shared_names(source: SourceText, inside: list[ast.stmt], others: list[ast.stmt]) -> set[str]:
    """The names that ``inside`` binds and that functions outside of it read, or that a function calls ``global``."""
    bound = {name for statement in inside for name in bound_names(statement)}
    definitions = {each.name for each in inside if isinstance(each, (Function, ast.ClassDef))}
    shared = {
        name for node in ast.walk(source.tree) if isinstance(node, ast.Global) for name in node.names if name in bound
    }
    for statement in others:
        for function in (each for each in ast.walk(statement) if isinstance(each, Function | ast.Lambda)):
            own = local_names(function) if isinstance(function, Function) else {a.arg for a in function.args.args}
            read = {e.id for e in ast.walk(function) if isinstance(e, ast.Name) and isinstance(e.ctx, ast.Load)}
            shared |= (read - own) & bound
    module = {name for statement in others for name in bound_names(statement)}
    # What the file binds before and the training binds again, after reading it: it stays the file's.
    read = {e.id for s in inside for e in ast.walk(s) if isinstance(e, ast.Name) and isinstance(e.ctx, ast.Load)}
    return shared | (module & bound & read) - definitions


def _drop_annotations(source: SourceText, inside: list[ast.stmt], names: set[str]) -> None:
    """A name that is declared ``global`` can have no annotation."""
    for statement in inside:
        for node in ast.walk(statement):
            if isinstance(node, ast.AnnAssign) and dotted(node.target) in names and source.function(node) is None:
                if node.value is None:
                    source.remove(node)
                else:
                    source.cut(source.end(node.target), source.end(node.annotation))


# --- the session in other functions ---


def with_session(text: str, name: str) -> str:
    """Give the session to every function that uses it: as its first argument, or by ``elastune.current_session()``."""
    for _ in range(50):
        source = SourceText(text, name)
        function = _without_session(source)
        if function is None:
            return text
        if not _take_as_argument(source, function):
            source.lines_inside(function, "session = elastune.current_session()")
            if "elastune" not in bound_names(source.tree):
                source.insert(_behind_imports(source), "import elastune\n")
        text = source.edited()
    return text


def _without_session(source: SourceText) -> Function | None:
    for use in source.uses("session"):
        around = [each for each in source.parents(use) if isinstance(each, Function)]
        if around and not any("session" in local_names(each) for each in around):
            outermost = [each for each in around if source.owner(each) is not None or source.function(each) is None]
            return outermost[0] if outermost else around[-1]
    return None


def _take_as_argument(source: SourceText, function: Function) -> bool:
    """Add the parameter, and the argument to all calls; False where some use of the function is no plain call."""
    if source.owner(function) is not None or function.decorator_list or function.args.posonlyargs:
        return False
    uses = list(source.uses(function.name))
    calls = [
        call for call in ast.walk(source.tree) if isinstance(call, ast.Call) and any(call.func is use for use in uses)
    ]
    if len(calls) != len(uses) or not all(source.function(call) is not None for call in calls):
        return False
    start = source.start(function)
    at = source.bytes.index(b"(", start) + 1
    source.insert(at, "session, " if parameters(function) else "session")
    for call in calls:
        at = source.bytes.index(b"(", source.end(call.func)) + 1
        source.insert(at, "session, " if call.args or call.keywords else "session")
    return True


def _behind_imports(source: SourceText) -> int:
    imports = [node for node in source.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    plain = [node for node in imports if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    first = plain[0] if plain else source.tree.body[0]
    return source.start(first)
