"""What a host is like, as its agent tells it; and whether a run can use it: a pure judgement."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from elastune.cluster.agents.messages import HostFacts, HostLooked, LookFor, ProbeHost
from elastune.cluster.devices import devices
from elastune.comm.interfaces import address_of
from elastune.core.errors import UserError

MOST_SKEW_S = 5.0  # beyond it the times of logs, certificates and leases of clouds mean something else elsewhere


def facts(asked: ProbeHost) -> HostFacts:
    """This machine's, for its agent to tell."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return HostFacts(list(devices()), interface, time.time(), _sees(asked.path, asked.text))


def looked(asked: LookFor) -> HostLooked:
    """What this machine sees, for its agent to tell; quickly."""
    try:
        address = address_of(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    except UserError:  # it has gone, or nobody has chosen one
        return HostLooked(_sees(asked.path, asked.text))
    return HostLooked(_sees(asked.path, asked.text), 6 if ":" in address else 4)


def _sees(path: str, text: str) -> bool | None:
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            return file.read(len(text) + 1) == text.encode()
    except (OSError, ValueError):  # a path with a zero in it is a ValueError
        return False


@dataclass(frozen=True)
class HostReport:
    """A host as its controller sees it. ``skew_s``: its clock is so far ahead, give or take ``skew_error_s``.

    ``facts``: None where it has not answered; ``refused``: why it was not let in.
    """

    host: str
    workers: int = 0
    versions: str = ""
    facts: HostFacts | None = None
    skew_s: float = 0.0
    skew_error_s: float = 0.0
    refused: str = ""

    @property
    def unfit(self) -> str:
        """Why a run cannot use it; "" where it can."""
        if self.refused:
            return self.refused
        if self.facts is None:
            return "it has not answered"
        if self.facts.shared is False:
            return "it does not see the output folder"
        if abs(self.skew_s) - self.skew_error_s > MOST_SKEW_S:
            return f"its clock is {self.skew_s:+.1f} s from the controller's"
        return ""

    @property
    def line(self) -> str:
        """All of it in one line."""
        if self.facts is None:
            return f"host {self.host}: unfit: {self.unfit}"
        folder = {None: "output folder not asked about", True: "output folder shared", False: "output folder not there"}
        told = (
            f"host {self.host}: {self.versions}; room for {self.workers} workers on {', '.join(self.facts.devices)}; "
            f"clock {self.skew_s * 1e3:+.0f} ms (± {self.skew_error_s * 1e3:.0f}); "
            f"interface {self.facts.interface or 'unknown'}; {folder[self.facts.shared]}"
        )
        return f"{told}; unfit: {self.unfit}" if self.unfit else told
