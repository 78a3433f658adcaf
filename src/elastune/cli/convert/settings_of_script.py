"""A first search space for the settings of a script: its parser's defaults, or numbers at the top of the file."""

from __future__ import annotations

import ast
import math

from elastune.cli.convert.source_text import Function, SourceText, bound_names, called, dotted, local_names
from elastune.cli.convert.training_path import ENTRY

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
