"""One answer to how many cores there are: affinity and the control group's quota together."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from elastune.job.machine import machine_context
from elastune.train.machine import cores, quota_cores


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
