"""How many workers a gradient noise scale supports, by the fitted step-time model. Pure.

Batches up to about the noise scale B keep their efficiency: at B a step makes half of the progress that a step with an
infinite batch makes (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, section 2.2).
A worker with a share of b samples spends base_s + per_sample_s x b on a step, of which only the part that grows with b
is shared out among workers; it is efficient by per_sample_s x b / (base_s + per_sample_s x b).
"""

from __future__ import annotations

import math

EFFICIENT = 0.5  # the part of a worker's step that must go into samples


def smallest_share(base_s: float, per_sample_s: float, efficiency: float = EFFICIENT) -> float:
    """Samples per worker at which ``efficiency`` of its step goes into samples; at least 1, infinite where none do.

    With ``efficiency`` one half that is base_s / per_sample_s. Raises ``ValueError`` for times that are no times and an
    efficiency outside [0, 1).
    """
    if not (0 <= base_s < math.inf and 0 <= per_sample_s < math.inf and 0 <= efficiency < 1):
        raise ValueError(f"no times or no efficiency: {base_s}, {per_sample_s}, {efficiency}")
    if base_s == 0:
        return 1.0
    if per_sample_s == 0:
        return math.inf
    return max(1.0, base_s / per_sample_s * efficiency / (1 - efficiency))


def supported_workers(noise_scale: float, share: float) -> int:
    """The largest W with noise_scale / W >= ``share``, the samples that each must have; 0 where there is none."""
    if not (noise_scale >= 0 and noise_scale < math.inf and share >= 1):
        raise ValueError(f"a noise scale is finite and a share at least 1, not {noise_scale} and {share}")
    return math.floor(noise_scale / share)
