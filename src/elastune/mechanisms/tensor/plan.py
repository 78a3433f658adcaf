"""Which layers are divided, and how: found from the kinds of modules, or the user's plan in torch's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import nn

from elastune.core.errors import UserError
from elastune.mechanisms.tensor.layers import Way

Plan = Mapping[str, Any]
"""As ``torch.distributed.tensor.parallel.parallelize_module`` takes it: names with wildcards, ``ColwiseParallel()`` or
``RowwiseParallel()``. Read as words: a tensor here knows how it lies, so layouts need not be named."""


@dataclass(frozen=True)
class TrunkByData:
    """A plan for ``tensor`` under which all layers but the divided ones are data parallel.

    It follows "one weird trick for parallelizing convolutional neural networks" (Krizhevsky 2014). The trunk, which
    computes much and has few parameters, is data parallel: each worker of a replica runs it on slots of its own. Before
    the layers that have most of the parameters, activations are gathered. All workers compute these layers together,
    each its blocks.

    Attributes:
        layers: The layers to divide; None: those that elastune finds. They must be in one module that is called once in
            a forward pass, or follow each other in one ``nn.Sequential``.

    Example:
        >>> plan = TrunkByData({"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
        >>> model, optimizer = session.prepare(model, optimizer, plan=plan)
    """

    layers: Plan | None = None


WORDS: Mapping[str, Way] = {"ColwiseParallel": "columns", "RowwiseParallel": "rows"}
TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
DIVIDED = (nn.Linear, nn.Conv2d, nn.Embedding, nn.MultiheadAttention, *TRANSFORMER_LAYERS)
LARGE = 1 << 16
"""Numbers in an embedding that is worth dividing unasked."""
PASSED = (
    *(
        nn.ReLU,
        nn.GELU,
        nn.SiLU,
        nn.Tanh,
        nn.Sigmoid,
        nn.LeakyReLU,
        nn.ELU,
        nn.Mish,
        nn.Softplus,
        nn.Hardtanh,
        nn.ReLU6,
    ),
    *(nn.Dropout, nn.Identity, nn.BatchNorm1d),
)
"""What acts on each feature by itself, so that two Linear layers with nothing else between them are a pair."""


def chosen(model: nn.Module, blocks: int, plan: Plan | None) -> dict[str, Way]:
    """The layers to divide into ``blocks``, by name, in the order of the model.

    Raises:
        UserError: For a plan that names no module, a layer that cannot be divided, and heads that do not divide.
    """
    ways = _unfolded(model, found(model) if plan is None else _asked(model, plan))
    for name, way in ways.items():
        if (why := obstacle(model.get_submodule(name), way, blocks)) is not None:
            raise UserError(f"{blocks} virtual blocks must divide each layer of the plan", f"{name} {why[0]}", why[1])
    return ways


def obstacle(layer: nn.Module, way: Way, blocks: int) -> tuple[str, str] | None:
    """Why ``layer`` cannot be divided into ``blocks`` in this way, and what to do about it."""
    other = "leave it out of the plan"
    if type(layer) is nn.MultiheadAttention:
        if layer.num_heads % blocks:
            return f"has {layer.num_heads} heads", "use --virtual-tensor with a divisor of the heads"
        if layer.bias_k is not None or layer.add_zero_attn:
            return "adds keys of its own (add_bias_kv, add_zero_attn)", other
        return None
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        size = layer.out_features if way == "columns" else layer.in_features
    elif type(layer) is nn.Conv2d:
        if layer.groups != 1:
            return f"has groups={layer.groups}", other
        size = layer.out_channels if way == "columns" else layer.in_channels
    elif type(layer) is nn.Embedding:
        if layer.sparse or layer.max_norm is not None or layer.scale_grad_by_freq:
            return "has sparse, max_norm or scale_grad_by_freq", other
        size = layer.embedding_dim if way == "columns" else layer.num_embeddings
    else:
        kinds = ", ".join(kind.__name__ for kind in DIVIDED)
        return f"is a {type(layer).__name__}", f"name layers of the kinds {kinds}"
    return None if size >= blocks else (f"has {size} {way}", "use a smaller --virtual-tensor")


def _unfolded(model: nn.Module, ways: Mapping[str, Way]) -> dict[str, Way]:
    """Transformer layers as their parts, and all in the order of the model."""
    parts: dict[str, Way] = {}
    for name, way in ways.items():
        layer = model.get_submodule(name)
        if type(layer) in TRANSFORMER_LAYERS:
            prefix = f"{name}." if name else ""
            attentions = [n for n, part in layer.named_children() if isinstance(part, nn.MultiheadAttention)]
            parts |= {f"{prefix}{n}": "columns" for n in attentions}
            parts |= {f"{prefix}linear1": "columns", f"{prefix}linear2": "rows"}
        else:
            parts[name] = way
    return {name: parts[name] for name, _ in model.named_modules() if name in parts}


def plan_layers(model: nn.Module, plan: Plan | TrunkByData | None) -> None:
    """Note the user's plan for ``model``, for the mechanism to find; None: there is none."""
    model.__dict__["_tensor_plan"] = plan


def plan_of(model: nn.Module) -> Plan | TrunkByData | None:
    """What ``plan_layers`` noted."""
    plan: Plan | TrunkByData | None = model.__dict__.get("_tensor_plan")
    return plan


# -- the user's --------------------------------------------------------------------------------------------------------


def _asked(model: nn.Module, plan: Plan) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    for pattern, style in plan.items():
        words = [WORDS[kind.__name__] for kind in type(style).__mro__ if kind.__name__ in WORDS]
        if not words:
            fix = "use ColwiseParallel() or RowwiseParallel()"
            raise UserError("a plan says by columns or by rows", f"{pattern}: {type(style).__name__}", fix)
        names = list(_named(model, "", pattern.split(".") if pattern else []))
        if not names:
            known = ", ".join(name for name, part in model.named_modules() if isinstance(part, DIVIDED)) or "none"
            raise UserError("a plan names modules of the model", pattern, f"it has {known}")
        for name in names:
            if ways.setdefault(name, words[0]) != words[0]:
                raise UserError("a plan divides a layer in one way", name, "name it once")
    return ways


def _named(module: nn.Module, path: str, tokens: list[str]) -> Iterator[str]:
    """The modules that ``tokens`` (each with wildcards, one for each level) name."""
    if not tokens:
        yield path
        return
    for name, child in module.named_children():
        if fnmatch(name, tokens[0]):
            yield from _named(child, f"{path}.{name}" if path else name, tokens[1:])


# -- found -------------------------------------------------------------------------------------------------------------


def found(model: nn.Module) -> dict[str, Way]:
    """Transformer layers, attention, pairs of Linear layers, and large embeddings; the rest stays whole."""
    ways: dict[str, Way] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") or not outer for outer in inside):
            continue
        if type(module) in (*TRANSFORMER_LAYERS, nn.MultiheadAttention):
            ways[name] = "columns"
            inside.append(name)
        elif type(module) is nn.Embedding and module.weight.numel() >= LARGE and not _odd(module):
            ways[name] = "columns"
        else:
            ways |= _pairs(name, module)
    return _tied(model, ways)


def _odd(layer: nn.Embedding) -> bool:
    return bool(layer.sparse or layer.max_norm is not None or layer.scale_grad_by_freq)


def _pairs(path: str, module: nn.Module) -> dict[str, Way]:
    """Linear layers of ``module`` that seem to follow each other; where they do not, dividing them costs time only."""
    ways: dict[str, Way] = {}
    in_order = isinstance(module, nn.Sequential)
    first: tuple[str, nn.Linear] | None = None
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if type(child) is nn.Linear:
            if first is not None and first[1].out_features == child.in_features:
                ways |= {first[0]: "columns", full: "rows"}
                first = None
            else:  # four square ones in a row are attention, rather than two pairs
                first = (full, child) if in_order or child.in_features != child.out_features else None
        elif type(child) not in PASSED:
            first = None
    return ways


def _tied(model: nn.Module, ways: dict[str, Way]) -> dict[str, Way]:
    """Layers that share a weight: an embedding and the output layer by vocabulary, others not at all."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), []).append(name)
    for names in owners.values():
        names = list(dict.fromkeys(names))
        if len(names) < 2:
            continue
        layers = [model.get_submodule(name) for name in names]
        kinds = {type(layer) for layer in layers}
        if kinds == {nn.Embedding, nn.Linear} and any(name in ways for name in names):
            ways |= {
                n: "rows" if type(layer) is nn.Embedding else "columns" for n, layer in zip(names, layers, strict=True)
            }
        else:
            for name in names:
                ways.pop(name, None)
    return ways
