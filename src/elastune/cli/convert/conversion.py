"""A plain training script as a program for elastune, in passes over its text; each pass reads the text of the last.

The passes over launchers, settings and the entry stand here, in the order of their use by ``convert``, which comes
last. The passes over loops and objects have files of their own.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass

from elastune.cli.convert.accumulation import with_turns, without_accumulation
from elastune.cli.convert.loops import with_loops, with_one_epoch
from elastune.cli.convert.objects import prepared
from elastune.cli.convert.source_text import (
    MARK,
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

# Takes out of a script what starts processes, or joins them: elastune does both.

_WRAPPERS = {"DataParallel", "DistributedDataParallel", "DDP"}
_LEFT_OUT = {"init_process_group", "destroy_process_group", "barrier"}
_REDUCTIONS = {"all_reduce", "reduce", "broadcast"}
_RANKS = {"get_rank": "0", "get_world_size": "1"}
_PLACES = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def without_launchers(text: str, name: str) -> str:
    """Leave out wrappers of DataParallel, process groups and what depends on them."""
    source = SourceText(text, name)
    wrapped: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            wrapped |= _wrapper(source, node)
            _process_group(source, node)
        elif isinstance(node, ast.Subscript) and dotted(node.value) == "os.environ":
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if key in _PLACES and isinstance(node.ctx, ast.Load):
                source.replace(node, f'"{_PLACES[str(key)]}"')
    for attribute in ast.walk(source.tree):
        if isinstance(attribute, ast.Attribute) and attribute.attr == "module" and dotted(attribute.value) in wrapped:
            source.cut(source.end(attribute.value), source.end(attribute))
    _samplers(source)
    return source.edited()


def _wrapper(source: SourceText, call: ast.Call) -> set[str]:
    """``model`` in the place of ``DataParallel(model)``; returns the names that stood for the wrapped model."""
    if called(call) not in _WRAPPERS or not call.args or any(each.arg == "process_group" for each in call.keywords):
        return set()
    statement = source.statement(call)
    targets = [dotted(each) for each in statement.targets] if isinstance(statement, ast.Assign) else []
    if targets == [dotted(call.args[0])] and isinstance(statement, ast.Assign) and statement.value is call:
        source.remove(statement)
    else:
        source.unwrap(call, call.args[0])
    return {*targets, dotted(call.args[0])} - {""}


def _process_group(source: SourceText, call: ast.Call) -> None:
    word, owner = called(call), dotted(call.func)
    distributed = "dist" in owner or "distributed" in owner
    statement = source.statement(call)
    alone = isinstance(statement, ast.Expr) and statement.value is call
    if word in _LEFT_OUT and alone and (distributed or word != "barrier"):
        source.remove(statement)
    elif word in _REDUCTIONS and alone and distributed:
        source.mark(statement, "each worker sees what it computes itself: use session.sum or session.mean")
        source.remove(statement)
    elif word in _RANKS and distributed:
        source.replace(call, _RANKS[word])
    elif owner == "mp.spawn" or owner.endswith("multiprocessing.spawn"):
        given = {each.arg: each.value for each in call.keywords}
        function = call.args[0] if call.args else given.get("fn")
        values = given.get("args") or (call.args[1] if len(call.args) > 1 else None)
        if function is not None:
            others = [source.text_of(each) for each in values.elts] if isinstance(values, ast.Tuple) else []
            source.replace(call, f"{source.text_of(function)}({', '.join(['0', *others])})")
    elif owner in ("os.environ.get", "os.getenv") and call.args and isinstance(call.args[0], ast.Constant):
        if call.args[0].value in _PLACES:
            source.replace(call, f'"{_PLACES[call.args[0].value]}"')
    elif word == "set_epoch" and alone and "sampler" in ast.unparse(call.func):
        source.remove(statement)


def _samplers(source: SourceText) -> None:
    """A loader that shuffles in the place of one with a ``DistributedSampler``, which needs a process group."""
    names: dict[str, bool] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and called(node.value) == "DistributedSampler":
            assert isinstance(node.value, ast.Call)
            given = {each.arg: ast.unparse(each.value) for each in node.value.keywords}
            names |= {dotted(target): given.get("shuffle") != "False" for target in node.targets}
            source.replace(node.value, "None")
    for call in (node for node in ast.walk(source.tree) if called(node) == "DataLoader"):
        assert isinstance(call, ast.Call)
        keywords = {each.arg: each for each in call.keywords}
        sampler = keywords.get("sampler")
        if sampler is None:
            continue
        direct = called(sampler.value) == "DistributedSampler"
        if not direct and dotted(sampler.value) not in names:
            continue
        order = "shuffle=False" not in ast.unparse(sampler.value) if direct else names[dotted(sampler.value)]
        start = source.start(sampler.value) - len("sampler=")
        if "shuffle" in keywords:
            source.replace(keywords["shuffle"].value, str(order))
            source.replace(sampler.value, "None")
        else:
            source.cut(start, source.end(sampler.value))
            source.insert(start, f"shuffle={order}")


# A first search space for the settings of a script: its parser's defaults, or numbers at the top of the file.

_RATES = ("lr", "learning_rate", "weight_decay", "eps", "wd")
_SIZES = ("batch_size", "hidden", "width", "emsize", "nhid", "latent", "n_embd", "dim")
_SEARCHED = (*_RATES, *_SIZES, "momentum", "dropout", "gamma", "beta", "margin", "temperature")
_KNOWN = (*_SEARCHED, "epochs", "steps", "iters", "layers", "heads")


def with_settings(text: str, name: str) -> str:
    """Add a ``config`` of the script's own numbers, and a search space as a comment."""
    source = SourceText(text, name)
    entry = next(each for each in source.tree.body if isinstance(each, Function) and each.name == ENTRY)
    values = _of_parser(source)
    lines: list[str] = []
    if "config" in bound_names(source.tree):  # a dict of the file's own
        source.lines_inside(entry, "global config", "config = session.config")
    elif values:
        lines.append(
            "# The parser's values are settings: elastune run FILE --set NAME=VALUE, or elastune run FILE -- ARGS."
        )
    else:
        values = _of_file(source, entry)
        if values:
            names = ", ".join(f'"{each}": {source.text_of(node)}' for each, node in values.items())
            lines.append(f"config = {{{names}}}  # elastune run FILE --set {next(iter(values))}=...")
            given = [f'{each} = session.config["{each}"]' for each in values]
            declared = [each for each in entry.body if isinstance(each, ast.Global)]
            missing = [each for each in values if not declared or each not in declared[0].names]
            if declared:
                source.insert(source.end(declared[0]), "".join(f", {each}" for each in missing))
                source.lines_after(declared[0], *given)
            else:
                source.lines_inside(entry, f"global {', '.join(missing)}", *given)
    searched = [f"#         {line}" for each, node in values.items() if (line := _range_of(each, node))]
    if searched:
        head = ["# A search space; mend the bounds:", "# def space(trial):", "#     return {"]
        lines += [*head, *searched, "#     }"]
    lines.append('# To search, report what counts: session.report(accuracy=...); and objectives = {"accuracy": "max"}')
    at = source.start(entry) - entry.col_offset
    source.insert(at, "".join(f"{line}\n" for line in lines) + "\n\n")
    return source.edited()


def _of_parser(source: SourceText) -> dict[str, ast.expr]:
    """The numbers that are defaults of the script's parser, by name."""
    values: dict[str, ast.expr] = {}
    for call in ast.walk(source.tree):
        if called(call) != "add_argument" or not isinstance(call, ast.Call):
            continue
        words = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        given = {each.arg: each.value for each in call.keywords}
        if not words or not _is_number(given.get("default")):
            continue
        dest = given.get("dest")
        longest = next((word for word in words if word.startswith("--")), words[0])
        name = dest.value if isinstance(dest, ast.Constant) else longest.lstrip("-").replace("-", "_")
        values[str(name)] = given["default"]
    return values


def _of_file(source: SourceText, entry: Function) -> dict[str, ast.expr]:
    """Numbers at the top of the file that only functions, and the training, read."""
    values: dict[str, ast.expr] = {}
    stored = [dotted(t) for n in ast.walk(source.tree) if isinstance(n, ast.Assign) for t in n.targets]
    for statement in source.tree.body:
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not _is_number(statement.value):
            continue
        name = dotted(statement.targets[0])
        if name.lower() == "config" or not any(part in name.lower() for part in _KNOWN):
            continue
        at_top = [use for use in source.uses(name) if source.function(use) is None and isinstance(use.ctx, ast.Load)]
        defaults = [use for use in source.uses(name) if _is_default(source, use)]
        only_here = stored.count(name) == 1 and name not in local_names(entry)
        if only_here and not at_top and not defaults and "config" not in stored:
            values[name] = statement.value
    return values


def _is_default(source: SourceText, use: ast.Name) -> bool:
    return any(isinstance(parent, ast.arguments) for parent in source.parents(use))


def _is_number(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _range_of(name: str, node: ast.expr) -> str:
    """A line of the space: around the present value, a power of ten for rates, twice and half for sizes."""
    value = getattr(node, "value", 0)
    low_name = name.lower()
    if (
        not any(part in low_name for part in _SEARCHED)
        or value <= 0
        or any(part in low_name for part in ("interval", "test", "val", "log"))
    ):
        return ""
    now = f"  # now {value}"
    if any(part in low_name for part in _SIZES) and isinstance(value, int):
        choices = sorted({max(1, value // 2), value, value * 2})
        return f'"{name}": trial.suggest_categorical("{name}", {choices}),{now}'
    if isinstance(value, int) and value > 1:
        return ""
    if any(part in low_name for part in _RATES):
        exponent = math.floor(math.log10(value))
        return f'"{name}": trial.suggest_float("{name}", 1e{exponent - 1}, 1e{exponent + 1}, log=True),{now}'
    return f'"{name}": trial.suggest_float("{name}", {round(value / 2, 4)}, {round(min(1.0, value * 1.5), 4)}),{now}'


# Makes ``train(session)`` of what a script runs: its part below ``__main__``, or the lines from its model on.

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


@dataclass(frozen=True)
class Conversion:
    """A converted script.

    Attributes:
        text: The program.
        marks: What could not be converted for certain: the line's number and the words of the comment there.
    """

    text: str
    marks: tuple[tuple[int, str], ...]


def convert(text: str, name: str) -> Conversion:
    """Convert the script ``text`` of the file ``name``.

    Raises:
        UserError: The text is no Python, or holds no training that is seen.

    Example:
        >>> convert(Path("plain.py").read_text(), "plain.py").text
    """
    text = text.removeprefix("\ufeff")
    text = without_launchers(text if text.endswith("\n") else f"{text}\n", name)
    text = with_entry(renamed(text, name), name)
    text = with_turns(without_accumulation(text, name), name)
    text, trained = prepared(text, name)
    text = with_one_epoch(with_loops(text, name, trained), name)
    text = with_session(with_settings(text, name), name)
    lines = enumerate(text.splitlines(), 1)
    marks = tuple((number, line.partition(MARK)[2]) for number, line in lines if line.lstrip().startswith(MARK))
    return Conversion(text, marks)
