"""An agent as its controller knows it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from elastune.cluster.agents.facts import HostReport
from elastune.cluster.agents.messages import AgentHello, HostLooked, HostNoticed, WorkerSeen
from elastune.cluster.launcher import Bootstrap
from elastune.core.cost import ON_DEMAND
from elastune.elastic.coordinator.connection import Connection
from elastune.elastic.protocol.elsewhere import at_host
from elastune.elastic.protocol.handshake import derived

LOOKS = 3


@dataclass
class AgentHost:
    """One that was let in. ``workers``: those that it has, by key, and ``unnamed``: so many more that it kept from a
    controller before; ``notice``: it will go, and gets no more; ``kind``: of its machine (``core.cost.KINDS``);
    ``label``: what whoever started it calls it. ``looks``: how often it was asked to look for the run's folder, and
    what it ``looked`` last; ``blind``: it does not see that; ``mixes``: its address is of another kind than others'."""

    host: str
    room: int
    connection: Connection
    heard_at: float
    workers: dict[int, Bootstrap] = field(default_factory=dict)
    kind: str = ON_DEMAND
    sights: dict[int, WorkerSeen] = field(default_factory=dict)
    notice: HostNoticed | None = None
    probed_s: float | None = None
    report: HostReport | None = None
    unnamed: int = 0
    label: str = ""
    looks: int = 0
    looked: HostLooked | None = None
    looks_again: bool = False
    blind: bool = False
    mixes: bool = False

    @classmethod
    def greeted(cls, hello: AgentHello, connection: Connection, now: float) -> AgentHost:
        """One that begins with ``hello`` at the time ``now``."""
        kept, label = hello.kept, hello.label
        return cls(hello.host, hello.workers, connection, now, kind=hello.host_kind, unnamed=kept, label=label)

    @property
    def usable(self) -> bool:
        """Whether it may get workers, as far as it is known."""
        return not (self.notice or self.blind or self.mixes or (self.looks and self.looked is None))

    def asked_to_look(self) -> None:
        """Until it answers it gets no workers."""
        self.looks += 1
        self.looked, self.looks_again, self.blind, self.mixes = None, False, False, False

    def has_looked(self, found: HostLooked, others: Collection[int]) -> None:
        """It sees what is ``found``. ``others``: the kinds of address (4, 6; 0 is not known) of usable hosts.

        The folder of a network may show a new file late: it is to look again before it counts as blind.
        """
        kinds = set(others) - {0}
        self.looks_again = found.sees is False and self.looks < LOOKS
        if not self.looks_again:
            self.looked, self.blind = found, found.sees is False
            self.mixes = bool(found.ip and kinds) and found.ip not in kinds

    @property
    def free(self) -> int:
        """The room that is left."""
        return max(0, self.room - len(self.workers) - self.unnamed) if self.usable else 0


def as_kept(worker: Bootstrap, host: str, token: str) -> Bootstrap:
    """A worker of the controller before, as its agent names it, for this one at ``host``, whose agents have ``token``:
    its run's coordinator listens there by now, too."""
    return replace(worker, coordinator=at_host(worker.coordinator, host), token=derived(token, worker.token))
