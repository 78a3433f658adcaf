"""What somebody asks of a run from outside of its membership: whether it can be, and the answer."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.core.errors import UserError
from elastune.elastic.coordinator.membership import Membership
from elastune.elastic.coordinator.places import refuse_mesh
from elastune.elastic.protocol.messages import Answer, Event, ReshapeAsked, ResizeAsked

Request = ResizeAsked | ReshapeAsked
OVER = "the run must be running (got one that is over): go on with it: elastune run ... --resume"


def objection(state: Membership, request: Event) -> str:
    """Why ``request`` cannot be; "" where it can. A number of workers always can: it is cut to what is allowed."""
    try:
        if isinstance(request, ReshapeAsked):
            refuse_mesh(state, request.mesh)
    except UserError as error:
        return str(error)
    return ""


def answer(state: Membership, request: Request, members: Sequence[int], why_not: str) -> Answer:
    """To ``request``, whose sender is not known to the machine; ``state`` is what it has made of the run."""
    if why_not:
        return Answer(False, why_not, list(members))
    if isinstance(request, ReshapeAsked):
        return Answer(True, f"from {len(members)} workers to the mesh {state.meshes.wanted}", list(members))
    allowed = f" ({request.workers} asked for; from {state.low} to {state.high} are allowed)"
    bounds = "" if request.workers == state.target else allowed
    return Answer(True, f"from {len(members)} to {state.target} workers{bounds}", list(members))
