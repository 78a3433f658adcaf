"""Monitors by name: the library's own, and those of installed packages (entry points ``elastune.monitors``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from elastune.adapt.monitors.base import Monitor
from elastune.adapt.monitors.curvature import Curvature
from elastune.adapt.monitors.loss import Loss
from elastune.adapt.monitors.noise_scale import NoiseScale
from elastune.adapt.monitors.noise_scale_adam import PreconditionedNoiseScale
from elastune.adapt.monitors.performance import Performance
from elastune.core.errors import UserError
from elastune.core.options import options_of, read, split
from elastune.core.plugins import Plugins

INSTALLED = Plugins("elastune.monitors", "monitor")
"""Monitors of other packages: subclasses of ``Monitor``."""
_OWN: tuple[type[Monitor], ...] = (NoiseScale, PreconditionedNoiseScale, Performance, Curvature, Loss)
MONITORS: Mapping[str, type[Monitor]] = MappingProxyType({kind.name: kind for kind in _OWN})


def parse(text: str) -> Monitor:
    """Return the monitor that ``text`` asks for: "noise_scale" or "noise_scale:every=10,memory=50".

    Raises:
        UserError: For an unknown name or option, and for an impossible value of an option.
    """
    name, options = _split(text)
    kind = MONITORS.get(name) or _installed(name)
    return kind(**read(name, options, options_of(kind)))


def choose(texts: Iterable[str]) -> tuple[Monitor, ...]:
    """Return one monitor for each name in ``texts``, in the order of first mention.

    A text with options replaces a bare name.

    Raises:
        UserError: Where two texts ask for different options of one monitor.
    """
    chosen: dict[str, tuple[bool, Monitor]] = {}
    for text in texts:
        monitor, explicit = parse(text), bool(_split(text)[1])
        was_explicit, before = chosen.get(monitor.name, (False, monitor))
        if explicit and was_explicit and monitor != before:
            raise UserError("a monitor has one set of options", f"{before} and {monitor}", "keep one of them")
        chosen[monitor.name] = (True, monitor) if explicit else (was_explicit, before)
    return tuple(monitor for _, monitor in chosen.values())


def _split(text: str) -> tuple[str, str]:
    return split(text, "a monitor", "noise_scale or noise_scale:every=10,memory=50")


def _installed(name: str) -> type[Monitor]:
    """The class of that name which an installed package offers."""
    if name not in INSTALLED.names():
        known = ", ".join([*MONITORS, *INSTALLED.names()])
        raise UserError("a monitor must be known", name, f"use one of {known}")
    kind: type[Monitor] = INSTALLED.load_class(name, Monitor)
    return kind
