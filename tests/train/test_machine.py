"""One answer to how many cores there are: affinity and the control group's quota together."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from elastune.runtime.job.run import machine_context
from elastune.train.machine import cores, link, machine_memory_bytes, quota_cores


def test_this_machine() -> None:
    assert 1 <= cores() <= len(os.sched_getaffinity(0))
    assert machine_context()["cores"] == cores()


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n"}, math.inf),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 0.5),
        ({"proc/self/cgroup": "0::/not/mounted\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
    ],
)
def test_control_group_quotas(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota_cores(tmp_path) == quota
    assert cores(tmp_path) == max(1, min(len(os.sched_getaffinity(0)), int(min(quota, 1e9))))


@pytest.mark.parametrize(
    ("file", "group"),
    [("sys/fs/cgroup/a/memory.max", "0::/a/b"), ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4:memory:/x")],
)
def test_memory_is_what_a_control_group_leaves(tmp_path: Path, file: str, group: str) -> None:
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n")
    (tmp_path / file).parent.mkdir(parents=True)
    for text, left in (("1000000\n", 1_000_000), ("max\n", there), (f"{2**63 - 4096}\n", there)):
        (tmp_path / file).write_text(text)
        assert machine_memory_bytes(tmp_path) == left


def test_the_link_is_told_with_its_speed_where_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert link(tmp_path) == "lo"
    (tmp_path / "sys/class/net/eth7").mkdir(parents=True)
    (tmp_path / "sys/class/net/eth7/speed").write_text("10000\n")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert link(tmp_path) == "eth7, 10000 Mbit/s"
    (tmp_path / "sys/class/net/eth7/speed").write_text("-1\n")
    assert link(tmp_path) == "eth7"
