"""The facts about a host that its agent reports, and whether a run can use the host.

A controller places a marker file in the folder of the run. A host that can read it shares that folder; a host that
cannot has a folder of its own and sends its files. The next controller finds which of both it was.
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

LOCAL = ".own-folders"  # in the folder of a run whose hosts push their files
DIGITS = 32  # of a mark's text; its name has the first eight of them
_MARK = re.compile(r"\.elastune-([0-9a-f]{8})")


@dataclass(frozen=True)
class FolderMarker:
    """The file ``path``, which holds ``text`` where it is the controller's own."""

    path: Path
    text: str

    def remove(self) -> None:
        """Idempotent."""
        with suppress(OSError):  # a hidden file of 32 bytes is no reason to fail
            self.path.unlink(missing_ok=True)


def place_marker(folder: Path) -> FolderMarker:
    """Write a file with a random text into ``folder``. Raises ``UserError``."""
    text = secrets.token_hex(DIGITS // 2)
    mark = FolderMarker(folder.resolve() / f".elastune-{text[:8]}", text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.path.write_text(text)
    except OSError as error:
        rule = "the output folder must be writable"
        raise UserError(rule, f"{folder}: {error.strerror}", "choose another folder") from None
    return mark


def remove_stale_markers(folder: Path, kept: FolderMarker | None) -> None:
    """Remove the marks in ``folder`` of controllers that were killed: every one but ``kept``, and no other file.

    For whoever has the run in ``folder``: nobody else may want marks there.
    """
    for path in folder.resolve().glob(".elastune-*"):
        if (kept is None or path != kept.path) and (match := _MARK.fullmatch(path.name)) and _is_mark(path, match[1]):
            FolderMarker(path, "").remove()


def _is_mark(path: Path, begins: str) -> bool:
    """Whether ``place_marker`` has written the file, in whole or, if it was killed meanwhile, in part."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > DIGITS:
            return False
        text = path.read_bytes()
    except OSError:
        return False
    return not text or (re.fullmatch(rb"[0-9a-f]+", text) is not None and text[:8] == begins.encode()[: len(text)])


def write_folder_mode(folder: Path, *, local: bool) -> None:
    """For the next controller: whether hosts push the files of the run in ``folder``. Raises ``UserError``."""
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
    """Whether the controller before had hosts push the files of the run in ``folder``."""
    return (folder / LOCAL).is_file()


MOST_SKEW_S = 5.0  # beyond it the times of logs, certificates and leases of clouds mean something else elsewhere


def facts(request: HostFactsRequest) -> HostFacts:
    """This machine's, for its agent to tell."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return HostFacts(list(devices()), interface, time.time(), _sees(request.path, request.text))


def probe_folder(request: FolderProbeRequest) -> FolderProbeResult:
    """What this machine sees, for its agent to tell; quickly."""
    try:
        address = address_of(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    except UserError:  # it has gone, or nobody has chosen one
        return FolderProbeResult(_sees(request.path, request.text))
    return FolderProbeResult(_sees(request.path, request.text), 6 if ":" in address else 4)


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
        line = (
            f"host {self.host}: {self.versions}; room for {self.workers} workers on {', '.join(self.facts.devices)}; "
            f"clock {self.skew_s * 1e3:+.0f} ms (± {self.skew_error_s * 1e3:.0f}); "
            f"interface {self.facts.interface or 'unknown'}; {folder[self.facts.shared]}"
        )
        return f"{line}; unfit: {self.unfit}" if self.unfit else line
