"""Rewrites the loops of a training: epochs, batches, the backward pass, counters of batches, and the kind of a loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elastune.cli.convert.objects import TrainedObjects
from elastune.cli.convert.source_text import MARK, Function, Loop, SourceText, bound_names, called, dotted
from elastune.cli.convert.training_path import (
    TrainingSite,
    backward_calls,
    counts,
    functions_that_train,
    iterated,
    layers,
    models_of,
    name_here,
    resolve,
    site_of,
    step_calls,
    stepped_names,
)

# What a loss is: a mean over the batch, a sum over its samples, or a mean over elements whose number varies.

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


# Rewrites the loops of a training: epochs, batches, the backward pass, and what counts batches.

NUMBER_OF_EPOCHS = "session.epochs takes the number of epochs"


def with_loops(text: str, name: str, trained: TrainedObjects) -> str:
    """Rewrite the loops of ``text``, which has an entry and ``session.prepare``."""
    source = SourceText(text, name)
    site = site_of(source)
    turns = _turns(source)
    _backward_passes(source, site, turns)
    _clips(source, trained)
    if site.over_data:
        _over_data(source, site, turns)
    else:
        _by_itself(source, site)
    if site.epochs is not None:
        _epochs(source, site.epochs.loop, site)
    _saves(source)
    return source.edited()


def with_one_epoch(text: str, name: str) -> str:
    """Put a batch loop that stands in no loop over epochs into one of a single epoch."""
    source = SourceText(text, name)
    if any(_is_session_call(node, "epochs") for node in ast.walk(source.tree)):
        return text
    if NUMBER_OF_EPOCHS in text:
        return text
    for loop in (node for node in ast.walk(source.tree) if isinstance(node, ast.For)):
        if any(_is_session_call(node, "batches") for node in ast.walk(loop.iter)):
            source.lines_before(loop, "for _ in session.epochs(1):")
            source.shift(loop.lineno, loop.end_lineno or loop.lineno, 4)
            return source.edited()
    return text


def _is_session_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) == f"session.{name}"


def _turns(source: SourceText) -> int:
    """The number of turns that a batch has."""
    tests = [
        node for node in ast.walk(source.tree) if isinstance(node, ast.If) and "session.turn" in ast.unparse(node.test)
    ]
    return len(tests) + 1 if tests else 1


# --- the loop over batches ---
def _over_data(source: SourceText, site: TrainingSite, turns: int) -> None:
    loop = site.loop
    assert isinstance(loop, ast.For)
    options = _training_condition(source, site)
    if turns > 1:
        options += f", turns={turns}"
    nodes = list(layers(source, loop))
    source.wrap(nodes[-1], "session.batches(", f"{options})")
    for node in nodes:
        if called(node) == "zip" and isinstance(node, ast.Call) and len(node.args) > 1:
            source.mark(loop, "each worker reads the other parts of zip(...) by itself")
    counters = _numbered(source, loop, nodes)
    _counting(source, site, loop, counters)


def _training_condition(source: SourceText, site: TrainingSite) -> str:
    """``train=...``, where the loop serves an evaluation, too."""
    assert isinstance(site.loop, ast.For)
    last = site.path[-1].function
    if last is not site.path[site.batches.frame].function:
        return ""
    calls = [c for c in backward_calls(site.loop) if source.function(c) is last]
    conditions: list[str] = []
    inside = bound_names(site.loop)
    for parent in source.parents(calls[0]) if calls else ():
        if parent is site.loop:
            break
        if isinstance(parent, ast.If) and "session." not in ast.unparse(parent.test):
            names = {each.id for each in ast.walk(parent.test) if isinstance(each, ast.Name)}
            if names & inside or any(isinstance(each, ast.Call) for each in ast.walk(parent.test)):
                continue
            text = ast.unparse(parent.test)
            in_else = any(calls[0] in ast.walk(each) for each in parent.orelse)
            conditions.append(f"not ({text})" if in_else else text)
    if not conditions:
        return ""
    text = " and ".join(conditions)
    return f", train={text}" if "==" in text or " is " in text or text.startswith("not ") else f", train=bool({text})"


def _numbered(source: SourceText, loop: ast.For, nodes: list[ast.expr]) -> set[str]:
    """The index of the global batch in the place of ``enumerate``; returns the names that count batches."""
    for node in nodes:
        if called(node) != "enumerate" or not isinstance(node, ast.Call) or not isinstance(loop.target, ast.Tuple):
            continue
        number, *others = loop.target.elts
        if not isinstance(number, ast.Name) or len(others) != 1:
            return set()
        begin = [*node.args[1:2], *(each.value for each in node.keywords)]
        source.unwrap(node, node.args[0])
        parenthesis = source.bytes[source.start(loop.target) : source.start(loop.target) + 1] == b"("
        source.cut(source.start(loop.target), source.start(others[0]))
        if parenthesis:
            source.cut(source.end(others[0]), source.end(loop.target))
        if isinstance(others[0], ast.Tuple) and source.text_of(others[0]).startswith("(") and not parenthesis:
            source.cut(source.start(others[0]), source.start(others[0]) + 1)
            source.cut(source.end(others[0]) - 1, source.end(others[0]))
        first = ast.unparse(begin[0]) if begin else "0"
        text = f" + {first}" if first != "0" else ""
        if number.id != "_":
            source.lines_inside(loop, f"{number.id} = session.batch_index{text}")
        return {number.id}
    return set()


def _counting(source: SourceText, site: TrainingSite, loop: Loop, counters: set[str]) -> None:
    """Let what counts batches run once a global batch."""
    function = site.path[site.batches.frame].function
    for node in _own(loop.body):
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.target, ast.Name)
            and _counts_batches(source, loop, node)
        ):
            source.replace(node.value, "session.ends_step")
            counters = counters | {node.target.id}
    for node in _own(loop.body):
        if isinstance(node, ast.If) and not _holds_update(node) and "session." not in ast.unparse(node.test):
            uses = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)} & counters
            leaves = any(isinstance(each, (ast.Break, ast.Return)) for each in _own(node.body))
            is_inner = any(
                isinstance(p, ast.If) and p in _own_list(loop.body) and _is_guarded(p, counters)
                for p in source.parents(node)
            )
            if leaves and node.lineno < _first_loss(source, loop):
                source.mark(node, "a batch that begins must have its session.backward: leave the loop behind it")
            elif (uses or leaves) and not is_inner and node.lineno > _first_loss(source, loop):
                either = isinstance(node.test, (ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr))
                before, after = ("(", ")") if either else ("", "")
                source.wrap(node.test, f"session.ends_step and {before}", after)
                if node.orelse and uses:
                    source.mark(node, "the other branch runs for each slot")
    if any(isinstance(each, ast.Return) and source.function(each) is function for each in _own(loop.body)):
        source.mark(loop, "the loop is left by return: a resumed run begins it again")


def _first_loss(source: SourceText, loop: Loop) -> int:
    """The line of the first backward pass in the body of ``loop``, or of the first function there that has one."""
    training = functions_that_train(source)
    lines = [n.lineno for n in ast.walk(loop) if isinstance(n, ast.Call) and called(n) in {"backward", *training}]
    return min(lines, default=loop.lineno)


def _is_guarded(node: ast.If, counters: set[str]) -> bool:
    uses = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)} & counters
    return not _holds_update(node) and bool(
        uses or any(isinstance(e, (ast.Break, ast.Return)) for e in _own(node.body))
    )


def _holds_update(node: ast.If) -> bool:
    return any(called(each) in ("step", "backward", "zero_grad") for each in ast.walk(node))


def _counts_batches(source: SourceText, loop: Loop, node: ast.AugAssign) -> bool:
    """Whether ``node`` adds 1 in each pass of ``loop``: no condition is around it but turns."""
    if not isinstance(node.op, ast.Add) or not isinstance(node.value, ast.Constant) or node.value.value != 1:
        return False
    for parent in source.parents(node):
        if parent is loop:
            return True
        if not (isinstance(parent, ast.If) and "session." in ast.unparse(parent.test)):
            return False
    return False


def _own_list(body: list[ast.stmt]) -> list[ast.AST]:
    return list(_own(body))


def _own(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The statements of a loop's body, without those of loops, functions and classes inside."""
    for statement in body:
        if isinstance(statement, (*Function.__args__, ast.ClassDef, ast.For, ast.While)):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _own(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _own(handler.body)


# --- a loop that gets the data of each step by itself ---
def _by_itself(source: SourceText, site: TrainingSite) -> None:
    """Each pass of the loop is a step with one number as its batch."""
    loop = site.loop
    words = "each step gets its data by itself: it is not cut into slots, so one worker has all work"
    form = "map(int, session.batches({}, batch_size=1, shuffle=False))"
    if isinstance(loop, ast.For):
        numbers = iterated(source, loop)
        if called(numbers) == "count":
            limit = _limit(source, loop, None)
            source.replace(numbers, form.format(f"range({limit or 1000})"))
            words = words if limit else "the loop was endless: give the number of its steps in place of 1000"
        else:
            if called(numbers) == "trange" and isinstance(numbers, ast.Call):
                source.replace(numbers.func, "range")
            before, after = form.split("{}")
            source.wrap(numbers, before, after)
    else:
        _of_while(source, loop, form)
    source.lines_before(loop, f"{MARK}{words}")


def _of_while(source: SourceText, loop: ast.While, form: str) -> None:
    """``while it < n:`` with ``it += 1`` in it."""
    name, limit = "", ""
    if isinstance(loop.test, ast.Compare) and len(loop.test.ops) == 1 and isinstance(loop.test.left, ast.Name):
        name, limit = loop.test.left.id, ast.unparse(loop.test.comparators[0])
        if isinstance(loop.test.ops[0], ast.LtE):
            limit = f"{limit} + 1"
    else:
        counted = [
            n.target.id for n in _own(loop.body) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)
        ]
        for each in counted:
            if limit := _limit(source, loop, each) or "":
                name = each
                break
    if not name or not limit:
        source.mark(loop, "this loop has no number of steps that is seen: write 'for step in range(...)'")
        return
    start = source.start(loop)
    source.cut(start, source.end(loop.test))
    source.insert(start, f"for {name} in {form.format(f'range({name}, {limit})')}")
    last = [each for each in loop.body if not source.is_removed(each)][-1]
    if isinstance(last, ast.AugAssign) and dotted(last.target) == name:
        source.remove(last)


def _limit(source: SourceText, loop: Loop, name: str | None) -> str | None:
    """The number of steps after which ``if step > n: break`` leaves the loop; the break goes."""
    for node in loop.body:
        if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare) or len(node.body) != 1 or node.orelse:
            continue
        target = dotted(loop.target) if isinstance(loop, ast.For) else name
        if isinstance(node.body[0], ast.Break) and dotted(node.test.left) == target and target:
            source.remove(node)
            limit = ast.unparse(node.test.comparators[0])
            return f"{limit} + 1" if isinstance(node.test.ops[0], ast.Gt) else limit
    return None


# --- the backward pass ---
def _backward_passes(source: SourceText, site: TrainingSite, turns: int) -> None:
    by_function: dict[Function, list[ast.Call]] = {}
    for call in backward_calls(source.tree):
        function = source.function(call)
        if function is not None:
            by_function.setdefault(function, []).append(call)
    for function, calls in by_function.items():
        pending: list[ast.Call] = []  # losses whose graph the next one shares: both go back together
        for call, following in zip(calls, [*calls[1:], None], strict=True):
            joined = following is not None and _same_step(source, call, following)
            keeps = any(each.arg == "retain_graph" and ast.unparse(each.value) == "True" for each in call.keywords)
            if keeps and joined and following is not None and _siblings(source, call, following):
                pending.append(call)
                source.remove(source.statement(call))
                continue
            if keeps and not pending and not joined:
                source.mark(call, "retain_graph has no counterpart: session.backward frees the graph of its loss")
            _backward_pass(source, site, function, call, pending, joined=joined, turns=turns)
            pending = []


def _backward_pass(
    source: SourceText,
    site: TrainingSite,
    function: Function,
    call: ast.Call,
    pending: list[ast.Call],
    *,
    joined: bool,
    turns: int,
) -> None:
    assert isinstance(call.func, ast.Attribute)
    loss = call.func.value
    gradient = [each for each in call.args if not (isinstance(each, ast.Constant) and each.value is None)]
    if gradient or any(each.arg in ("gradient", "inputs") for each in call.keywords):
        source.mark(call, "session.backward takes the loss alone: multiply it by the gradient given here")
    options = ""
    if turns > 1 and (model := _model_of(source, site, function, call)):
        options += f", {model}"
    if is_sum(source, loss, function):
        options += ', reduction="sum"'
    elif count := unequal_count(source, loss, function):
        options += f", count={count}"
    if joined:
        options += ", more=True"
    elif inner := _inner_range(source, site, call):
        options += f", more={inner}"
    start, end = source.start(loss), source.end(loss)
    if source.bytes[end : source.end(call)].lstrip()[:1] == b")":  # (a + b).backward()
        opened, end = source.bytes.rindex(b"(", 0, start), source.bytes.index(b")", end) + 1
        source.cut(opened, start)
        source.insert(opened, "session.backward(")
        source.cut(source.end(loss), end)
    else:
        source.insert(start, "session.backward(")
    others = "".join(f"{source.text_of(p.func.value)} + " for p in pending if isinstance(p.func, ast.Attribute))
    source.insert(start, others)
    source.cut(end, source.end(call))
    source.insert(source.end(call), f"{options})")


def _same_step(source: SourceText, call: ast.Call, following: ast.Call) -> bool:
    """Whether the gradient of ``following`` is added to that of ``call``: no step between, and no other branch."""
    between = [s for s in step_calls(source, source.tree) if call.lineno < s.lineno < following.lineno]
    function = source.function(call)
    if any(source.function(each) is function for each in between):
        return False
    for parent in source.parents(call):
        if isinstance(parent, ast.If):
            here = any(call in ast.walk(each) for each in parent.body)
            there = any(following in ast.walk(each) for each in parent.body)
            other = any(following in ast.walk(each) for each in parent.orelse)
            if (here and other) or (not here and there):
                return False
    return True


def _siblings(source: SourceText, call: ast.Call, following: ast.Call) -> bool:
    one, other = source.statement(call), source.statement(following)
    block = source.block(one)
    return isinstance(one, ast.Expr) and other in block


def _model_of(source: SourceText, site: TrainingSite, function: Function, call: ast.Call) -> str:
    """The model that the next optimizer step updates, as ``function`` calls it."""
    calls = [s for s in step_calls(source, function) if s.lineno >= call.lineno]
    names = [name for each in calls for name in stepped_names(source, each)]
    if not names:
        return ""
    path = next((site.path[: n + 1] for n, f in enumerate(site.path) if f.function is function), site.path)
    made = resolve(source, path, names[0])
    value = getattr(made.made, "value", None) if made is not None else None
    if made is None or value is None:
        return ""
    owners = models_of(source, value, made.function or source.tree)
    return name_here(path, owners[0]) if len(owners) == 1 else ""


def _inner_range(source: SourceText, site: TrainingSite, call: ast.Call) -> str:
    """Whether another pass of an inner loop follows: its losses belong to one step."""
    for parent in source.parents(call):
        if parent is site.loop or isinstance(parent, Function):
            return ""
        if isinstance(parent, ast.For) and isinstance(parent.target, ast.Name) and counts(parent.iter):
            assert isinstance(parent.iter, ast.Call)
            if len(parent.iter.args) == 1 and not step_calls(source, parent):
                return f"{parent.target.id} + 1 < {ast.unparse(parent.iter.args[0])}"
        if isinstance(parent, Loop):
            source.mark(call, "several losses of a step: all but the last take more=True")
            return ""
    return ""


def _clips(source: SourceText, trained: TrainedObjects) -> None:
    for call in (node for node in ast.walk(source.tree) if called(node) == "clip_grad_norm_"):
        assert isinstance(call, ast.Call)
        bound = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "max_norm")]
        other = [each for each in call.keywords if each.arg not in ("max_norm", "norm_type")]
        norm = [ast.unparse(each.value) for each in call.keywords if each.arg == "norm_type"]
        if len(trained.models) > 1 or not bound or other or norm not in ([], ["2"], ["2.0"]) or len(call.args) > 2:
            source.mark(call, "session.clip_grad_norm_ bounds the norm of all parameters, as mechanisms need it")
            continue
        source.replace(call, f"session.clip_grad_norm_({source.text_of(bound[0])})")


# --- the loop over epochs ---
def _epochs(source: SourceText, loop: Loop, site: TrainingSite) -> None:
    if isinstance(loop, ast.While):
        _epochs_of_while(source, loop, site)
        return
    node = iterated(source, loop)
    if not counts(node) or not isinstance(node, ast.Call):
        source.mark(loop, NUMBER_OF_EPOCHS)
        return
    if called(node) == "count" or len(node.args) > 2 or not node.args:
        source.mark(loop, f"{NUMBER_OF_EPOCHS}, from 0 in steps of 1")
        return
    if len(node.args) == 1:
        source.replace(node, f"session.epochs({source.text_of(node.args[0])})")
        return
    begin, end = node.args
    number, first = _difference(source, begin, end), source.text_of(begin)
    source.replace(node, f"session.epochs({number})")
    target = dotted(loop.target)
    if first != "0" and target and target != "_":
        source.lines_inside(loop, f"{target} += {first}")


def _difference(source: SourceText, begin: ast.expr, end: ast.expr) -> str:
    """``end - begin``; of ``range(1, n + 1)`` it is ``n``."""
    if ast.unparse(begin) == "0":
        return source.text_of(end)
    if isinstance(end, ast.BinOp) and isinstance(end.op, ast.Add):
        if ast.unparse(end.right) == ast.unparse(begin):
            return source.text_of(end.left)
        if ast.unparse(end.left) == ast.unparse(begin):
            return source.text_of(end.right)
    first, last = getattr(begin, "value", None), getattr(end, "value", None)
    if isinstance(first, int) and isinstance(last, int):
        return str(last - first)
    return f"{source.text_of(end)} - {source.text_of(begin)}"


def _epochs_of_while(source: SourceText, loop: ast.While, site: TrainingSite) -> None:
    """``while epoch < n:``, or ``while step < n:`` around a loop over batches."""
    test = loop.test
    name = dotted(test.left) if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Lt, ast.LtE)) else ""
    if not name or not isinstance(test, ast.Compare):
        source.mark(loop, f"{NUMBER_OF_EPOCHS}: write 'for epoch in range(...)'")
        return
    limit = ast.unparse(test.comparators[0]) + (" + 1" if isinstance(test.ops[0], ast.LtE) else "")
    counted = [n for n in ast.walk(loop) if isinstance(n, ast.AugAssign) and dotted(n.target) == name]
    start = source.start(loop)
    if any(each in ast.walk(site.loop) for each in counted):  # it counts batches
        assert isinstance(site.loop, ast.For)
        loader = source.text_of(iterated(source, site.loop))
        source.cut(start, source.end(test))
        limit = limit if limit.replace(".", "").isidentifier() or limit.isdigit() else f"({limit})"
        source.insert(start, f"for _ in session.epochs(-(-{limit} // len({loader})))")
        return
    source.cut(start, source.end(test))
    source.insert(start, f"for {name} in session.epochs({limit})")
    if loop.body[-1] in counted:
        source.remove(loop.body[-1])


# --- files ---
def _saves(source: SourceText) -> None:
    """One worker writes a file."""
    for call in ast.walk(source.tree):
        if dotted(getattr(call, "func", call)) != "torch.save" or not isinstance(call, ast.Call):
            continue
        statement, function = source.statement(call), source.function(call)
        if function is None or not isinstance(statement, ast.Expr) or statement.value is not call:
            continue
        parent = next(source.parents(statement))
        if (
            isinstance(parent, ast.If)
            and len(parent.body) == 1
            and not parent.orelse
            and "ends_step" not in ast.unparse(parent)
        ):
            either = isinstance(parent.test, (ast.BoolOp, ast.IfExp))
            source.wrap(parent.test, "session.leader and (" if either else "session.leader and ", ")" if either else "")
            continue
        source.lines_before(statement, "if session.leader:")
        source.shift(statement.lineno, statement.end_lineno or statement.lineno, 4)
