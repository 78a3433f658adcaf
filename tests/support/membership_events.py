"""Membership events as a journal holds them, read back, and the state of the membership machine that they lead to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from elastune.core.mesh_choice import MeshChoice
from elastune.elastic.coordinator.machine import Membership, begin, transition
from elastune.elastic.wire.messages import Count, Event, RunEvent

_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
_WORKERS: TypeAdapter[int | None] = TypeAdapter(Count | None)


def decode_event(recorded: dict[str, Any]) -> tuple[int | None, Event]:
    """The arguments of ``encode_event`` that have this result. Raises ``ValueError`` if there are none."""
    if not isinstance(recorded, dict):
        raise ValueError(f"no event: {recorded!r:.200}")
    fields = dict(recorded)
    kind, worker = fields.pop("event", None), fields.pop("worker", None)
    event = _EVENTS.validate_json(json.dumps({**fields, "kind": kind}), strict=True)
    if (worker is None) != isinstance(event, RunEvent):
        raise ValueError(f"no event: {recorded!r:.200}")
    return _WORKERS.validate_python(worker, strict=True), event


def replay(
    workers: Sequence[int],
    low: int,
    high: int,
    most_losses: int,
    events: Iterable[tuple[int | None, Event]],
    meshes: MeshChoice | None = None,
) -> Membership:
    """The state after ``events``, from the beginning."""
    state = begin(workers, low, high, most_losses, meshes)
    for worker, event in events:
        state, _ = transition(state, worker, event)
    return state
