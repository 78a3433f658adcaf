"""Gives a script's models and optimizers to ``session.prepare``, behind the line that makes the last of them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from elastune.cli.convert.source_text import Function, SourceText, bound_names, called, dotted, local_names, parameters
from elastune.cli.convert.training_path import (
    ENTRY,
    Frame,
    NamedObject,
    backward_calls,
    is_optimizer,
    models_of,
    names_in,
    path_to,
    resolve,
    step_calls,
    stepped_names,
)
from elastune.core.errors import UserError


@dataclass(frozen=True)
class TrainedObjects:
    """What a script trains, by the names at the place where ``session.prepare`` stands.

    Attributes:
        models: The models, in the order of their optimizers.
        optimizers: The optimizers.
        owners: For each optimizer, as the batch loop calls it, its models as the batch loop calls them.
    """

    models: tuple[str, ...]
    optimizers: tuple[str, ...]


def prepared(text: str, name: str) -> tuple[str, TrainedObjects]:
    """Put ``session.prepare`` behind the optimizers of ``text``.

    Returns:
        The text, and what it prepares.

    Raises:
        UserError: No optimizer of a model is seen.
    """
    source = SourceText(text, name)
    path = _path(source, name)
    optimizers = _optimizers(source, path)
    models = _models(source, path, optimizers)
    if not optimizers or not models:
        rule = "an optimizer of the model's parameters() must be seen"
        missing = "no model" if optimizers else "no optimizer that steps"
        raise UserError(rule, f"{missing} in {name}", "change the lines by hand")
    trained = TrainedObjects(tuple(models), tuple(each.name for each in optimizers))
    names = ", ".join([*trained.models, *trained.optimizers])
    lines = [f"{names} = session.prepare({names})"]
    last = max(optimizers, key=lambda each: (each.function is not None, each.made.lineno))
    if last.function is None:
        entry = next(each for each in source.tree.body if isinstance(each, Function) and each.name == ENTRY)
        plain = sorted({each for each in [*trained.models, *trained.optimizers] if "." not in each})
        declared = [each for each in ast.walk(entry) if isinstance(each, ast.Global)]
        if declared:
            source.lines_after(declared[0], *lines)
            missing_names = [each for each in plain if each not in declared[0].names]
            if missing_names:
                source.insert(source.end(declared[0]), f", {', '.join(missing_names)}")
        else:
            source.lines_inside(entry, f"global {', '.join(plain)}", *lines)
        return source.edited(), trained
    place = _behind_models(source, last, trained.models)
    while last.function is not None and place not in last.function.body:
        parent = next(each for each in source.parents(place) if isinstance(each, ast.stmt))
        if parent is last.function:
            break
        place = parent
    scalers = _scalers(source, place)
    later = [each for each in scalers if each.lineno > place.lineno]
    for each in scalers:
        target = dotted(each.targets[0])
        if each in later:
            source.wrap(each.value, f'session.track("{target.rpartition(".")[2]}", ', ")")
        else:
            lines.append(f'session.track("{target.rpartition(".")[2]}", {target})')
    source.lines_after(place, *lines)
    return source.edited(), trained


def _behind_models(source: SourceText, last: NamedObject, models: tuple[str, ...]) -> ast.stmt:
    """The statement of the last optimizer, or that of a model in the same function behind it."""
    made = [
        node
        for node in ast.walk(last.function or source.tree)
        if isinstance(node, ast.Assign)
        and dotted(node.targets[0]) in models
        and dotted(node.targets[0]).startswith("self.")
    ]
    return max([last.made, *made], key=lambda each: each.lineno)


def _path(source: SourceText, name: str) -> list[Frame]:
    for call in backward_calls(source.tree):
        home = source.function(call)
        path = path_to(source, home) if home is not None else []
        if path:
            return path
    raise UserError(
        "train must come to loss.backward()", f"no call leads there in {name}", "give the file that starts the training"
    )


def _optimizers(source: SourceText, path: list[Frame]) -> list[NamedObject]:
    """The optimizers that functions on the path step, where they are made; the first that is made comes first."""
    found: dict[str, NamedObject] = {}
    for number in range(len(path) - 1, -1, -1):
        for stepped in stepped_names(source, path[number].function):
            made = resolve(source, path[: number + 1], stepped)
            if made is not None:
                found.setdefault(made.name, made)
    for helper in _helpers(source, path):
        for stepped in stepped_names(source, helper[-1].function):
            made = resolve(source, helper, stepped)
            if made is not None:
                found.setdefault(made.name, made)
    return sorted(found.values(), key=lambda each: each.made.lineno)


def _helpers(source: SourceText, path: list[Frame]) -> list[list[Frame]]:
    """The paths to other functions that step."""
    known = {frame.function for frame in path}
    homes = {home for call in step_calls(source, source.tree) if (home := source.function(call)) is not None}
    paths = [path_to(source, home) for home in sorted(homes - known, key=lambda each: each.lineno)]
    return [each for each in paths if each]


def _models(source: SourceText, path: list[Frame], optimizers: list[NamedObject]) -> list[str]:
    names: list[str] = []
    for each in optimizers:
        home = each.function or source.tree
        value = getattr(each.made, "value", None)
        assert value is not None
        owners = models_of(source, value, home)
        if "self" in owners:
            rule = "a model and its optimizer are made outside of the model's class"
            fix = "make the optimizer where the model is made"
            raise UserError(rule, f"self.parameters() at {source.name}:{each.made.lineno}", fix)
        roots = list(dict.fromkeys(_root(owner, home, source) for owner in owners))
        if not roots:
            roots = _passed_models(source, each, value)
        roots = [_attribute_of(home, root) for root in roots] if each.name.startswith("self.") else roots
        names += [root for root in roots if root not in names]
    return names


def _attribute_of(home: Function | ast.Module, name: str) -> str:
    """``self.model``, where a constructor keeps its argument ``name`` there; else ``name``."""
    for node in ast.walk(home):
        target = dotted(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if not isinstance(node, ast.Assign) or not target.startswith("self.") or name not in names_in(node.value):
            continue
        if dotted(node.value) == name or called(node.value) in ("to", "cuda"):
            return target
    return name


def _root(owner: str, home: Function | ast.Module, source: SourceText) -> str:
    """The model that ``owner``, perhaps a part of it, belongs to."""
    parts = owner.split(".")
    if parts[0] == "self":
        return ".".join(parts[:2])
    is_model = parts[0] in (local_names(home) if isinstance(home, Function) else bound_names(home))
    is_model = is_model or parts[0] in bound_names(source.tree)
    several = sum(1 for each in ast.walk(home) if isinstance(each, ast.Assign) and is_optimizer(each.value))
    return parts[0] if is_model and several < 2 else owner


def _passed_models(source: SourceText, optimizer: NamedObject, value: ast.expr) -> list[str]:
    """The models of an optimizer that a function makes: its argument, or what it returns beside the optimizer."""
    targets = optimizer.made.targets[0] if isinstance(optimizer.made, ast.Assign) else None
    if isinstance(targets, ast.Tuple):
        names = [dotted(each) for each in targets.elts]
        likely = [each for each in names if each != optimizer.name and _is_called_or_trained(source, each)]
        if likely:
            return likely
    if optimizer.name.startswith("self.") and isinstance(value, ast.Name) and optimizer.function is not None:
        return _given_models(source, optimizer.function)
    given = [dotted(each) for each in ast.walk(value) if isinstance(each, (ast.Name, ast.Attribute))]
    return [each for each in dict.fromkeys(given) if each and _is_called_or_trained(source, each)][:1]


def _given_models(source: SourceText, constructor: Function) -> list[str]:
    """The attributes that a constructor makes of its arguments and that the class calls, without losses."""
    owner = source.owner(constructor)
    calls = {dotted(node.func) for node in ast.walk(owner or constructor) if isinstance(node, ast.Call)}
    names: list[str] = []
    for node in ast.walk(constructor):
        if isinstance(node, ast.Assign) and (name := dotted(node.targets[0])) in calls and name.startswith("self."):
            given = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
            is_loss = any(part in name.lower() for part in ("loss", "crit", "metric", "device", "fn"))
            if given & set(parameters(constructor)) and not is_loss:
                names.append(name)
    return names


def _is_called_or_trained(source: SourceText, name: str) -> bool:
    last = name.rpartition(".")[2]
    uses = (each for each in ast.walk(source.tree) if isinstance(each, ast.Attribute) and dotted(each.value) == name)
    of_models = ("train", "eval", "state_dict", "to", "parameters")
    return last in ("model", "net", "network") or any(each.attr in of_models for each in uses)


def _scalers(source: SourceText, place: ast.stmt) -> list[ast.Assign]:
    """The statements of the same function that make a gradient scaler."""
    home = source.function(place)
    return [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign)
        and called(node.value) == "GradScaler"
        and isinstance(node.value, ast.Call)
        and source.function(node) is home
    ]
