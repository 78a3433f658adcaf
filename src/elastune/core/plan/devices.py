"""Devices that a plan can be made for without having one: vendors' data sheets, and assumptions based on them.

Figures of GPUs are from NVIDIA's data sheets (``Device.source``): float32 arithmetic outside of tensor cores (torch's
default), memory bandwidth, memory size, and the link within a node. These are peaks: a step reaches an assumed part of
them. What no data sheet has, such as the time to launch a kernel, is assumed, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from elastune.core.errors import UserError
from elastune.core.formatting import number
from elastune.core.plan.step_time import Constant

REACHED = 0.5  # of a published peak, assumed
WITHIN = 3.0  # the true value lies within this factor
UPDATE_TRAFFIC = 7  # bytes read or written for a byte of gradients by an optimizer with two moments
KERNEL_S = 1e-5  # to launch one from Python, assumed
KERNELS = 10  # of a layer, forward and backward, assumed
OPERATION_S = 2e-5  # to begin a collective operation or one hop of it, assumed


@dataclass(frozen=True)
class Device:
    """One worker's device. ``kind``: as ``--device`` of elastune run.

    Attributes:
        name: What the vendor calls it.
        kind: "cuda" or "cpu".
        peak_flop_s: Floating-point operations a second, float32.
        memory_bytes_s: Bytes a second from and to its memory.
        memory_bytes: Its memory; None: nothing is published.
        link_bytes_s: Bytes a second to another one of the same node, in one direction.
        source: Where the figures are from.
    """

    name: str
    kind: str
    peak_flop_s: float
    memory_bytes_s: float
    memory_bytes: float | None
    link_bytes_s: float
    source: str

    @property
    def line(self) -> str:
        """The assumptions, in one line."""
        memory = "" if self.memory_bytes is None else f", {number(self.memory_bytes / 1e9)} GB"
        return (
            f"assumed: {self.name}, {number(self.peak_flop_s / 1e12)} TFLOP/s in float32, "
            f"{number(self.memory_bytes_s / 1e12)} TB/s{memory} ({self.source}); steps reach {REACHED:.0%} of these "
            f"peaks, within a factor of {WITHIN:g}"
        )

    def constants(self) -> tuple[Constant, ...]:
        """Return what the step model assumes of the device before any measurement, without the links between nodes."""
        flop, byte, link = (1 / (REACHED * peak) for peak in (self.peak_flop_s, self.memory_bytes_s, self.link_bytes_s))
        constants = {
            "flop_s": (flop, WITHIN),
            "edge_flop_s": (flop, WITHIN),
            "split_byte_s": (byte, WITHIN),
            "whole_byte_s": (byte, WITHIN),
            "launch_s": (KERNELS * KERNEL_S, WITHIN),
            "tensor_begin_s": (OPERATION_S, WITHIN),
            "tensor_sum_s": (OPERATION_S, WITHIN),
            "tensor_byte_s": (link, WITHIN),
            "send_s": (OPERATION_S, WITHIN),
            "send_byte_s": (link, WITHIN),
            "gradient_hop_s": (OPERATION_S, WITHIN),
            "gradient_byte_s": (link, WITHIN),
            "update_byte_s": (UPDATE_TRAFFIC * byte, WITHIN),
            "pass_s": (1e-3, WITHIN),
            "fixed_s": (1e-3, WITHIN),
        }
        return tuple(Constant(name, *each) for name, each in constants.items())


def _gpu(name: str, tflop_s: float, gb_s: float, gb: float, link_gb_s: float, source: str) -> Device:
    """``link_gb_s``: as data sheets give it, both directions together."""
    return Device(name, "cuda", tflop_s * 1e12, gb_s * 1e9, gb * 1e9, link_gb_s / 2 * 1e9, f"NVIDIA, {source}")


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "h200": _gpu("NVIDIA H200 SXM", 67, 4800, 141, 900, "H200 Tensor Core GPU data sheet"),
        "h100": _gpu("NVIDIA H100 SXM", 67, 3350, 80, 900, "H100 Tensor Core GPU data sheet"),
        "a100": _gpu("NVIDIA A100 80GB SXM", 19.5, 2039, 80, 600, "A100 Tensor Core GPU data sheet"),
        "a100-40gb": _gpu("NVIDIA A100 40GB SXM", 19.5, 1555, 40, 600, "A100 Tensor Core GPU data sheet"),
        "v100": _gpu("NVIDIA V100 SXM2 32GB", 15.7, 900, 32, 300, "V100 Tensor Core GPU data sheet"),
        "l40s": _gpu("NVIDIA L40S", 91.6, 864, 48, 64, "L40S GPU data sheet"),
        "l4": _gpu("NVIDIA L4", 30.3, 300, 24, 64, "L4 Tensor Core GPU data sheet"),
        "a10": _gpu("NVIDIA A10", 31.2, 600, 24, 64, "A10 Tensor Core GPU data sheet"),
        "t4": _gpu("NVIDIA T4", 8.1, 300, 16, 32, "T4 Tensor Core GPU data sheet"),
        "cpu": Device("one core of a CPU", "cpu", 6e10, 1e10, None, 2e9, "of no data sheet: a server's core"),
    }
)
"""By the name that ``elastune plan --device`` takes."""


def device_named(name: str) -> Device:
    """Return the device of that name.

    Args:
        name: A name of ``DEVICES``, in letters of any case.

    Returns:
        Its published figures.

    Raises:
        UserError: For an unknown name.

    Example:
        >>> device_named("h100").memory_bytes
        80000000000.0
    """
    device = DEVICES.get(name.lower())
    if device is None:
        fix = f"use one of {', '.join(DEVICES)}, or --probe on the cluster"
        raise UserError("a plan's device must be one that is known", name[:100], fix)
    return device
