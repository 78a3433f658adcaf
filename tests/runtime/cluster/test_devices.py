from __future__ import annotations

import pytest

from elastune.core.errors import UserError
from elastune.runtime.placement import assign, devices, least_used_first

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


def test_this_machine() -> None:
    assert devices() == ("cpu",) or all(name.startswith("cuda:") for name in devices())


def test_workers_of_a_run_get_gpus_of_their_own_first() -> None:
    """Then those that other runs leave alone."""
    names = ("cuda:0", "cuda:1", "cuda:2")
    assert least_used_first(names, ["cuda:0"], ["cuda:1", "cuda:1", "cuda:2"]) == ["cuda:2", "cuda:1", "cuda:0"]
    assert least_used_first(names, [], ["cuda:0"]) == ["cuda:1", "cuda:2", "cuda:0"]
    assert least_used_first(names, ["cuda:0", "cuda:1", "cuda:2"], ["cuda:0"]) == ["cuda:1", "cuda:2", "cuda:0"]
