"""Lines of a program that may make its runs differ, by their syntax: candidates for a difference that was seen."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_SCHEDULERS = {"ReduceLROnPlateau", "LambdaLR", "SequentialLR"}
_SPLITS = ("random_split", "train_test_split", "randperm", "permutation", "shuffle")
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_everything", "set_seed")


def schedulers(text: str) -> list[int]:
    """The lines that make a learning-rate scheduler."""
    return [call.lineno for call in _calls(text) if (name := _last(call)).endswith("LR") or name in _SCHEDULERS]


def splits(text: str) -> list[int]:
    """The lines that divide or shuffle data at random."""
    return [call.lineno for call in _calls(text) if _last(call) in _SPLITS]


def seeds(text: str) -> list[int]:
    """The lines that seed a random stream."""
    return [call.lineno for call in _calls(text) if _last(call) in _SEEDS]


def distributed_samplers(text: str) -> list[int]:
    """The lines that make a ``DistributedSampler``, which pads the data of an evaluation."""
    return [call.lineno for call in _calls(text) if _last(call) == "DistributedSampler"]


def counters(text: str) -> list[int]:
    """The lines in loops that change a name by its own value, or under a comparison: counters and best-so-far."""
    lines: set[int] = set()
    for loop in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.For | ast.While)):
        for node in ast.walk(loop):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name | ast.Attribute):
                lines.add(node.lineno)
            elif isinstance(node, ast.If) and any(isinstance(each, ast.Compare) for each in ast.walk(node.test)):
                tested = {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}
                lines |= {each.lineno for each in node.body if isinstance(each, ast.Assign) and tested & _stored(each)}
    return sorted(lines)


def _stored(statement: ast.Assign) -> set[str]:
    return {each.id for target in statement.targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _calls(text: str) -> Iterator[ast.Call]:
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return iter(sorted(calls, key=lambda call: call.lineno))


def _last(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]
