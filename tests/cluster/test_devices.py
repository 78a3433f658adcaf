from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from elastune.cluster.devices import assign, backend, cores, devices, quota_cores
from elastune.core.errors import UserError

TWO = ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("device", "available", "given"),
    [
        ("cpu", ("cpu",), ["cpu"] * 5),
        ("cpu", TWO, ["cpu"] * 5),
        ("auto", ("cpu",), ["cpu"] * 5),
        ("auto", TWO, ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", TWO, ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", ("cuda:1", "cuda:0"), ["cuda:1", "cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("cuda", ("cuda:0",), ["cuda:0"] * 5),
        ("cuda:1", TWO, ["cuda:1"] * 5),
    ],
)
def test_assignment(device: str, available: tuple[str, ...], given: list[str]) -> None:
    assert [assign(device, local_rank, available) for local_rank in range(5)] == given


@pytest.mark.parametrize(
    ("device", "available"), [("cuda", ("cpu",)), ("cuda:2", TWO), ("gpu", TWO), ("", TWO), ("cuda:0", ("cpu",))]
)
def test_a_device_that_is_not_there(device: str, available: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="choose one of cpu, auto"):
        assign(device, 0, available)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["cpu"], "gloo"),
        (["cpu", "cpu"], "gloo"),
        (["cuda:0"], "nccl"),
        (["cuda:0", "cuda:1"], "nccl"),
        (["cuda:0", "cuda:0"], "gloo"),
        (["cuda:0", "cuda:1", "cuda:0"], "gloo"),
        (["cuda:0", "cpu"], "gloo"),
    ],
)
def test_backend(given: list[str], name: str) -> None:
    assert backend(given) == name


def test_this_machine() -> None:
    assert 1 <= cores() <= len(os.sched_getaffinity(0))
    assert devices() == ("cpu",) or all(name.startswith("cuda:") for name in devices())


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
