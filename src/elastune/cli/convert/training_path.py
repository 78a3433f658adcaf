"""Where a script trains: the calls that lead to ``.backward()``, the loops around it, and the objects that it steps.

A *path* leads from the function that starts the training to the one that holds the backward pass. Names of objects
are followed along it, from a parameter to the argument of the call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from elastune.cli.convert.source_text import (
    Function,
    Loop,
    SourceText,
    bound_names,
    called,
    dotted,
    local_names,
    parameters,
)
from elastune.core.errors import UserError

ENTRY = "train"
OPTIMIZERS = {
    *("SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adadelta", "Adagrad", "Adafactor"),
    *("RMSprop", "Rprop", "LBFGS", "Lion", "Muon"),
}
_COUNTING = {"range", "trange", "count"}
_THROUGH = {"enumerate", "tqdm", "trange", "track", "progress_bar", "iter", "islice", "auto", "notebook"}


@dataclass(frozen=True)
class Frame:
    """A function on the path, and its call.

    Attributes:
        function: The function.
        call: The call of the function in the frame before; None in the first frame.
    """

    function: Function
    call: ast.Call | None = None


@dataclass(frozen=True)
class EnclosingLoop:
    """A loop around the backward pass.

    Attributes:
        loop: The loop.
        frame: Its frame's number on the path.
    """

    loop: Loop
    frame: int


@dataclass(frozen=True)
class NamedObject:
    """A model or an optimizer, where it is made.

    Attributes:
        name: Its name there: ``model``, ``self.model``.
        function: The function that makes it; None: the top of the file.
        made: The statement that gives it its value.
    """

    name: str
    function: Function | None
    made: ast.stmt


def backward_calls(tree: ast.AST) -> list[ast.Call]:
    """The calls of ``.backward()`` in ``tree``, from top to bottom; those of adapters and of layers are left out."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    ]
    return sorted((c for c in calls if _is_of_loss(c)), key=lambda call: (call.lineno, call.col_offset))


def _is_of_loss(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    return dotted(call.func.value) not in ("accelerator", "fabric", "self.accelerator", "self.fabric", "super")


def functions_that_train(source: SourceText) -> set[str]:
    """The names of functions and methods that come to a ``.backward()``, directly or by others of the file."""
    functions = [node for node in ast.walk(source.tree) if isinstance(node, Function)]
    names = {
        each.name for call in backward_calls(source.tree) for each in source.parents(call) if isinstance(each, Function)
    }
    classes = _constructors(source.tree)
    while True:
        more = {
            function.name
            for function in functions
            if any(called(node) in names or classes.get(called(node)) in names for node in ast.walk(function))
        }
        if more <= names:
            return names
        names |= more


def _constructors(tree: ast.Module) -> dict[str, str]:
    """Classes whose constructor is a method of the file: a call of the class calls it."""
    return {
        node.name: "__init__"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(isinstance(f, Function) and f.name == "__init__" for f in node.body)
    }


def path_to(source: SourceText, function: Function) -> list[Frame]:
    """The frames from the function ``train`` to ``function``; empty where no call leads to it."""
    frames: list[Frame] = []
    seen: set[Function] = set()
    while function.name != ENTRY or source.owner(function) is not None:
        if function in seen:
            return []
        seen.add(function)
        calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and _calls(node, function)]
        reached = [(source.function(call), call) for call in calls]
        outer = [(home, call) for home, call in reached if home is not None and home is not function]
        if not outer:
            return []
        in_loop = [each for each in outer if any(isinstance(p, Loop) for p in source.parents(each[1]))]
        home, call = (in_loop or outer)[0]
        assert home is not None
        frames.append(Frame(function, call))
        function = home
    frames.append(Frame(function))
    return frames[::-1]


def _calls(call: ast.Call, function: Function) -> bool:
    if called(call) == function.name:
        return True
    passed = [*call.args, *(each.value for each in call.keywords)]  # a step function that is given to a loop
    return any(isinstance(each, ast.Name) and each.id == function.name for each in passed)


def loops_around(source: SourceText, path: list[Frame], inner: ast.AST) -> list[EnclosingLoop]:
    """The loops around ``inner``, which is in the last frame of ``path``; the outermost comes first."""
    loops: list[EnclosingLoop] = []
    for number, frame in enumerate(path):
        node: ast.AST | None = path[number + 1].call if number + 1 < len(path) else inner
        assert node is not None
        inside = []
        for each in source.parents(node):
            if each is frame.function:
                break
            if isinstance(each, Loop):
                inside.append(EnclosingLoop(each, number))
        loops += inside[::-1]
    return loops


# --- what a loop is over ---
def iterated(source: SourceText, loop: ast.For) -> ast.expr:
    """What ``loop`` is over, without ``enumerate``, ``tqdm`` and names between: a loader, a ``range(...)``."""
    return list(layers(source, loop))[-1]


def layers(source: SourceText, loop: ast.For) -> Iterator[ast.expr]:
    """What ``loop`` is over, and what lies below each wrapper of it, up to the loader."""
    node: ast.expr = loop.iter
    for _ in range(8):
        yield node
        if isinstance(node, ast.Call) and node.args and _passes_through(node):
            node = node.args[0]
        elif isinstance(node, ast.Name) and (value := _assigned(source, node, loop)) is not None:
            node = value
        else:
            return


def _passes_through(call: ast.Call) -> bool:
    """Whether ``call`` gives the elements of its first argument."""
    if called(call) == "zip":
        return not counts(call.args[0])
    return called(call) in _THROUGH and called(call) != "trange"


def _assigned(source: SourceText, name: ast.Name, loop: ast.For) -> ast.expr | None:
    """The value of a name that stands for a progress bar, an iterator or a range."""
    home = source.function(loop) or source.tree
    values = [
        node.value
        for node in ast.walk(home)
        if isinstance(node, ast.Assign) and [dotted(each) for each in node.targets] == [name.id]
    ]
    through = [each for each in values if called(each) in _THROUGH | _COUNTING]
    return through[0] if len(values) == 1 and through else None


def counts(node: ast.expr) -> bool:
    """Whether ``node`` is ``range(...)`` or the like: numbers, and no data."""
    return called(node) in _COUNTING


def is_over_data(source: SourceText, loop: Loop) -> bool:
    """Whether ``loop`` is over batches, as far as its text shows."""
    if not isinstance(loop, ast.For):
        return False
    node = iterated(source, loop)
    return not counts(node) and not isinstance(node, (ast.List, ast.Tuple, ast.Constant, ast.Dict, ast.Set))


# --- the objects that are trained ---
def step_calls(source: SourceText, inside: ast.AST) -> list[ast.Call]:
    """The calls of ``optimizer.step()`` in ``inside``: those with a closure, too, and of a gradient scaler."""
    calls = [node for node in ast.walk(inside) if called(node) == "step" and isinstance(node, ast.Call)]
    return sorted((c for c in calls if isinstance(c.func, ast.Attribute)), key=lambda call: call.lineno)


def stepped_names(source: SourceText, inside: ast.AST) -> list[str]:
    """The names of what ``inside`` steps, without schedulers as far as their names tell."""
    names: list[str] = []
    for call in step_calls(source, inside):
        assert isinstance(call.func, ast.Attribute)
        name = dotted(call.func.value)
        if "scaler" in name and call.args:
            name = dotted(call.args[0])
        if name and not _is_scheduler(source, name) and name not in names:
            names.append(name)
    return names


def _is_scheduler(source: SourceText, name: str) -> bool:
    values = [each.value for each in ast.walk(source.tree) if isinstance(each, ast.Assign) and name in _targets(each)]
    if any(is_optimizer(value) for value in values):
        return False
    made = [ast.unparse(each.func) for each in values if isinstance(each, ast.Call)]
    if any("sched" in each.lower() or each.endswith(("LR", "Plateau", "WarmRestarts")) for each in made):
        return True
    return any(part in name.lower() for part in ("sched", "env", "prof", "warmup", "logger", "ema"))


def is_optimizer(value: ast.AST) -> bool:
    """Whether ``value`` makes an optimizer: one of torch, or a call with ``parameters()`` of a model."""
    for call in ast.walk(value):
        if called(call) in OPTIMIZERS and isinstance(call, ast.Call):
            return True
    if not isinstance(value, ast.Call):
        return False
    maker = ast.unparse(value.func).lower()
    return "optim" in maker and "sched" not in maker and not called(value).endswith("LR")


def _targets(node: ast.Assign) -> list[str]:
    return [dotted(each) for target in node.targets for each in _elements(target)]


def _elements(target: ast.expr) -> list[ast.expr]:
    return [e for each in target.elts for e in _elements(each)] if isinstance(target, ast.Tuple) else [target]


def resolve(source: SourceText, path: list[Frame], name: str) -> NamedObject | None:
    """Where the object gets its value that the last function of ``path`` knows as ``name``."""
    number = len(path) - 1
    while number >= 0:
        frame = path[number]
        first, _, rest = name.partition(".")
        if first == "self" and rest:
            return _of_class(source, frame.function, name)
        if not rest and (made := _assignment(source, frame.function, name)) is not None:
            return NamedObject(name, frame.function, made)
        if first in parameters(frame.function) and frame.call is not None:
            given = _argument(source, frame, first)
            if given is None:
                return None
            name = f"{given}.{rest}" if rest else given
            number -= 1
            continue
        if first in local_names(frame.function):
            return None
        outer = source.function(frame.function)
        if outer is not None and not rest and (made := _assignment(source, outer, name)) is not None:
            return NamedObject(name, outer, made)
        declares_it = _assignment(source, path[0].function, name) if not rest else None
        if declares_it is not None:
            return NamedObject(name, path[0].function, declares_it)
        made = _assignment(source, source.tree, name)
        return None if made is None else NamedObject(name, None, made)
    return None


def _of_class(source: SourceText, function: Function, name: str) -> NamedObject | None:
    owner = source.owner(function) or next((p for p in source.parents(function) if isinstance(p, ast.ClassDef)), None)
    for method in owner.body if owner is not None else ():
        if isinstance(method, Function) and (made := _assignment(source, method, name)) is not None:
            return NamedObject(name, method, made)
    return None


def _assignment(source: SourceText, home: Function | ast.Module, name: str) -> ast.stmt | None:
    """The first statement of ``home`` that gives ``name`` a value that is not None."""
    assignments: list[ast.stmt] = []
    for node in ast.walk(home):
        inside = source.function(node) if isinstance(node, ast.stmt) else None
        if isinstance(node, ast.stmt) and inside is not (None if isinstance(home, ast.Module) else home):
            continue
        if isinstance(node, ast.AnnAssign):
            assigns = dotted(node.target) == name and node.value is not None
        else:
            assigns = isinstance(node, ast.Assign) and name in _targets(node) and not _is_none(node.value)
        if assigns and isinstance(node, ast.stmt):
            assignments.append(node)
    return min(assignments, key=lambda each: each.lineno, default=None)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _argument(source: SourceText, frame: Frame, parameter: str) -> str | None:
    """What the call of ``frame`` gives for ``parameter``, as a name."""
    assert frame.call is not None
    for keyword in frame.call.keywords:
        if keyword.arg == parameter:
            return dotted(keyword.value) or None
    names = parameters(frame.function)
    place = names.index(parameter) - (source.owner(frame.function) is not None)
    if not 0 <= place < len(frame.call.args):
        return None
    return dotted(frame.call.args[place]) or None


def names_in(node: ast.AST) -> set[str]:
    """Every dotted name that ``node`` reads."""
    return {name for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)) and (name := dotted(each))}


def models_of(source: SourceText, value: ast.AST, home: Function | ast.Module) -> list[str]:
    """The names of the models whose parameters the optimizer made by ``value`` gets, in their order.

    ``home``: where it is made; lists of groups that it builds before are followed.
    """
    names: list[str] = []
    texts = [value]
    for name in names_in(value):
        for node in ast.walk(home):
            if isinstance(node, ast.Assign) and name in _targets(node) and node.value is not value:
                texts.append(node.value)
    for text in texts:
        for call in sorted(
            (c for c in ast.walk(text) if isinstance(c, ast.Call)), key=lambda c: (c.lineno, c.col_offset)
        ):
            if called(call) in ("parameters", "named_parameters", "configure_optimizers") and isinstance(
                call.func, ast.Attribute
            ):
                owner = dotted(call.func.value)
                if owner and owner not in names:
                    names.append(owner)
        if names:
            break
    return names


# The loops of a training that the rewriting changes: the one over epochs, and the one that takes a step each time.


@dataclass(frozen=True)
class TrainingSite:
    """The loops around a script's backward pass.

    Attributes:
        path: The functions from ``train`` to the backward pass.
        batches: The loop whose body takes a step.
        epochs: The loop around it; None: there is none, or it is over something else.
        over_data: Whether ``batches`` is over a loader; else each step gets its data by itself.
    """

    path: list[Frame]
    batches: EnclosingLoop
    epochs: EnclosingLoop | None
    over_data: bool

    @property
    def loop(self) -> Loop:
        """The loop whose body takes a step."""
        return self.batches.loop

    @property
    def frames(self) -> list[Frame]:
        """The path up to the function of ``batches``."""
        return self.path[: self.batches.frame + 1]


def site_of(source: SourceText) -> TrainingSite:
    """Find the loops of a training.

    Raises:
        UserError: There is no loop that takes a step each time.
    """
    first: UserError | None = None
    if not step_calls(source, source.tree):
        rule = "an optimizer of torch.optim must update the weights"
        raise UserError(rule, f"no optimizer.step() in {source.name}", "use one, such as torch.optim.SGD")
    for call in backward_calls(source.tree):
        home = source.function(call)
        path = path_to(source, home) if home is not None else []
        if not path:
            continue
        loops = loops_around(source, path, call)
        stepping = [each for each in loops if _steps(source, each.loop)]
        over_data = [each for each in stepping if is_over_data(source, each.loop)]
        if not stepping:
            rule = "a loop takes an optimizer step each time"
            fix = "change the lines by hand"
            first = first or UserError(rule, f"none around {source.name}:{call.lineno}", fix)
            continue
        batches = (over_data or stepping)[-1]
        outer = [each for each in loops[: loops.index(batches)] if _is_counted(source, each.loop)]
        if not outer:  # over a list of other things than phases of one epoch
            used = {n.id for n in ast.walk(getattr(batches.loop, "iter", batches.loop)) if isinstance(n, ast.Name)}
            outer = [each for each in loops[: loops.index(batches)] if not bound_names(_target(each.loop)) & used]
        return TrainingSite(path, batches, outer[-1] if outer else None, bool(over_data))
    raise first or UserError(
        "train must come to loss.backward()",
        f"no call leads there in {source.name}",
        "give the file that starts the training",
    )


def _steps(source: SourceText, loop: Loop) -> bool:
    """Whether the body of ``loop`` steps, directly or in functions of the file."""
    if step_calls(source, loop):
        return True
    functions = {node.name: node for node in ast.walk(source.tree) if isinstance(node, Function)}
    todo, seen = [called(node) for node in ast.walk(loop)], set[str]()
    training = functions_that_train(source)
    while todo:
        name = todo.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        if name in training and step_calls(source, functions[name]):
            return True
        if step_calls(source, functions[name]) and name not in ("step", "train"):
            return True
        todo += [called(node) for node in ast.walk(functions[name])]
    return False


def _target(loop: Loop) -> ast.AST:
    return loop.target if isinstance(loop, ast.For) else loop.test


def _is_counted(source: SourceText, loop: Loop) -> bool:
    """Whether ``loop`` is over numbers of epochs, and no list of phases."""
    return isinstance(loop, ast.While) or not isinstance(iterated(source, loop), (ast.List, ast.Tuple))


def name_here(site_path: list[Frame], name: str) -> str:
    """What the last function of a path calls the object that the first ones know as ``name``."""
    for frame in site_path[1:]:
        if frame.call is None or name.startswith("self."):
            continue
        names = [each for each in parameters(frame.function) if each != "self"]
        for parameter, given in zip(names, frame.call.args, strict=False):
            if dotted(given) == name:
                name = parameter
                break
        else:
            for keyword in frame.call.keywords:
                if keyword.arg and dotted(keyword.value) == name:
                    name = keyword.arg
                    break
    return name
