"""Devices that plans are made for without having one: their figures, and what the step model takes from them."""

from __future__ import annotations

import pytest

from elastune.core.errors import UserError
from elastune.core.plan.step_model import DEVICES, REACHED, device_named
from elastune.core.plan.step_time import CONSTANTS


def test_every_device_says_where_its_figures_are_from() -> None:
    across = {"across_hop_s", "across_byte_s"}  # as declared with --link
    for name, device in DEVICES.items():
        assert {constant.name for constant in device.constants()} == set(CONSTANTS) - across
        assert device.line.startswith(f"assumed: {device.name}, ")
        assert device.source.endswith("data sheet") == (device.kind == "cuda")
        assert device_named(name.upper()) is device


def test_arithmetic_and_memory_are_the_published_ones() -> None:
    flop_s = {constant.name: constant.prior for constant in device_named("a100").constants()}["flop_s"]
    assert 1 / (flop_s * REACHED) == pytest.approx(19.5e12)
    assert [device_named(name).memory_bytes for name in ("t4", "l4", "v100", "h100")] == [16e9, 24e9, 32e9, 80e9]


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match="use one of h200, h100, a100"):
        device_named("h1000")
