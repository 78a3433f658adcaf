"""Monitors by name, and the simplest of them, the smoothed training loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from elastune.adapt.monitors import base
from elastune.adapt.monitors.base import Monitor, Need, Reading, State
from elastune.adapt.monitors.curvature import Curvature
from elastune.adapt.monitors.noise_scale import NoiseScale, PreconditionedNoiseScale
from elastune.adapt.monitors.performance import Performance
from elastune.core.decisions import Signal
from elastune.core.errors import UserError
from elastune.core.options import Range, check, options_of, read, split
from elastune.core.plugins import Plugins

# The training loss, smoothed.
#
# Bias and variance: it is the mean over the batches of the last ``memory`` readings, each at its own step's
# parameters. So it lags behind while the loss falls. It is weighted by the batch: a short last batch of an epoch
# counts for what it holds, and after a change of batch every sample counts alike.


@dataclass(frozen=True)
class Loss(Monitor):
    """Gives the signal ``loss``, the smoothed training loss.

    Args:
        every: Steps from one reading to the next.
        memory: The length of the average, in readings; 1 gives the newest batch's loss.
    """

    every: Annotated[int, Range(1)] = 1
    memory: Annotated[float, Range(1)] = 20.0

    name = "loss"
    gives = frozenset({"loss"})
    needs = frozenset[Need]()

    def __post_init__(self) -> None:
        check(self.name, self)

    def init(self) -> State:
        return base.empty(2)

    def update(self, state: State, reading: Reading) -> State:
        return base.with_value(state, reading.loss, reading.batch, self.memory)

    def signals(self, state: State) -> dict[str, Signal]:
        loss = base.mean(state)
        return {} if loss is None else {"loss": loss}


# Monitors by name: the library's own, and those of installed packages (entry points ``elastune.monitors``).

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
