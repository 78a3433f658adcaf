"""Monitors by name: the library's own, and those of installed packages (entry points ``elastune.monitors``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata
from types import MappingProxyType

from elastune.adapt.monitors.base import Monitor
from elastune.adapt.monitors.curvature import Curvature
from elastune.adapt.monitors.loss import Loss
from elastune.adapt.monitors.noise_scale import NoiseScale
from elastune.adapt.monitors.noise_scale_adam import PreconditionedNoiseScale
from elastune.adapt.monitors.performance import Performance
from elastune.core.errors import UserError
from elastune.core.options import options_of, read, split

ENTRY_POINTS = "elastune.monitors"
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
    """The class of that name that an installed package offers."""
    offered = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    if name not in offered:
        raise UserError("a monitor must be known", name, f"use one of {', '.join([*MONITORS, *sorted(offered)])}")
    try:
        kind = offered[name].load()
    except Exception as error:
        raise UserError(
            f"an installed monitor must load: {type(error).__name__}: {error}", offered[name].value, "fix its package"
        ) from error
    if not isinstance(kind, type) or not issubclass(kind, Monitor) or getattr(kind, "name", None) != name:
        fix = f"subclass elastune.adapt.monitors.base.Monitor with name = {name!r}"
        raise UserError("an installed monitor is a Monitor of its entry point's name", offered[name].value, fix)
    return kind
