"""Who gets workers: hosts that see the run's folder, and whose addresses are of one kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.runtime.agents.host_report import (
    had_local_folders,
    place_marker,
    probe_folder,
    remove_stale_markers,
    write_folder_mode,
)
from elastune.runtime.agents.hosts import PROBES, AgentHost, FolderProbe
from elastune.runtime.agents.messages import FolderProbeRequest, FolderProbeResult
from elastune.runtime.clusters.hosts import HostsKind
from elastune.runtime.clusters.kind import CapacityRequest, has_own_folders
from elastune.runtime.clusters.ray import RayKind


class Watched:
    """Agents of which some answer."""

    def __init__(self, count: int) -> None:
        agent: Any = AgentHost
        self.agents: dict[int, AgentHost] = {n: agent(f"host{n}", 2, None, 0.0) for n in range(count)}
        self.asked: list[tuple[int, FolderProbeRequest]] = []
        self.said: list[str] = []
        self.lookout = FolderProbe(
            self.agents, lambda number, what: self.asked.append((number, what)), self.said.append
        )

    def answer(self, number: int, sees: bool | None, ip: Any = 4) -> None:
        self.lookout.record_answer(self.agents[number], FolderProbeResult(sees, ip))

    @property
    def free(self) -> list[int]:
        return [agent.free for agent in self.agents.values()]


def test_a_host_gets_workers_once_it_has_seen_the_folder() -> None:
    watched = Watched(2)
    watched.answer(0, False)
    assert (watched.free, watched.lookout.hosts_without_folder()) == ([2, 2], []), "nobody was asked"
    watched.lookout.begin("/out/mark", "text")
    assert (watched.free, len(watched.asked)) == ([0, 0], 2)
    watched.answer(0, True)
    for _ in range(PROBES):  # a folder of a network may show a new file late
        assert watched.lookout.hosts_without_folder() == []
        watched.answer(1, False)
        watched.lookout.again()
    assert (watched.free, watched.lookout.hosts_without_folder(), watched.lookout.hosts_without_folder()) == (
        [2, 0],
        ["host1"],
        [],
    )
    assert [number for number, _ in watched.asked] == [0, 1, *[1] * (PROBES - 1)]
    watched.lookout.begin("", "")  # its files are taken now
    watched.answer(0, None)
    watched.answer(1, None)
    assert watched.free == [2, 2]


def test_a_file_that_comes_late_is_seen() -> None:
    watched = Watched(1)
    watched.lookout.begin("/out/mark", "text")
    watched.answer(0, False)
    watched.lookout.again()
    watched.answer(0, True)
    watched.lookout.again()
    assert (watched.free, watched.lookout.hosts_without_folder(), len(watched.asked)) == ([2], [], 2)


@pytest.mark.parametrize(("kinds", "free"), [((4, 4), [2, 2]), ((4, 6), [2, 0]), ((6, 4), [2, 0]), ((4, 0), [2, 2])])
def test_hosts_with_other_addresses_get_no_workers(kinds: tuple[int, int], free: list[int]) -> None:
    watched = Watched(2)
    watched.lookout.begin("", "")
    for number, kind in enumerate(kinds):
        watched.answer(number, None, kind)
    assert watched.free == free
    assert len(watched.said) == free.count(0)
    assert all(f"host1 gets no workers: its interface has IPv{kinds[1]}" in line for line in watched.said)


def test_what_an_agent_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    mark = place_marker(tmp_path / "out")
    assert probe_folder(FolderProbeRequest(str(mark.path), mark.text)) == FolderProbeResult(True, 4)
    assert probe_folder(FolderProbeRequest(str(mark.path), "another's")) == FolderProbeResult(False, 4)
    mark.remove()
    mark.remove()
    assert list((tmp_path / "out").iterdir()) == []
    for path in (str(mark.path), str(tmp_path), "\0"):
        assert probe_folder(FolderProbeRequest(path, mark.text)).sees is False
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    assert probe_folder(FolderProbeRequest("", "")) == FolderProbeResult(None, 0)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="must be writable"):
        place_marker(tmp_path / "file")


def test_marks_of_killed_controllers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    own, left = place_marker(tmp_path), place_marker(tmp_path)
    (tmp_path / ".elastune-01234567").touch()  # killed before it had written more
    kept = {
        ".elastune-deadbeef": "a text of somebody's",
        ".elastune-89abcdef": "0" * 32,
        ".elastune-notes": "",
        "a": "b",
    }
    for name, text in kept.items():
        (tmp_path / name).write_text(text)
    (tmp_path / ".elastune-aaaaaaaa").symlink_to(left.path)
    (tmp_path / ".elastune-bbbbbbbb").mkdir()
    remove_stale_markers(tmp_path, own)
    left_there = {path.name for path in tmp_path.iterdir()}
    assert left_there == {*kept, own.path.name, ".elastune-aaaaaaaa", ".elastune-bbbbbbbb"}
    remove_stale_markers(tmp_path, None)
    assert not own.path.exists()
    remove_stale_markers(tmp_path / "nowhere", None)


def test_what_was_found_out_holds_for_those_who_outlive_their_controller(tmp_path: Path) -> None:
    room, adopts = CapacityRequest(tmp_path, 1, 1), CapacityRequest(tmp_path, 1, 1, adopts=True)
    assert HostsKind(port=1).folder == RayKind().folder == "auto"
    assert (has_own_folders("auto", room), has_own_folders("auto", adopts)) == (None, False)
    write_folder_mode(tmp_path, local=True)
    assert had_local_folders(tmp_path)
    assert (has_own_folders("auto", room), has_own_folders("auto", adopts)) == (None, True)
    assert (has_own_folders("shared", adopts), has_own_folders("local", room)) == (False, True)
    write_folder_mode(tmp_path, local=False)
    assert has_own_folders("auto", adopts) is False
