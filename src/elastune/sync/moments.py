"""An optimizer's state as numbers that have a mean: the same ones of every learner, on all workers.

An optimizer has no state of a parameter before its first step with a gradient of it. So one learner may lack what
another has: that of a layer which only some samples reach, or which is left out at random. What it lacks counts as
zeros, with which SGD, Adam and RMSprop begin. (NAdam, ASGD and Rprop begin some numbers elsewhere: their first means
are too small.)
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from elastune.comm.group import Group
from elastune.core.errors import UserError

Moments = Sequence[dict[str, Any]]
"""The optimizer's state of each parameter, in the parameters' order."""


@dataclass(frozen=True)
class StateEntry:
    """What one part of the state is.

    Attributes:
        place: The parameter that it belongs to.
        name: As the optimizer calls it.
        kind: A tensor's type, or that of a number: "int" or "float".
        shape: A tensor's.
        beside: It is on the parameter's device; else on the CPU.
    """

    place: int
    name: str
    kind: str
    shape: tuple[int, ...] = ()
    beside: bool = False


def entries_of(moments: Moments, params: Sequence[torch.Tensor]) -> list[StateEntry]:
    """What a learner has.

    Raises:
        UserError: Where an optimizer keeps what has no mean.
    """
    pairs = enumerate(zip(moments, params, strict=True))
    return [
        _entry(place, name, value, p)
        for place, (state, p) in pairs
        for name, value in state.items()
        if value is not None
    ]


def _entry(place: int, name: str, value: Any, p: torch.Tensor) -> StateEntry:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return StateEntry(place, name, str(value.dtype), tuple(value.shape), value.device == p.device)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return StateEntry(place, name, type(value).__name__)
    what = f"{value.dtype} tensors" if isinstance(value, torch.Tensor) else type(value).__name__
    rule = "learners become their mean, so an optimizer's state must be of numbers"
    raise UserError(rule, f"{name!r}: {what}", "use another optimizer, or --sync allreduce")


def united(lists: Iterable[Sequence[StateEntry]]) -> list[StateEntry]:
    """What any of several learners has, parameter by parameter.

    Raises:
        UserError: Where two have different things by one name.
    """
    found = sorted(dict.fromkeys(each for own in lists for each in own), key=lambda each: each.place)
    known: dict[tuple[int, str], StateEntry] = {}
    for each in found:
        other = known.setdefault((each.place, each.name), each)
        if other != each:
            rule, value = "learners' optimizers must have alike states", f"{each.name!r}: {other.shape}, {each.shape}"
            raise UserError(rule, value, "use another optimizer, or moments=fresh")
    return found


def agreed(own: list[StateEntry], group: Group) -> list[StateEntry]:
    """What any learner of any worker has, by what each worker's learners have. All workers call this.

    One number from each to each, where all have the same, as they nearly always have. Raises ``GroupBroken`` and, as
    ``united``, ``UserError``.
    """
    text = json.dumps([astuple(each) for each in own]).encode()
    if len({mark for (mark,) in group.gather_row([float(zlib.crc32(text))])}) == 1:
        return own
    rows = group.gather_tensors(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    told = [json.loads(row.numpy().tobytes()) for row in rows]
    return united([StateEntry(at, name, kind, tuple(shape), on) for at, name, kind, shape, on in row] for row in told)


def completed(moments: Moments, entries: Sequence[StateEntry], params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """A learner's state with all of ``entries``, in their order."""
    found: list[dict[str, Any]] = [{} for _ in moments]
    for each in entries:
        value = moments[each.place].get(each.name)
        found[each.place][each.name] = _zero(each, params[each.place]) if value is None else value
    nothing = ({name: value for name, value in state.items() if value is None} for state in moments)
    return [{**empty, **state} for empty, state in zip(nothing, found, strict=True)]


def _zero(entry: StateEntry, p: torch.Tensor) -> Any:
    if entry.kind in ("int", "float"):
        return 0 if entry.kind == "int" else 0.0
    dtype: torch.dtype = getattr(torch, entry.kind.removeprefix("torch."))
    return torch.zeros(entry.shape, dtype=dtype, device=p.device if entry.beside else "cpu")


def numbers_of(moments: Moments) -> list[torch.Tensor]:
    """All of a state, in order, single numbers as tensors."""
    values = (value for state in moments for value in state.values() if value is not None)
    return [
        value if isinstance(value, torch.Tensor) else torch.tensor([float(value)], dtype=torch.float64)
        for value in values
    ]
