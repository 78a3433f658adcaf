"""What a loss is: a mean over the batch, a sum over its samples, or a mean over elements whose number varies."""

from __future__ import annotations

import ast

from elastune.cli.convert.source_text import Function, SourceText, called, dotted

_DEEP = 6  # assignments and calls that are followed


def is_sum(source: SourceText, loss: ast.expr, home: Function | None, depth: int = 0) -> bool:
    """Whether ``loss``, an expression in the function ``home``, is a sum over samples, as far as its text shows."""
    if depth > _DEEP:
        return False
    if isinstance(loss, ast.BinOp):
        if isinstance(loss.op, (ast.Div, ast.FloorDiv)):
            divisor = ast.unparse(loss.right)
            sized = "size" in divisor or "len(" in divisor or "shape" in divisor or "numel" in divisor
            return not sized and is_sum(source, loss.left, home, depth + 1)
        return any(is_sum(source, each, home, depth + 1) for each in (loss.left, loss.right))
    if isinstance(loss, ast.Call):
        return _call_sums(source, loss, home, depth)
    if isinstance(loss, (ast.Name, ast.Attribute)):
        values = _values(source, dotted(loss), home)
        return any(is_sum(source, value, home, depth + 1) for value in values)
    if isinstance(loss, ast.Tuple):
        return any(is_sum(source, each, home, depth + 1) for each in loss.elts[:1])
    return False


def _call_sums(source: SourceText, call: ast.Call, home: Function | None, depth: int) -> bool:
    if _option(call, "reduction") == "sum" or _option(call, "size_average") is False:
        return True
    word = called(call)
    if word == "sum":
        over = [*call.args, *(each.value for each in call.keywords if each.arg == "dim")]
        return len(over) == (0 if _is_method(call) else 1) or dotted(call.func) == "sum"
    if word in ("scale", "float", "double") and call.args:  # a gradient scaler
        return is_sum(source, call.args[0], home, depth + 1)
    for function in (node for node in ast.walk(source.tree) if isinstance(node, Function) and node.name == word):
        results = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
        return any(is_sum(source, each, function, depth + 1) for each in results)
    made = _values(source, dotted(call.func), home)
    return any(isinstance(each, ast.Call) and _option(each, "reduction") == "sum" for each in made)


def _is_method(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and dotted(call.func.value) != "torch"


def _option(call: ast.Call, name: str) -> object:
    return next(
        (each.value.value for each in call.keywords if each.arg == name and isinstance(each.value, ast.Constant)), None
    )


def _values(source: SourceText, name: str, home: Function | None) -> list[ast.expr]:
    """What ``name`` is given: in ``home``, else anywhere in the file."""
    if not name:
        return []
    everywhere = [
        node
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.Assign) and any(dotted(each) == name for each in node.targets))
        or (isinstance(node, ast.AugAssign) and dotted(node.target) == name and isinstance(node.op, ast.Add))
    ]
    here = [node for node in everywhere if source.function(node) is home]
    return [node.value for node in here or everywhere]


def unequal_count(source: SourceText, loss: ast.expr, home: Function | None) -> str:
    """The number of elements of a mean that leaves out those of ``ignore_index``; "" for other losses."""
    node = loss
    if isinstance(node, ast.Name):
        values = _values(source, node.id, home)
        if len(values) != 1:
            return ""
        node = values[0]
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return ""
    makers = [each for each in _values(source, dotted(node.func), home) if isinstance(each, ast.Call)]
    ignored = [k.value for call in (node, *makers[:1]) for k in call.keywords if k.arg == "ignore_index"]
    return f"({source.text_of(node.args[1])} != {source.text_of(ignored[0])}).sum()" if ignored else ""
