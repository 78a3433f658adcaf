"""Lets a model begin with the weights of another one: tensors of equal name and shape are taken over.

Tensors of another shape, such as a head for another number of classes, begin fresh, and so do those that the user
names. All of it is reported: a transfer that took nothing without a word would be a training from scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.records import StartedFrom
from elastune.core.run import StartFrom
from elastune.parallel.mechanisms.tensor_storage import whole
from elastune.train.checkpoints.checkpoint import STATE, load_newest
from elastune.train.checkpoints.spool import digest_of
from elastune.train.compiling import plain, plain_name

ASKED_FOR = "asked for"
_RULE = "weights come from a run or trial with a checkpoint, or a safetensors file"
_FIX = "name the folder of a run, of a trial (STUDY/trials/00007), or a file"


@dataclass(frozen=True)
class WeightMatch:
    """Which tensors a model takes over.

    Attributes:
        taken: Names in the model, each with the name of the source's tensor that it takes.
        fresh: Names in the model that keep their values, with the reasons.
        unused: Names of the source's tensors that no tensor takes.
    """

    taken: dict[str, str]
    fresh: dict[str, str]
    unused: tuple[str, ...]


def matched(tensors: Mapping[str, Any], source_tensors: Mapping[str, Any], request: StartFrom) -> WeightMatch:
    """Decide which tensors are taken over.

    Args:
        tensors: The model's tensors by name, or objects of the same shapes.
        source_tensors: The source's tensors by name.
        request: The request, with renames and patterns of fresh names.

    Raises:
        UserError: Two of the source's names become one, a pattern of fresh names matches nothing, or nothing is taken.
    """
    for pattern in request.fresh:  # a typing error would silently take a tensor that was to be fresh
        if not any(fnmatchcase(name, pattern) for name in tensors):
            rule = "what is to be fresh is a tensor of the model"
            raise UserError(
                rule, pattern[:80], f"name one that is there, such as {', '.join(list(tensors)[-3:])}"[:300]
            )
    sources: dict[str, str] = {}
    for name in source_tensors:
        target = request.renamed(name)
        if target in sources:
            rule = "renames leave each tensor a name of its own"
            raise UserError(rule, f"{sources[target]} and {name} both become {target}"[:300], "name longer beginnings")
        sources[target] = name
    taken, fresh = {}, {}
    for name, tensor in tensors.items():
        if any(fnmatchcase(name, pattern) for pattern in request.fresh):
            fresh[name] = ASKED_FOR
        elif name not in sources:
            fresh[name] = "not in the source"
        elif tuple(source_tensors[sources[name]].shape) != tuple(tensor.shape):
            fresh[name] = f"of shape {list(tensor.shape)}, {list(source_tensors[sources[name]].shape)} there"
        else:
            taken[name] = sources[name]
    if not any(tensor.is_floating_point() for name, tensor in tensors.items() if name in taken):
        some = ", ".join(list(sources)[:3]) or "none"
        rule, fix = "of a source some weights fit the model, by name and shape", "see --rename, or build the same model"
        raise UserError(
            rule, f"none of {request.source}, such as {some}; here such as {', '.join(list(tensors)[:3])}", fix
        )
    used = set(taken.values())
    return WeightMatch(taken, fresh, tuple(name for name in source_tensors if name not in used))


def start_from(model: nn.Module, request: StartFrom) -> StartedFrom:
    """Copy all matching tensors of ``request.source`` into ``model``, and return the record of it.

    Raises ``UserError``.
    """
    model = plain(model)
    tensors = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if hasattr(tensor, "shape")}
    with weights_in(request.source) as (source_tensors, digest):
        if request.sha256 not in ("", digest):
            rule, fix = "trials of a study begin with the weights that it was begun with", "restore them"
            raise UserError(rule, f"others in {request.source} since", fix)
        plan = matched(tensors, source_tensors, request)
        with torch.no_grad():
            for name, source_name in plan.taken.items():
                try:
                    tensors[name].copy_(whole(source_tensors[source_name]))
                except (OSError, ValueError, SafetensorError) as error:
                    raise UserError(_RULE, f"{request.source}: {source_name}: {str(error)[:200]}", _FIX) from None
    fresh = _untaken(tensors, plan)
    return StartedFrom(str(request.source), digest, len(plan.taken), fresh, len(plan.unused))


def _untaken(tensors: Mapping[str, torch.Tensor], plan: WeightMatch) -> dict[str, str]:
    """The tensors that really begin fresh: a tensor with several names may be taken under another one.

    Raises ``UserError`` if a tensor was to be fresh and was taken under another name.
    """
    filled = {id(tensors[name]): name for name in plan.taken}
    for name, why in plan.fresh.items():
        if why == ASKED_FOR and id(tensors[name]) in filled:
            rule, value = "what is to be fresh is not tied to what is taken", f"{name} is {filled[id(tensors[name])]}"
            raise UserError(rule, value[:300], f"name both: fresh {name} and {filled[id(tensors[name])]}"[:300])
    return {name: why for name, why in plan.fresh.items() if id(tensors[name]) not in filled}


def check_source(source: Path) -> None:
    """Raise ``UserError`` for a source that has no weights, by a look at its folder or at the head of its file."""
    if source.is_dir():
        if not any((source / "checkpoints").glob("step-*")):
            raise UserError(_RULE, f"no checkpoint in {source}", _FIX)
        return
    try:
        with safe_open(source, "pt") as opened:
            opened.keys()
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(_RULE, f"{source}: {str(error)[:200]}", _FIX) from None


@contextmanager
def weights_in(source: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The tensors in ``source`` by name, and one SHA-256 of them. Raises ``UserError``."""
    if source.is_dir():
        newest = load_newest(source / "checkpoints", whole_parts=False)
        if newest is None:
            raise UserError(_RULE, f"no checkpoint in {source}", _FIX)
        path, kept = newest
        if "model" not in kept.states:
            raise UserError(_RULE, f"no model in {path}", _FIX)
        yield {name: t for name, t in kept.states["model"].items() if hasattr(t, "shape")}, digest_of(path / STATE)
        return
    try:
        if not source.is_file():
            raise ValueError("there is no such file or folder")
        with safe_open(source, "pt") as opened:
            tensors = {plain_name(name): opened.get_tensor(name) for name in list(opened.keys())}
        digest = digest_of(source)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(_RULE, f"{source}: {str(error)[:200]}", _FIX) from None
    yield tensors, digest


def digest_of_weights(source: Path) -> str:
    """The SHA-256 of the tensors in ``source``. Raises ``UserError`` if there are none."""
    with weights_in(source) as (_, digest):
        return digest
