"""Who has a place in the view to come, and which mesh a run may be asked for. Pure questions to its state."""

from __future__ import annotations

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.elastic.coordinator.membership import Membership


def who_stays(state: Membership, ready: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which members stay, and which workers join. One that is to be replaced stays until another comes for it."""
    assert state.current is not None
    members = [state.get(number) for number in state.current.members if not state.get(number).preempted]
    fit = [worker.number for worker in members if not worker.to_replace][: state.target]
    joiners = ready[: state.target - len(fit)]
    slow = [worker.number for worker in members if worker.to_replace][: state.target - len(fit) - len(joiners)]
    if slow and _blocked(state) and len(fit) + len(slow) > state.low:
        slow.pop()
    return tuple(worker.number for worker in members if worker.number in {*fit, *slow}), joiners


def waits_for_more(state: Membership, mesh: Mesh) -> bool:
    """Whether ``mesh`` divides layers otherwise than is wanted, and would not if those were there that are coming."""
    coming = any(worker.phase in ("starting", "connected") for worker in state.workers)
    wanted = state.meshes.for_workers(state.target)
    return coming and (mesh.tensor, mesh.pipeline) != (wanted.tensor, wanted.pipeline)


def refuse_mesh(state: Membership, text: str, layers: int) -> None:
    """Raise ``UserError`` where the run cannot stand as the mesh ``text`` says; ``layers``: see ``Running``."""
    mesh = Mesh.parse(text)
    state.meshes.widened(layers).refuse(mesh)
    if not state.low <= mesh.workers <= state.high:
        fix = "ask for a mesh of as many, or begin the run with --workers LOW:HIGH"
        raise UserError(f"this run has from {state.low} to {state.high} workers", f"{mesh}: {mesh.workers}", fix)


def _blocked(state: Membership) -> bool:
    """Whether there is room for another worker only once a member leaves.

    Where a worker has just gone there will be room; and no member is let go while replacements fail to start.
    """
    coming = any(worker.phase != "member" for worker in state.workers)
    return not (state.free or coming or state.capacity_stale or state.failed_starts)
