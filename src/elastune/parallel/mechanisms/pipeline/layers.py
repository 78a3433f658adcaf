"""A model as a row of layers that a pipeline may be cut between, found by tracing its forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from elastune.core.errors import UserError

Values = dict[str, Any]
"""Values between layers, by the name of the node that made them."""


@dataclass(frozen=True)
class Layers:
    """A model's forward pass as the nodes of a traced graph, grouped in layers.

    A pipeline may cut the model between two layers. ``layers_of`` makes this object.

    Attributes:
        module: The model. Nodes look up parameters and submodules in it when they run.
        nodes: The nodes in order, from the inputs on, without the node that returns.
        starts: For each layer the place of its first node. Layer 0 begins with the inputs.
        result: The model's result, as a structure of nodes and plain values.
        inputs: The names of the inputs.
    """

    module: nn.Module
    nodes: tuple[fx.Node, ...]
    starts: tuple[int, ...]
    result: Any
    inputs: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.starts)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """For each layer but the first, the name in ``named_modules`` of the module that it begins with."""
        return tuple(str(self.nodes[start].target) for start in self.starts[1:])

    def without_cuts(self, names: frozenset[str]) -> Layers:
        """The same layers, joined so that no layer begins at one of the modules ``names``."""
        starts = tuple(at for at in self.starts if at == 0 or str(self.nodes[at].target) not in names)
        return replace(self, starts=starts)

    def nodes_of(self, layers: range) -> tuple[fx.Node, ...]:
        """The nodes of a run of layers."""
        stop = self.starts[layers.stop] if layers.stop < self.count else len(self.nodes)
        return self.nodes[self.starts[layers.start] : stop]

    def parameters_of(self, layers: range) -> list[nn.Parameter]:
        """The parameters that a run of layers uses, each once."""
        parameters: dict[int, nn.Parameter] = {}
        for node in self.nodes_of(layers):
            for used in (node, *node.all_input_nodes):
                value = _looked_up(self.module, used) if used.op in ("get_attr", "call_module") else None
                candidates = value.parameters() if isinstance(value, nn.Module) and used is node else [value]
                parameters |= {id(p): p for p in candidates if isinstance(p, nn.Parameter)}
        return list(parameters.values())

    def modules_of(self, layers: range) -> list[nn.Module]:
        """The modules that a run of layers calls, each once."""
        called = (_looked_up(self.module, node) for node in self.nodes_of(layers) if node.op == "call_module")
        return list({id(module): module for module in called}.values())

    def handed_on(self, layer: int) -> tuple[str, ...]:
        """The values from earlier layers that ``layer`` and later ones use: they travel if the model is cut there."""
        if layer in (0, self.count):
            return ()
        first = self.starts[layer]
        used = {node.name for later in self.nodes[first:] for node in later.all_input_nodes}
        fx.map_arg(self.result, lambda node: used.add(node.name))
        return tuple(node.name for node in self.nodes[:first] if node.name in used and node.op != "get_attr")

    def run(self, layers: range, values: Values, keep: Sequence[str] = ()) -> Any:
        """Run a run of layers.

        Args:
            layers: The numbers of the layers.
            values: The values from earlier layers, or the model's inputs. Values are removed after their last use.
            keep: The names of the values to hand on.

        Returns:
            The model's result if the run contains the last layer, else the values named by ``keep``.
        """
        nodes, ends = self.nodes_of(layers), layers.stop == self.count
        left = _uses(nodes, keep, self.result if ends else None)
        for node in nodes:
            if node.op not in ("placeholder", "get_attr"):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: self._value(used, values))
                values[node.name] = self._call(node, args, kwargs)
                del args, kwargs
                for used in (*node.all_input_nodes, node):
                    left[used.name] = left.get(used.name, 0) - (used is not node)
                    if left[used.name] <= 0:
                        values.pop(used.name, None)
        if ends:
            return fx.map_arg(self.result, lambda used: self._value(used, values))
        return [values[name] for name in keep]

    def probe(self, inputs: Sequence[Any], around: Callable[[int], AbstractContextManager[Any]]) -> Any:
        """Return the model's result of a forward pass without side effects. ``around``: a context for each layer."""
        buffers = [(b, b.detach().clone()) for b in self.module.buffers()]
        passed_on: Any = inputs
        with torch.no_grad(), torch.random.fork_rng():
            for layer in range(self.count):
                names = self.handed_on(layer) or self.inputs
                with around(layer):
                    values = dict(zip(names, passed_on, strict=True))
                    passed_on = self.run(range(layer, layer + 1), values, self.handed_on(layer + 1))
            for buffer, before in buffers:
                buffer.copy_(before)
        return passed_on

    def _value(self, node: fx.Node, values: Values) -> Any:
        return _looked_up(self.module, node) if node.op == "get_attr" else values[node.name]

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_module":
            return _looked_up(self.module, node)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _uses(nodes: Sequence[fx.Node], keep: Sequence[str], result: Any) -> dict[str, int]:
    """For each value, the number of its later uses."""
    left: dict[str, int] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            left[used.name] = left.get(used.name, 0) + 1
    for name in keep:
        left[name] = left.get(name, 0) + 1
    fx.map_arg(result, lambda node: left.__setitem__(node.name, left.get(node.name, 0) + 1))
    return left


def _looked_up(module: nn.Module, node: fx.Node) -> Any:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


class _Tracer(fx.Tracer):
    """Traces into the modules named by ``opened`` and no others. Inputs with a default keep it."""

    def __init__(self, opened: frozenset[str]) -> None:
        super().__init__()
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in required_inputs(self.root)]
        return root_fn, [self.root, *inputs]


def required_inputs(module: nn.Module) -> list[str]:
    """The names of the inputs of ``module.forward`` that have no default.

    Raises:
        UserError: Where ``forward`` takes any number of inputs.
    """
    names = []
    for name, parameter in list(inspect.signature(type(module).forward).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            rule = "a model in a pipeline has a fixed number of inputs"
            raise UserError(rule, f"*{name} of {type(module).__name__}.forward", "name its inputs")
        if parameter.default is parameter.empty:
            names.append(name)
    return names


def layers_of(module: nn.Module, cuts: Sequence[str] = ()) -> Layers:
    """The layers of ``module``.

    Args:
        module: A model whose forward pass torch.fx can follow down to its layers, such as an ``nn.Sequential``.
        cuts: Names of modules before which the model may be cut; empty: before every module that is called.

    Raises:
        UserError: Where torch.fx cannot follow the forward pass, or where the model calls no module of a given name.
    """
    opened = _followable(module, _opened(module, cuts))
    try:
        nodes, result = _traced(module, opened)
    except Exception as error:  # noqa: BLE001 - the user's forward pass may raise anything on a proxy
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        fix = "let forward call layers one after another, without branches on values or shapes; or use nn.Sequential"
        raise UserError("torch.fx must be able to follow a model in a pipeline", reason, fix) from None
    places = [i for i, node in enumerate(nodes) if node.op == "call_module"]
    if cuts:
        first = {str(nodes[i].target): i for i in reversed(places)}
        unknown = [cut for cut in cuts if cut not in first]
        if unknown:
            examples = ", ".join(list(first)[:-9:-1])
            raise UserError("a pipeline is cut before modules that the model calls", unknown[0], f"such as {examples}")
        starts = sorted({0, *(first[cut] for cut in cuts)})
    else:
        starts = [0, *places[1:]]
    inputs = tuple(node.name for node in nodes if node.op == "placeholder")
    return Layers(module, tuple(nodes), tuple(starts), result, inputs)


def _traced(module: nn.Module, opened: frozenset[str]) -> tuple[list[fx.Node], Any]:
    """The nodes and the result. Training and evaluation must give the same graph, because only one is kept."""
    graphs = []
    modes = [(part, part.training) for part in module.modules()]
    try:
        for training in (False, True):
            module.train(training)
            graphs.append(_Tracer(opened).trace(module))
    finally:
        for part, mode in modes:
            part.training = mode
    if len({_signature(graph) for graph in graphs}) > 1:
        raise ValueError("forward does other things in training than in evaluation: put them into modules")
    *nodes, last = graphs[0].nodes
    # Inputs stand first, wherever tracing has put them: no cut may separate an input from its use.
    nodes.sort(key=lambda node: node.op != "placeholder")
    return nodes, last.args[0]


def _signature(graph: fx.Graph) -> str:
    return "\n".join(f"{node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes)


def _opened(module: nn.Module, cuts: Sequence[str]) -> frozenset[str]:
    """The names of modules with a container of layers or a cut inside, which tracing should enter if possible."""
    rows = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    names = {".".join(cut.split(".")[:i]) for cut in cuts for i in range(1, cut.count(".") + 1)}
    for name, part in module.named_modules():
        if name and (isinstance(part, nn.Sequential) or any(isinstance(inner, rows) for inner in part.children())):
            names.add(name)
    return frozenset(name for name in names if _has_forward(module, name))


def _has_forward(module: nn.Module, name: str) -> bool:
    """Whether the module ``name`` can be called (a list of modules cannot)."""
    part = dict(module.named_modules()).get(name)
    return part is not None and not isinstance(part, (nn.ModuleList, nn.ModuleDict))


def _followable(module: nn.Module, names: frozenset[str]) -> frozenset[str]:
    """The modules of ``names`` that torch.fx can follow. Each of the others is one layer as a whole."""
    followable: set[str] = set()
    for name in sorted(names, key=lambda name: -name.count(".")):
        within = {inner for inner in followable if inner.startswith(f"{name}.")}
        try:
            _Tracer(frozenset(inner[len(name) + 1 :] for inner in within)).trace(module.get_submodule(name))
            followable.add(name)
        except Exception:  # noqa: BLE001 - the module is then one layer
            followable -= within
    return frozenset(followable)
