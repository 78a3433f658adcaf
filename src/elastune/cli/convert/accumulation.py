"""Steps that a script takes by a count of its batches: one step with a larger batch, or one with each in its turn."""

from __future__ import annotations

import ast
from itertools import pairwise

from elastune.cli.convert.source_text import MARK, Function, SourceText, bound_names, called, dotted, local_names
from elastune.cli.convert.training_path import (
    TrainingSite,
    backward_calls,
    functions_that_train,
    iterated,
    resolve,
    site_of,
    step_calls,
    stepped_names,
)

_MOVES = {"to", "size", "view", "cuda", "float", "long", "reshape", "unsqueeze", "flatten", "len", "int", "squeeze"}

# --- if (i + 1) % 4 == 0: optimizer.step() ---


def without_accumulation(text: str, name: str) -> str:
    """Take a step in each pass of the loop, with a batch as large as those that the script adds up."""
    source = SourceText(text, name)
    site = site_of(source)
    found = next((each for each in ast.walk(site.loop) if isinstance(each, ast.If) and _times(each) is not None), None)
    if found is None or not site.over_data:
        return text
    times = _times(found)
    assert times is not None
    if found.orelse or found not in site.loop.body:
        source.mark(found, f"steps belong to each pass, with a batch_size {ast.unparse(times)} times as large")
        return source.edited()
    if _larger_batches(source, site, times):
        words = f"a step had {ast.unparse(times)} batches; now its batch is as large (--micro-batch saves memory)"
    else:
        words = f"a step had {ast.unparse(times)} batches: make the loader's batch_size as many times as large"
    source.lines_before(site.loop, f"{MARK}{words}")
    _undivided(source, site, times)
    first, last = found.body[0], found.body[-1]
    if first.lineno == found.lineno:
        source.cut(source.start(found), source.start(first))
    else:
        head = source.start(found) - found.col_offset
        source.cut(head, source.start(first) - first.col_offset)
        source.shift(first.lineno, last.end_lineno or last.lineno, found.col_offset - first.col_offset)
    return source.edited()


def _times(condition: ast.If) -> ast.expr | None:
    """The number of batches of a step, if ``condition`` is about a count of batches and steps."""
    if not any(called(each) == "step" for statement in condition.body for each in ast.walk(statement)):
        return None
    if any(backward_calls(statement) for statement in condition.body):
        return None
    for node in ast.walk(condition.test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return node.right
    return None


def _larger_batches(source: SourceText, site: TrainingSite, times: ast.expr) -> bool:
    assert isinstance(site.loop, ast.For)
    loader = dotted(iterated(source, site.loop))
    made = resolve(source, site.frames, loader) if loader else None
    value = getattr(made.made, "value", None) if made is not None else None
    if made is None or called(value or site.loop) != "DataLoader" or not isinstance(value, ast.Call):
        return False
    sizes = [each.value for each in value.keywords if each.arg == "batch_size"] or value.args[1:2]
    if not sizes or not _is_seen(source, made.function, times):
        return False
    source.wrap(sizes[0], "", f" * {_grouped(times)}")
    if isinstance(sizes[0], ast.BinOp):
        source.wrap(sizes[0], "(", ")")
    return True


def _grouped(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"({text})" if isinstance(node, ast.BinOp) else text


def _is_seen(source: SourceText, home: ast.Module | Function | None, value: ast.expr) -> bool:
    """Whether the names of ``value`` mean the same in the function ``home``."""
    names = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}
    there = {name for statement in source.tree.body for name in _top_names(statement)}
    local = local_names(home) if isinstance(home, Function) else set()
    return names <= there | local


def _top_names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    return {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _undivided(source: SourceText, site: TrainingSite, times: ast.expr) -> None:
    """Leave out the division of the loss by the number of batches."""
    wanted = ast.unparse(times)
    for node in ast.walk(site.loop):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and ast.unparse(node.right) == wanted:
            source.unwrap(node, node.left)
            statement = source.statement(node)
            if isinstance(statement, ast.Assign) and dotted(statement.targets[0]) == dotted(node.left) != "":
                source.remove(statement)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div) and ast.unparse(node.value) == wanted:
            source.remove(node)


# --- one optimizer after another, with the same batch ---


def with_turns(text: str, name: str) -> str:
    """Give each optimizer a turn of its own, where one steps before the loss of the next is computed."""
    source = SourceText(text, name)
    site = site_of(source)
    segments = _segments(source, site)
    if len(segments) < 2:
        return text
    made: set[str] = set()
    for number, statements in enumerate(segments):
        head = "if" if number == 0 else "elif"
        condition = "else:" if number == len(segments) - 1 else f"{head} session.turn == {number}:"
        first, last = statements[0], statements[-1]
        lines = [condition]
        if again := sorted(_needed(statements) & made):
            lines.append(f"    {MARK}for several slots (--slots), compute again in this turn: {', '.join(again)}")
        made |= {name for statement in statements for name in bound_names(statement)}
        source.lines_before(first, *lines)
        for statement in statements:  # each turn begins without gradients of the one before
            for stepped in stepped_names(source, statement):
                if isinstance(statement, ast.Expr):
                    source.insert(source.end(statement), f"\n{source.indent(statement)}    {stepped}.zero_grad()")
        source.shift(first.lineno, last.end_lineno or last.lineno, 4)
    return source.edited()


def _needed(statements: list[ast.stmt]) -> set[str]:
    """The names that the loss of ``statements`` reads before they are given values there."""
    last = max((call.lineno for each in statements for call in backward_calls(each)), default=0)
    names = [n for each in statements for n in ast.walk(each) if isinstance(n, ast.Name) and n.lineno <= last]
    made = {n.id: n.lineno for n in reversed(names) if isinstance(n.ctx, ast.Store)}
    return {n.id for n in names if isinstance(n.ctx, ast.Load) and n.lineno <= made.get(n.id, last)}


def _segments(source: SourceText, site: TrainingSite) -> list[list[ast.stmt]]:
    """The statements of the batch loop up to each update; the first ones, which move the batch, are in none of them."""
    frame_function = site.path[-1].function
    body = site.loop.body
    if not step_calls(source, site.loop) and frame_function is not site.path[site.batches.frame].function:
        body = frame_function.body if step_calls(source, frame_function) else body
    active = [number for number, each in enumerate(body) if not _moves(each)]
    if not active:
        return []
    training = functions_that_train(source)
    segments: list[list[ast.stmt]] = [[]]
    for statement in body[active[0] :]:
        has_loss = bool(backward_calls(statement)) or any(called(n) in training for n in ast.walk(statement))
        if has_loss and segments[-1] and any(_updates(source, each) for each in segments[-1]):
            segments.append([])
        segments[-1].append(statement)
    return _with_preparations(source, segments)


def _with_preparations(source: SourceText, segments: list[list[ast.stmt]]) -> list[list[ast.stmt]]:
    """Begin each segment behind the update of the one before, so that the forward pass of its loss is its own."""
    for earlier, later in pairwise(segments):
        while earlier and not _updates(source, earlier[-1]):
            later.insert(0, earlier.pop())
    return segments


def _moves(statement: ast.stmt) -> bool:
    """Whether a statement only brings the batch to its device or shape."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return False
    return all(called(node) in _MOVES for node in ast.walk(statement) if isinstance(node, ast.Call))


def _updates(source: SourceText, statement: ast.stmt) -> bool:
    return bool(stepped_names(source, statement))
