"""Agents as actors: each is started on a node that has what its workers need, and waits until there is one.

An actor that waits is what makes Ray's autoscaler add a node. Actors end with the process that started them, or, where
they have a name, outlive it: the next controller finds them by that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastune.cluster.agents.fleet import NotStarted, Phase, Starter
from elastune.cluster.agents.remembered import forget
from elastune.cluster.ray.actor import CALLS, AgentActor, AgentEnd
from elastune.cluster.ray.connection import WorkerShape, need_ray, one_line
from elastune.core.cost import ON_DEMAND

PATIENCE_S = 60  # an agent whose controller has gone looks for it no longer
END_LIMIT_S = 5.0
ASK_S = 120.0  # how long a question for an agent's end stays open; a controller that has gone leaves one
NAMESPACE = "elastune"  # of actors with names
_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}


@dataclass(frozen=True)
class Keeping:
    """Actors outlive their controller: all are called ``name``, a dash and their label; ``folder`` says so."""

    name: str
    folder: Path


@dataclass
class _Actor:
    """One that was asked for. ``here``: what Ray has once it has a node; ``end``: once its agent has ended, or that was
    asked long enough ago."""

    handle: Any
    here: Any
    end: Any


class Actors(Starter):
    """Agents with room for ``workers`` of ``shape`` each, which join ``address`` with ``token``.

    Ray knows the token: whoever may use its cluster may run anything there, agents and their workers included. It goes
    from this process to the actor's, and is stored nowhere on the way. The process must have joined a Ray cluster;
    ``leave`` is called once it is not needed any more. ``kept``: they outlive this process, and those of the
    controller before it that are called so are taken over; ``close`` ends them. ``kind``: of their nodes.
    """

    def __init__(
        self,
        address: str,
        token: str,
        workers: int,
        shape: WorkerShape,
        leave: Callable[[], None],
        kept: Keeping | None = None,
        kind: str = ON_DEMAND,
    ) -> None:
        self._leave, self._kept = leave, kept
        self._ray = need_ray()
        self._token = token
        self._options = ["--join", address, "--workers", str(workers), "--patience", f"{PATIENCE_S}s", "--kind", kind]
        asked = shape.of(workers)
        self._asked = " and ".join(f"{asked[key]:g} {name}s" for key, name in _NAMES.items() if asked[key])
        self._class = self._ray.remote(AgentActor)
        self._wanted = {**asked, "scheduling_strategy": "SPREAD", "max_restarts": 0, "max_concurrency": CALLS}
        self._actors: dict[str, _Actor] = {}
        self._ends: dict[str, str] = {}
        self._number = self._waiting = 0
        self._closed = False
        for label, handle in ({} if kept is None else left_actors(self._ray, kept.name)).items():
            self._number = max(self._number, int(label.rpartition("-")[2]))
            self._actors[label] = self._begun(label, handle)
            handle.look_at.remote(address)  # where it looks already, unless this controller is on another machine

    def start(self, count: int) -> None:
        for _ in range(count):
            self._number += 1
            label = f"actor-{self._number}"
            try:
                handle = self._class.options(**self._wanted, **self._lasting(label)).remote()
                self._actors[label] = self._begun(label, handle)
            except (self._ray.exceptions.RayError, RuntimeError, ValueError) as error:
                raise NotStarted(f"Ray has started no actor: {one_line(error)}") from None

    def _lasting(self, label: str) -> dict[str, Any]:
        """What makes an actor outlive this process, where it is to."""
        if self._kept is None:
            return {}
        return {"name": f"{self._kept.name}-{label}", "namespace": NAMESPACE, "lifetime": "detached"}

    def _begun(self, label: str, handle: Any) -> _Actor:
        here = handle.here.remote()
        handle.begin.remote(self._token.encode(), [*self._options, "--label", label])
        return _Actor(handle, here, handle.end.remote(ASK_S))

    def look(self) -> dict[str, Phase]:
        for label, actor in list(self._actors.items()):
            if not self._has(actor.end):
                continue
            if (how := self._how(actor.end)) is None:
                actor.end = actor.handle.end.remote(ASK_S)
                continue
            del self._actors[label]
            self._ends[label] = how
            self._ray.kill(actor.handle)  # what it had is Ray's again
        phases: dict[str, Phase] = {
            label: "running" if self._has(actor.here) else "waiting" for label, actor in self._actors.items()
        }
        self._waiting = sum(phase == "waiting" for phase in phases.values())
        return phases

    def cancel(self, labels: Sequence[str]) -> None:
        for label in labels:
            if (actor := self._actors.pop(label, None)) is not None:
                self._ends[label] = "it was not needed any more"
                self._ray.kill(actor.handle)

    def why(self, label: str) -> str:
        return self._ends.get(label, "")

    def waits(self) -> str:
        agents = "1 agent waits" if self._waiting == 1 else f"{self._waiting} agents wait"
        return f"{agents} for Ray nodes with {self._asked} free" if self._waiting else ""

    def close(self) -> None:
        """Agents that were told to end get a moment for it, and their actors for what lies about."""
        if self._closed:
            return
        self._closed = True
        self.look()  # so that each has been asked how it ends
        running = [actor.end for actor in self._actors.values() if self._has(actor.here)]
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=END_LIMIT_S, fetch_local=False)
        self.cancel(list(self._actors))
        if self._kept is not None:
            forget(self._kept.folder)
        self._leave()

    def _has(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0, fetch_local=False)[0])

    def _how(self, reference: Any) -> str | None:
        try:
            end: AgentEnd | None = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return one_line(error)
        return None if end is None else end.said or f"exit code {end.code}"


def left_actors(ray: Any, name: str) -> Mapping[str, Any]:
    """The actors of the controller before this one that are called ``name``, by their labels, the oldest first."""
    found = {}
    for told in ray.util.list_named_actors(all_namespaces=True):
        mine = re.fullmatch(rf"{re.escape(name)}-(actor-([0-9]{{1,9}}))", told["name"])
        if mine and told["namespace"] == NAMESPACE:
            try:
                found[int(mine[2])] = mine[1], ray.get_actor(told["name"], namespace=NAMESPACE)
            except ValueError:  # it has ended meanwhile
                continue
    return {label: handle for _, (label, handle) in sorted(found.items())}


def end_left(name: str) -> int:
    """End the actors that are called ``name``; how many there were. The process must have joined a Ray cluster."""
    ray = need_ray()
    handles = left_actors(ray, name).values()
    for handle in handles:
        ray.kill(handle)
    return len(handles)
