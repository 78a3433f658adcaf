"""Takes out of a script what starts processes, or joins them: elastune does both."""

from __future__ import annotations

import ast

from elastune.cli.convert.source_text import SourceText, called, dotted

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
