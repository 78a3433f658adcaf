"""Tensor parallelism: which layers of a model are divided into virtual blocks, and how the divided model runs.

``chosen`` selects the layers: by the user's plan, in the words of ``torch.distributed.tensor.parallel``, or by the
kinds of the modules (``find_layers``). ``TensorParallel`` divides them and runs the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.records import LayersDivided
from elastune.core.layout import Box, ParamBlock, Split
from elastune.core.mesh import Mesh
from elastune.core.slots import BatchSlice, cut
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import ModelParallel
from elastune.parallel.mechanisms.tensor.axis import BlockAxis
from elastune.parallel.mechanisms.tensor.blocked import as_whole
from elastune.parallel.mechanisms.tensor.layers import (
    PROJECTIONS,
    BlockOf,
    Divided,
    DividedAttention,
    DividedConv2d,
    DividedEmbedding,
    DividedEncoderLayer,
    DividedLinear,
    ParallelStyle,
    blocks_along,
    divide_parameters,
)
from elastune.parallel.mechanisms.torch_private import tree_map

Plan = Mapping[str, Any]
"""As ``torch.distributed.tensor.parallel.parallelize_module`` takes it: names with wildcards, ``ColwiseParallel()`` or
``RowwiseParallel()``. Only the names of these classes are read: ``Blocked`` tensors know their layout themselves."""


@dataclass(frozen=True)
class DataParallelTrunk:
    """A plan for ``tensor`` under which all layers but the divided ones are data parallel.

    It follows "one weird trick for parallelizing convolutional neural networks" (Krizhevsky 2014). The trunk, which
    computes much and has few parameters, is data parallel: each worker of a replica runs it on slots of its own. Before
    the layers that have most of the parameters, activations are gathered. All workers compute these layers together,
    each its blocks.

    Attributes:
        layers: The layers to divide; None: those that elastune finds. They must be in one module that is called once in
            a forward pass, or follow each other in one ``nn.Sequential``.

    Example:
        >>> plan = DataParallelTrunk({"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
        >>> model, optimizer = session.prepare(model, optimizer, plan=plan)
    """

    layers: Plan | None = None


WORDS: Mapping[str, ParallelStyle] = {"ColwiseParallel": "columns", "RowwiseParallel": "rows"}
TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
DIVIDED = (nn.Linear, nn.Conv2d, nn.Embedding, nn.MultiheadAttention, *TRANSFORMER_LAYERS)
LARGE = 1 << 16
"""The least elements of an embedding that is divided without a plan."""
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
"""Modules that act on each feature separately, so that the Linear layers before and after them are a pair."""


def chosen(model: nn.Module, blocks: int, plan: Plan | None) -> dict[str, ParallelStyle]:
    """The layers to divide into ``blocks``, by name, in the order of the model.

    Raises:
        UserError: The plan names no module of the model, or a layer cannot be divided into ``blocks``.
    """
    parallel_styles = _unfolded(model, find_layers(model) if plan is None else _layers_of_plan(model, plan))
    for name, parallel_style in parallel_styles.items():
        if (reason := obstacle(model.get_submodule(name), parallel_style, blocks)) is not None:
            raise UserError(
                f"{blocks} virtual blocks must divide each layer of the plan", f"{name} {reason[0]}", reason[1]
            )
    return parallel_styles


def obstacle(layer: nn.Module, parallel_style: ParallelStyle, blocks: int) -> tuple[str, str] | None:
    """Why ``layer`` cannot be divided into ``blocks`` in this style, and the fix; None if it can."""
    other = "leave it out of the plan"
    if type(layer) is nn.MultiheadAttention:
        if layer.num_heads % blocks:
            return f"has {layer.num_heads} heads", "use --virtual-tensor with a divisor of the heads"
        if layer.bias_k is not None or layer.add_zero_attn:
            return "adds keys of its own (add_bias_kv, add_zero_attn)", other
        return None
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        size = layer.out_features if parallel_style == "columns" else layer.in_features
    elif type(layer) is nn.Conv2d:
        if layer.groups != 1:
            return f"has groups={layer.groups}", other
        size = layer.out_channels if parallel_style == "columns" else layer.in_channels
    elif type(layer) is nn.Embedding:
        if layer.sparse or layer.max_norm is not None or layer.scale_grad_by_freq:
            return "has sparse, max_norm or scale_grad_by_freq", other
        size = layer.embedding_dim if parallel_style == "columns" else layer.num_embeddings
    else:
        kinds = ", ".join(kind.__name__ for kind in DIVIDED)
        return f"is a {type(layer).__name__}", f"name layers of the kinds {kinds}"
    return None if size >= blocks else (f"has {size} {parallel_style}", "use a smaller --virtual-tensor")


def _unfolded(model: nn.Module, parallel_styles: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Replace transformer layers by their parts, and sort all layers in the order of the model."""
    parts: dict[str, ParallelStyle] = {}
    for name, parallel_style in parallel_styles.items():
        layer = model.get_submodule(name)
        if type(layer) in TRANSFORMER_LAYERS:
            prefix = f"{name}." if name else ""
            attentions = [n for n, part in layer.named_children() if isinstance(part, nn.MultiheadAttention)]
            parts |= {f"{prefix}{n}": "columns" for n in attentions}
            parts |= {f"{prefix}linear1": "columns", f"{prefix}linear2": "rows"}
        else:
            parts[name] = parallel_style
    return {name: parts[name] for name, _ in model.named_modules() if name in parts}


def plan_layers(model: nn.Module, plan: Plan | DataParallelTrunk | None) -> None:
    """Record the user's plan on ``model``, for the mechanism; None: the user has no plan."""
    model.__dict__["_tensor_plan"] = plan


def plan_of(model: nn.Module) -> Plan | DataParallelTrunk | None:
    """The plan that ``plan_layers`` recorded on ``model``."""
    plan: Plan | DataParallelTrunk | None = model.__dict__.get("_tensor_plan")
    return plan


def _layers_of_plan(model: nn.Module, plan: Plan) -> dict[str, ParallelStyle]:
    """The layers that the user's plan names. Raises ``UserError`` for a plan that does not fit the model."""
    parallel_styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        words = [WORDS[kind.__name__] for kind in type(style).__mro__ if kind.__name__ in WORDS]
        if not words:
            fix = "use ColwiseParallel() or RowwiseParallel()"
            raise UserError("a plan says by columns or by rows", f"{pattern}: {type(style).__name__}", fix)
        names = list(_matching(model, "", pattern.split(".") if pattern else []))
        if not names:
            examples = ", ".join(name for name, part in model.named_modules() if isinstance(part, DIVIDED)) or "none"
            raise UserError("a plan names modules of the model", pattern, f"it has {examples}")
        for name in names:
            if parallel_styles.setdefault(name, words[0]) != words[0]:
                raise UserError("a plan names each layer once", name, "name it once")
    return parallel_styles


def _matching(module: nn.Module, path: str, tokens: list[str]) -> Iterator[str]:
    """The names of the modules that match ``tokens``, one pattern with wildcards for each level."""
    if not tokens:
        yield path
        return
    for name, child in module.named_children():
        if fnmatch(name, tokens[0]):
            yield from _matching(child, f"{path}.{name}" if path else name, tokens[1:])


def find_layers(model: nn.Module) -> dict[str, ParallelStyle]:
    """The layers to divide without a plan: transformer layers, attention, pairs of Linear layers, large embeddings."""
    parallel_styles: dict[str, ParallelStyle] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") or not outer for outer in inside):
            continue
        if type(module) in (*TRANSFORMER_LAYERS, nn.MultiheadAttention):
            parallel_styles[name] = "columns"
            inside.append(name)
        elif type(module) is nn.Embedding and module.weight.numel() >= LARGE and not _cannot_divide(module):
            parallel_styles[name] = "columns"
        else:
            parallel_styles |= _pairs(name, module)
    return _tied(model, parallel_styles)


def _cannot_divide(layer: nn.Embedding) -> bool:
    return bool(layer.sparse or layer.max_norm is not None or layer.scale_grad_by_freq)


def _pairs(path: str, module: nn.Module) -> dict[str, ParallelStyle]:
    """Pairs of Linear layers of ``module`` that seem to follow each other. A wrong guess only costs time."""
    parallel_styles: dict[str, ParallelStyle] = {}
    in_order = isinstance(module, nn.Sequential)
    first: tuple[str, nn.Linear] | None = None
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if type(child) is nn.Linear:
            if first is not None and first[1].out_features == child.in_features:
                parallel_styles |= {first[0]: "columns", full: "rows"}
                first = None
            else:  # square layers outside of a Sequential are rather projections of attention
                first = (full, child) if in_order or child.in_features != child.out_features else None
        elif type(child) not in PASSED:
            first = None
    return parallel_styles


def _tied(model: nn.Module, parallel_styles: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Divide an embedding and output layer with a shared weight by the vocabulary; drop others with one."""
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
        if kinds == {nn.Embedding, nn.Linear} and any(name in parallel_styles for name in names):
            parallel_styles |= {
                n: "rows" if type(layer) is nn.Embedding else "columns" for n, layer in zip(names, layers, strict=True)
            }
        else:
            for name in names:
                parallel_styles.pop(name, None)
    return parallel_styles


KINDS: Mapping[type[nn.Module], type[Divided]] = {
    nn.Conv2d: DividedConv2d,
    nn.Embedding: DividedEmbedding,
    nn.MultiheadAttention: DividedAttention,
}


class TensorParallel(ModelParallel):
    """Runs a model whose layers are divided into virtual blocks along the tensor axis.

    Every worker of the axis computes the undivided layers, with equal bits.

    Args:
        module: The user's model, which is changed in place.
        parallel_styles: The layers to divide, by name, in the order of the model (see ``chosen``).
        axis: The tensor axis with its blocks.
    """

    def __init__(self, module: nn.Module, parallel_styles: Mapping[str, ParallelStyle], axis: BlockAxis) -> None:
        self.axis, self.failure_hooks = axis, axis.failure_hooks
        self._parallel_styles = dict(parallel_styles)
        self.module = self.model = module
        self.whole_s = 0.0
        first_names: dict[int, str] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            first_names.setdefault(id(p), name)
        originals = {name: module.get_parameter(name) for name in first_names.values()}  # keeps ids in use
        made = _divide_layers(module, parallel_styles, axis)
        of_block = {id(p): (first_names[whole], box) for whole, parts in made.items() for box, p in parts.items()}
        number = {
            id(p): block for layer in module.modules() if isinstance(layer, Divided) for block, p in _numbered(layer)
        }
        param_blocks, self.parameters = [], []
        for name, p in module.named_parameters():
            tensor, box = of_block.get(id(p), (name, tuple((0, size) for size in p.shape)))
            dtype = str(p.dtype).removeprefix("torch.")
            param_blocks.append(ParamBlock(name, tensor, box, dtype, block=number.get(id(p)), trained=p.requires_grad))
            self.parameters.append(p)
        del originals
        self.split = Split(tuple(param_blocks), blocks=axis.count)
        self._since = 0.0
        module.register_forward_pre_hook(self._begins)
        module.register_forward_hook(self._ends, always_call=True)

    def enter(self, comms: Comms) -> None:
        self.axis.enter(comms.group("tensor"))

    def division_records(self, mesh: Mesh) -> tuple[LayersDivided, ...]:
        sizes = {True: 0, False: 0}
        for param_block in self.split.param_blocks:
            sizes[param_block.block is not None] += param_block.size if param_block.trained else 0
        return (LayersDivided(self.axis.count, sizes[True], sizes[False], self.apart),)

    def backward(self, loss: torch.Tensor, part: BatchSlice) -> Iterable[BatchSlice]:
        self._raise_if_failed()
        since = time.perf_counter()
        self.axis.computes = True  # activation checkpointing runs parts of the forward pass again
        try:
            for done in self._back(loss, part):
                self.whole_s += time.perf_counter() - since
                self._raise_if_failed()
                yield done
                since = time.perf_counter()
        finally:
            self.axis.computes = False

    def _back(self, loss: torch.Tensor, part: BatchSlice) -> Iterable[BatchSlice]:
        """The backward passes of ``backward``; see ``ModelParallel.backward``."""
        return super().backward(loss, part)

    @contextmanager
    def passing(self) -> Iterator[None]:
        computed, self.axis.computes = self.axis.computes, True
        try:
            yield
        finally:
            self.axis.computes = computed
        self._raise_if_failed()

    def in_parts(self, called: Sequence[str]) -> frozenset[str]:
        names, inside = set(), False
        for name in called:
            parallel_style = self._parallel_styles.get(name)
            inside = inside and parallel_style != "columns"
            if inside:
                names.add(name)
            inside = parallel_style == "columns" or (inside and parallel_style is None)
        return frozenset(names)

    def whole(self, value: Any) -> Any:
        return tree_map(as_whole, value)

    def _raise_if_failed(self) -> None:
        if self.axis.failed is not None:
            raise self.axis.failed

    @property
    def divided_share(self) -> float:
        """The share of the passes' time in divided layers, traffic included; NaN before the first pass."""
        return self.axis.divided_s / self.whole_s if self.whole_s else float("nan")

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        self.axis.computes = True
        self._since = time.perf_counter()

    def _ends(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self.axis.computes = False
        output = tree_map(as_whole, output)
        self.whole_s += time.perf_counter() - self._since
        if self.axis.failed is not None:
            self.failure_hooks.meet(self.axis.failed)
        return output


def _divide_layers(
    module: nn.Module, parallel_styles: Mapping[str, ParallelStyle], axis: BlockAxis
) -> dict[int, dict[Box, nn.Parameter]]:
    """Divide the layers of ``parallel_styles``. Returns the blocks of each divided parameter, by its id."""
    _refuse_half_tied(module, parallel_styles)
    made: dict[int, dict[Box, nn.Parameter]] = {}
    before: int | None = None  # the outputs (features or channels) of a layer by columns just before
    for name, parallel_style in parallel_styles.items():
        layer: Any = module.get_submodule(name)
        if isinstance(layer, nn.MultiheadAttention):
            _divide_attention(layer, axis, made)
            before = None
            continue
        sizes, outputs = _sizes(layer, parallel_style, axis.count, before)
        dims = (0, 1) if isinstance(layer, (nn.Linear, nn.Conv2d)) else (1, 0)
        blocks = {"weight": blocks_along("weight", layer.weight.shape, dims[parallel_style == "rows"], sizes)}
        if parallel_style == "columns" and getattr(layer, "bias", None) is not None:
            blocks["bias"] = blocks_along("bias", layer.bias.shape, 0, sizes)
        kind = DividedLinear if isinstance(layer, nn.Linear) else KINDS[type(layer)]
        divide_parameters(layer, kind, axis, parallel_style, sizes, blocks, made)
        before = outputs if parallel_style == "columns" else None
    for part in module.modules():
        if type(part) is nn.TransformerEncoderLayer and isinstance(part.self_attn, Divided):
            part.__class__ = DividedEncoderLayer
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # its fast path looks into the layers' weights
    return made


def _sizes(layer: Any, parallel_style: ParallelStyle, count: int, before: int | None) -> tuple[list[int], int]:
    """The sizes of a layer's blocks along the cut, and their sum.

    Rows are cut as the columns of the layer before. Where a convolution's output was flattened, all places of a channel
    stay together.
    """
    if isinstance(layer, nn.Linear):
        total = layer.out_features if parallel_style == "columns" else layer.in_features
    elif isinstance(layer, nn.Conv2d):
        total = layer.out_channels if parallel_style == "columns" else layer.in_channels
    else:
        total = layer.embedding_dim if parallel_style == "columns" else layer.num_embeddings
    unit = total // before if parallel_style == "rows" and before and before >= count and total % before == 0 else 1
    return [len(block) * unit for block in cut(total // unit, count)], total


def _divide_attention(layer: nn.MultiheadAttention, axis: BlockAxis, made: dict[int, dict[Box, nn.Parameter]]) -> None:
    features = layer.embed_dim
    sizes = [features // axis.count] * axis.count
    blocks: dict[str, tuple[BlockOf, ...]] = {}
    for name in ("in_proj_weight", "in_proj_bias"):
        if (whole := getattr(layer, name)) is not None:
            blocks[name] = _thirds(name, whole.shape, sizes)
    for name in PROJECTIONS:
        if (whole := getattr(layer, name)) is not None:
            blocks[name] = blocks_along(name, whole.shape, 0, sizes)
    divide_parameters(layer, DividedAttention, axis, "columns", sizes, blocks, made)
    out = {"weight": blocks_along("weight", layer.out_proj.weight.shape, 1, sizes)}
    divide_parameters(layer.out_proj, DividedLinear, axis, "rows", sizes, out, made)


def _thirds(name: str, shape: Sequence[int], sizes: Sequence[int]) -> tuple[BlockOf, ...]:
    """The blocks of a parameter with the rows of queries, keys and values one below the other."""
    blocks = []
    for role, letter in enumerate("qkv"):
        for b in blocks_along(name, shape, 0, sizes):
            start, stop = (edge + role * sum(sizes) for edge in b.box[0])
            blocks.append(BlockOf(f"{name}#{letter}{b.block}", ((start, stop), *b.box[1:]), b.block, role))
    return tuple(blocks)


def _refuse_half_tied(module: nn.Module, parallel_styles: Mapping[str, ParallelStyle]) -> None:
    """Raise ``UserError`` where layers share a weight and are not divided along the same dimension of it."""
    seen: dict[int, tuple[str, int | None]] = {}
    for name, layer in module.named_modules():
        for key, p in layer.named_parameters(recurse=False):
            dim = None
            if name in parallel_styles and key == "weight":
                dim = int((parallel_styles[name] == "rows") != isinstance(layer, nn.Embedding))
            other, of_other = seen.setdefault(id(p), (name, dim))
            if dim != of_other:
                fix = "an embedding RowwiseParallel() and its output layer ColwiseParallel(), or neither"
                raise UserError(
                    "layers that share a weight are divided along the same dimension", f"{other}, {name}", fix
                )


def _numbered(layer: Divided) -> list[tuple[int, nn.Parameter]]:
    return [(b.block, layer.get_parameter(b.key)) for blocks in layer.divided.values() for b in blocks]
