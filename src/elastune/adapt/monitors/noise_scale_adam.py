"""The gradient noise scale as Adam sees it: of gradients divided by sqrt(v) + eps, with Adam's second moment v.

Source: Qiao et al. 2021, "Pollux", section 3.1 and its implementation AdaptDL (``gradient_noise_scale.py``, class
``AdamGradientNoiseScale``), which preconditions gradients before it takes their norms. Adam takes large steps along
small gradients, so noise there counts for as much as noise elsewhere. The plain noise scale is ruled by the few
parameters with the largest gradients.

Bias and variance are those of ``noise_scale``, given v. v is that of before the step, hence independent of the step's
samples. It moves with the run, and with it the unit of both variance and square. Their ratio, the scale, has no unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastune.adapt.monitors.base import Reading, State
from elastune.adapt.monitors.noise_scale import NoiseScale, estimate, with_norms
from elastune.core.decisions import Signal


@dataclass(frozen=True)
class PreconditionedNoiseScale(NoiseScale):
    """As ``NoiseScale``, of the gradient as Adam sees it.

    Gives the signals ``noise_scale_adam``, ``gradient_variance_adam`` and ``gradient_square_adam``.
    """

    name = "noise_scale_adam"
    gives = frozenset({"noise_scale_adam", "gradient_variance_adam", "gradient_square_adam"})
    needs = frozenset({"preconditioned"})

    def update(self, state: State, reading: Reading) -> State:
        return with_norms(state, reading.preconditioned, self.memory)

    def signals(self, state: State) -> dict[str, Signal]:
        return {f"{name}_adam": signal for name, signal in estimate(state).items()}
