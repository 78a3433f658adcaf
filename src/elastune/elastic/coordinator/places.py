"""Who has a place in the view to come, who is waited for, which mesh a run may be asked for: questions to its state."""

from __future__ import annotations

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.elastic.coordinator.membership import Membership
from elastune.elastic.protocol.messages import Connected, Done, Event, Ready, Running


def who_stays(state: Membership, ready: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which members stay, and which workers join. One that is to be replaced stays until another comes for it."""
    assert state.current is not None
    known = state.by_number
    members = [known[number] for number in state.current.members if not known[number].preempted]
    fit = [worker.number for worker in members if not worker.to_replace][: state.target]
    joiners = ready[: state.target - len(fit)]
    slow = [worker.number for worker in members if worker.to_replace][: state.target - len(fit) - len(joiners)]
    if slow and _blocked(state) and len(fit) + len(slow) > state.low:
        slow.pop()
    stay = {*fit, *slow}
    return tuple(worker.number for worker in members if worker.number in stay), joiners


def in_company(state: Membership, ready: tuple[int, ...]) -> tuple[int, ...]:
    """Those of ``ready`` that join now: the first workers of a host come together, as each view costs all a pause.

    Where one that has not connected yet will run nobody knows, so it may be there.
    """
    coming = [worker for worker in state.workers if worker.phase in ("starting", "connected") and not worker.late]
    if not (ready and coming):
        return ready
    known, settled = state.by_number, {worker.host for worker in state.members}
    anywhere, hosts = any(worker.phase == "starting" for worker in coming), {worker.host for worker in coming}
    return tuple(n for n in ready if (host := known[n].host) in settled or not (anywhere or host in hosts))


def keeps_company(state: Membership) -> bool:
    """Whether somebody who is ready waits for others of its host."""
    if state.current is None:
        return False
    ready = tuple(worker.number for worker in state.workers if worker.phase == "ready")
    return ready != in_company(state, ready)


def waits_for_more(state: Membership, mesh: Mesh) -> bool:
    """Whether ``mesh`` divides layers otherwise than is wanted, and would not if those were there that are coming."""
    coming = any(worker.phase in ("starting", "connected") for worker in state.workers)
    wanted = state.meshes.for_workers(state.target)
    return coming and (mesh.tensor, mesh.pipeline) != (wanted.tensor, wanted.pipeline)


def waits_for_others(state: Membership, event: Event) -> bool:
    """Whether nothing follows from ``event``, which ``state`` has, before others have said the same.

    ``derive`` would find that, too, by looking at every worker: in a run of thousands, when each of them says it.
    """
    match event:
        case Connected():
            return True
        case Ready():
            return state.current is None and any(
                worker.phase != "ready" for worker in reversed(state.workers)
            )  # the last began last
        case Running():
            return state.proposed is None or len(state.running) < len(state.proposed.members)
        case Done():
            return any(worker.phase == "member" and not worker.done for worker in reversed(state.workers))
    return False


def refuse_mesh(state: Membership, text: str) -> None:
    """Raise ``UserError`` where the run cannot stand as the mesh ``text`` says."""
    mesh = Mesh.parse(text)
    state.meshes.refuse(mesh)
    if not state.low <= mesh.workers <= state.high:
        fix = "ask for a mesh of as many, or begin the run with --workers LOW:HIGH"
        raise UserError(f"this run has from {state.low} to {state.high} workers", f"{mesh}: {mesh.workers}", fix)


def _blocked(state: Membership) -> bool:
    """Whether there is room for another worker only once a member leaves.

    Where a worker has just gone there will be room; and no member is let go while replacements fail to start.
    """
    coming = any(worker.phase != "member" for worker in state.workers)
    return not (state.free or coming or state.capacity_stale or state.failed_starts)
