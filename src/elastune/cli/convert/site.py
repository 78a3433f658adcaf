"""The loops of a training that the rewriting changes: the one over epochs, and the one that takes a step each time."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from elastune.cli.convert.source_text import Function, Loop, SourceText, bound_names, called, dotted, parameters
from elastune.cli.convert.training_path import (
    EnclosingLoop,
    Frame,
    backward_calls,
    functions_that_train,
    is_over_data,
    iterated,
    loops_around,
    path_to,
    step_calls,
)
from elastune.core.errors import UserError


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
