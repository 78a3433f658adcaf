"""The facts about a host that its agent reports, and whether a run can use the host.

A controller places a marker file in the folder of the run. A host that can read the file shares that folder. Any other
host has a folder of its own and sends its files. The controller notes which of both holds, for the next controller.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastune.core.errors import UserError
from elastune.parallel.comm.sockets import address_of
from elastune.runtime.agents.messages import FolderProbeRequest, FolderProbeResult, HostFacts, HostFactsRequest
from elastune.runtime.placement import devices

LOCAL = ".own-folders"  # in the folder of a run whose hosts send their files
DIGITS = 32  # of a marker's text; its name has the first eight of them
_MARKER = re.compile(r"\.elastune-([0-9a-f]{8})")


@dataclass(frozen=True)
class FolderMarker:
    """A file by which a host recognises the folder of a run: ``path`` holds the random ``text``."""

    path: Path
    text: str

    def remove(self) -> None:
        """Remove the file. Idempotent."""
        with suppress(OSError):  # a hidden file of 32 bytes is no reason to fail
            self.path.unlink(missing_ok=True)


def place_marker(folder: Path) -> FolderMarker:
    """Write a marker into ``folder``. Raises ``UserError`` if that fails."""
    text = secrets.token_hex(DIGITS // 2)
    marker = FolderMarker(folder.resolve() / f".elastune-{text[:8]}", text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.path.write_text(text)
    except OSError as error:
        rule = "the output folder must be writable"
        raise UserError(rule, f"{folder}: {error.strerror}", "choose another folder") from None
    return marker


def remove_stale_markers(folder: Path, current: FolderMarker | None) -> None:
    """Remove the markers in ``folder`` of controllers that were killed: all but ``current``, and no other file.

    Only the controller that has the run in ``folder`` may call this.
    """
    for path in folder.resolve().glob(".elastune-*"):
        if current is not None and path == current.path:
            continue
        if (name := _MARKER.fullmatch(path.name)) and _is_marker(path, name[1]):
            FolderMarker(path, "").remove()


def _is_marker(path: Path, begins: str) -> bool:
    """Whether ``place_marker`` has written the file: all of it, or a part if its process was killed meanwhile."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > DIGITS:
            return False
        text = path.read_bytes()
    except OSError:
        return False
    return not text or (re.fullmatch(rb"[0-9a-f]+", text) is not None and text[:8] == begins.encode()[: len(text)])


def write_folder_mode(folder: Path, *, local: bool) -> None:
    """Note in ``folder`` whether hosts send the files of its run, for the next controller. Raises ``UserError``."""
    try:
        if local:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LOCAL).touch()
        else:
            (folder / LOCAL).unlink(missing_ok=True)
    except OSError as error:
        rule = "the output folder must be writable"
        raise UserError(rule, f"{folder}: {error.strerror}", "choose another folder") from None


def had_local_folders(folder: Path) -> bool:
    """Whether hosts sent the files of the run in ``folder`` to the earlier controller."""
    return (folder / LOCAL).is_file()


MOST_SKEW_S = 5.0  # beyond it, times in logs, certificates and leases of clouds contradict each other


def facts(request: HostFactsRequest) -> HostFacts:
    """The properties of this machine."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return HostFacts(list(devices()), interface, time.time(), _sees(request.path, request.text))


def probe_folder(request: FolderProbeRequest) -> FolderProbeResult:
    """Whether this machine sees the file of ``request``, and which addresses its workers have. Quick."""
    try:
        address = address_of(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    except UserError:  # the interface is gone, or none was chosen
        return FolderProbeResult(_sees(request.path, request.text))
    return FolderProbeResult(_sees(request.path, request.text), 6 if ":" in address else 4)


def _sees(path: str, text: str) -> bool | None:
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            return file.read(len(text) + 1) == text.encode()
    except (OSError, ValueError):  # a path with a zero byte raises ValueError
        return False


@dataclass(frozen=True)
class HostReport:
    """What a controller knows about a host, for ``elastune doctor``.

    Attributes:
        host: The host's name.
        workers: The number of workers that it has room for.
        versions: The versions of the packages that must be equal everywhere.
        facts: The facts that its agent reported; None: the agent has not answered.
        skew_s: How far its clock is ahead of the controller's.
        skew_error_s: The largest error of ``skew_s``.
        refused: Why the controller did not admit it; "": the controller did.
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
        """Why a run cannot use this host; "" if it can."""
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
        """The report in one line."""
        if self.facts is None:
            return f"host {self.host}: unfit: {self.unfit}"
        folder = {None: "output folder not asked about", True: "output folder shared", False: "output folder not there"}
        line = (
            f"host {self.host}: {self.versions}; room for {self.workers} workers on {', '.join(self.facts.devices)}; "
            f"clock {self.skew_s * 1e3:+.0f} ms (± {self.skew_error_s * 1e3:.0f}); "
            f"interface {self.facts.interface or 'unknown'}; {folder[self.facts.shared]}"
        )
        return f"{line}; unfit: {self.unfit}" if self.unfit else line
