"""The part of a model that its workers compute together, where each runs the rest on samples of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.mechanisms.in_place import refuse_pickling
from elastune.mechanisms.tensor.layers import Way

Run = Callable[[torch.Tensor], Any]


class Through(Protocol):
    """Takes one worker's ``inputs`` through what ``run`` does, together with those of the others."""

    def __call__(self, run: Run, inputs: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Tail:
    """Where it is: the call of ``module``, or its children number ``first`` to ``stop`` (exclusive).

    ``parts``: the modules that are in it.
    """

    module: nn.Module
    first: int | None = None
    stop: int = 0

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The modules in it."""
        return [self.module] if self.first is None else list(self.module.children())[self.first : self.stop]

    def hand_over(self, through: Through) -> Run:
        """From here on it is computed by ``through``; what it does by itself."""
        kind = _Called if self.first is None else _InOrder
        own = type(self.module)
        name = f"{own.__name__}Together"
        self.module.__class__ = type(name, (kind, own), {"__doc__": own.__doc__, "__module__": own.__module__})
        self.module.__dict__["_tail"] = self.first, self.stop
        self.module.__dict__["_through"] = through
        return partial(own.forward, self.module) if self.first is None else partial(_in_order, self.parts)


class _HandedOver(nn.Module):
    """What both kinds share."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        kind, own = type(self), type(self).__bases__[1]
        self.__class__ = own
        try:
            twin: nn.Module = copy.deepcopy(self, memo)
        finally:
            self.__class__ = kind
        twin.__class__ = kind
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickling()


class _Called(_HandedOver):
    """A module whose call is the tail."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own, of one tensor."""
        if len(inputs) != 1 or named:
            told = f"{len(inputs)} and {', '.join(named) or 'none'} by name"
            rule = "what holds the divided layers of a TrunkByData is called with one tensor"
            raise UserError(rule, told, "put them into a module of their own")
        return self.__dict__["_through"](super().forward, inputs[0])


class _InOrder(_HandedOver, nn.Sequential):
    """An ``nn.Sequential`` of which some children are the tail."""

    def forward(self, input: Any) -> Any:  # noqa: A002 - torch's own name
        """As torch's."""
        children, (first, stop) = list(self.children()), self.__dict__["_tail"]
        found = self.__dict__["_through"](partial(_in_order, children[first:stop]), _in_order(children[:first], input))
        return _in_order(children[stop:], found)


def _in_order(children: Sequence[nn.Module], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value


def tail_of(model: nn.Module, ways: Mapping[str, Way]) -> Tail:
    """The smallest part of ``model`` with all layers of ``ways``.

    Raises:
        UserError: Where that is the model itself, whose lines nobody can cut; where it shares parameters with the rest.
    """
    paths = [name.split(".") for name in ways]
    above: list[str] = []
    for names in zip(*(path[:-1] for path in paths), strict=False):  # as far as all go the same way
        if len(set(names)) > 1:
            break
        above.append(names[0])
    owner = model.get_submodule(".".join(above))
    inside = {path[len(above)] for path in paths}
    child = owner.get_submodule(next(iter(inside)))
    if type(owner).forward is nn.Sequential.forward:
        places = [place for place, (name, _) in enumerate(owner.named_children()) if name in inside]
        found = Tail(owner, places[0], places[-1] + 1)
    elif len(inside) == 1 and _is_called(child):
        found = Tail(child)
    elif (called := _first_called(model, above)) is not None:
        found = Tail(called)
    else:
        rule = "the divided layers of a TrunkByData are in one module, or follow each other in one nn.Sequential"
        fix = f"put them into an nn.Sequential of {type(model).__name__}"
        raise UserError(rule, ", ".join(ways), fix)
    own = {id(part) for part in found.parts}
    tops = tuple(f"{name}." for name, part in model.named_modules(remove_duplicate=False) if id(part) in own)
    named = list(model.named_parameters(remove_duplicate=False))
    inside_of = {id(p) for name, p in named if name.startswith(tops)}
    for name, p in named:
        if id(p) in inside_of and not name.startswith(tops):
            rule = "the divided layers of a TrunkByData share no parameter with the rest"
            raise UserError(rule, name, "use the plan without TrunkByData")
    return found


def _is_called(module: nn.Module) -> bool:
    """Whether it has a ``forward``; a ``ModuleList`` has none."""
    return type(module).forward is not nn.Module.forward


def _first_called(model: nn.Module, path: Sequence[str]) -> nn.Module | None:
    """The module at ``path``, or the next one above it that is called; None where only the model itself is."""
    for length in range(len(path), 0, -1):
        if _is_called(module := model.get_submodule(".".join(path[:length]))):
            return module
    return None
