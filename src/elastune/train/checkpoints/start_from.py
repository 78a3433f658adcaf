"""A model that begins with what another one has learnt: tensors that have the same name and shape are taken over.

What has another shape, such as the head of another number of classes, begins fresh, and so does what is asked to. All
of it is told: a transfer that silently took nothing is a training from scratch.
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
    """What a model takes over.

    Attributes:
        taken: Names of the model, and those of the source's tensors that they take.
        fresh: Names of the model that keep what they have, and why.
        unused: Names of the source's tensors that nothing took.
    """

    taken: dict[str, str]
    fresh: dict[str, str]
    unused: tuple[str, ...]


def matched(own: Mapping[str, Any], found: Mapping[str, Any], asked: StartFrom) -> WeightMatch:
    """Who takes what; ``own`` and ``found`` are tensors, or what has their shape, by name.

    Raises ``UserError`` where two of the source's names become one here, where a pattern of what is to be fresh names
    nothing, and where nothing is taken.
    """
    for pattern in asked.fresh:  # a slip of the pen would take what was not to be taken, and say nothing
        if not any(fnmatchcase(name, pattern) for name in own):
            rule = "what is to be fresh is a tensor of the model"
            raise UserError(rule, pattern[:80], f"name one that is there, such as {', '.join(list(own)[-3:])}"[:300])
    there: dict[str, str] = {}
    for name in found:
        here = asked.renamed(name)
        if here in there:
            rule = "renames leave each tensor a name of its own"
            raise UserError(rule, f"{there[here]} and {name} both become {here}"[:300], "name longer beginnings")
        there[here] = name
    taken, fresh = {}, {}
    for name, tensor in own.items():
        if any(fnmatchcase(name, pattern) for pattern in asked.fresh):
            fresh[name] = ASKED_FOR
        elif name not in there:
            fresh[name] = "not in the source"
        elif tuple(found[there[name]].shape) != tuple(tensor.shape):
            fresh[name] = f"of shape {list(tensor.shape)}, {list(found[there[name]].shape)} there"
        else:
            taken[name] = there[name]
    if not any(tensor.is_floating_point() for name, tensor in own.items() if name in taken):
        some = ", ".join(list(there)[:3]) or "none"
        rule, fix = "of a source some weights fit the model, by name and shape", "see --rename, or build the same model"
        raise UserError(rule, f"none of {asked.source}, such as {some}; here such as {', '.join(list(own)[:3])}", fix)
    used = set(taken.values())
    return WeightMatch(taken, fresh, tuple(name for name in found if name not in used))


def start_from(model: nn.Module, asked: StartFrom) -> StartedFrom:
    """Copy what fits of ``asked.source`` into ``model``, and tell what that was. Raises ``UserError``."""
    model = plain(model)
    own = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if hasattr(tensor, "shape")}
    with weights_in(asked.source) as (found, digest):
        if asked.sha256 not in ("", digest):
            rule, fix = "trials of a study begin with the weights that it was begun with", "restore them"
            raise UserError(rule, f"others in {asked.source} since", fix)
        plan = matched(own, found, asked)
        with torch.no_grad():
            for name, there in plan.taken.items():
                try:
                    own[name].copy_(whole(found[there]))
                except (OSError, ValueError, SafetensorError) as error:
                    raise UserError(_RULE, f"{asked.source}: {there}: {str(error)[:200]}", _FIX) from None
    fresh = _untaken(own, plan)
    return StartedFrom(str(asked.source), digest, len(plan.taken), fresh, len(plan.unused))


def _untaken(own: Mapping[str, torch.Tensor], plan: WeightMatch) -> dict[str, str]:
    """What is fresh indeed: a tensor that has several names, such as a tied head, may have come under another one.

    Raises ``UserError`` where it was to be fresh, and was taken under another name.
    """
    filled = {id(own[name]): name for name in plan.taken}
    for name, why in plan.fresh.items():
        if why == ASKED_FOR and id(own[name]) in filled:
            rule, value = "what is to be fresh is not tied to what is taken", f"{name} is {filled[id(own[name])]}"
            raise UserError(rule, value[:300], f"name both: fresh {name} and {filled[id(own[name])]}"[:300])
    return {name: why for name, why in plan.fresh.items() if id(own[name]) not in filled}


@contextmanager
def weights_in(source: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The tensors in ``source`` by name, and the SHA-256 of all of them. Raises ``UserError``."""
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
    """The SHA-256 of what is in ``source``. Raises ``UserError`` where there is nothing."""
    with weights_in(source) as (_, digest):
        return digest
