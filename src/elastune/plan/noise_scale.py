"""What a measured gradient noise scale says of the global batch, in words. Pure.

With batch b and noise scale B a training needs 1 + b / B times the samples that the smallest batches need, and
1 + B / b times the steps that the largest need (McCandlish et al., "An Empirical Model of Large-Batch Training", 2018,
section 2.3): below B larger batches save nearly as many steps as they are larger, far beyond it they save none.
"""

from __future__ import annotations

import math

from elastune.core.text import number

SOURCE = "McCandlish et al. 2018"


def batch_against_noise(
    batch: int,
    scale: float | None,
    error: float | None,
    *,
    whose: str,
    when: str = "at the end of training",
    supports: str = "",
    outweighed: str = "",
) -> str:
    """One sentence, without a capital and a full stop: ``batch`` beside the noise scale of a training.

    Args:
        batch: the global batch, in samples.
        scale: the noise scale, in samples; None where it was not measured.
        error: its standard error; None, or not finite, where it is not known.
        whose: "the pick's", "the run's": whose batch it is.
        when: the scale was measured; it grows as a training goes on.
        supports: what else follows from the scale, said of batches up to it.
        outweighed: what counts for more, said where the batch is beyond it.

    Returns:
        The sentence; "" where the noise scale is not known.
    """
    if scale is None or not 0 < scale < math.inf:
        return ""
    spread, within = "", scale
    if error is not None and math.isfinite(error):
        spread, within = f" ± {samples_text(error)}", scale + error
    first = (
        f"gradient noise scale {samples_text(scale)}{spread} {when}: batches up to about that use "
        f"their samples well ({SOURCE}){supports}; {whose} batch of {batch}"
    )
    if batch <= within:
        return f"{first} is within it"
    times = f"by that model {number(1 + batch / scale, 2)} times those of small batches"
    return f"{first} is beyond it, so it buys time with samples: {times}{outweighed}"


def samples_text(value: float) -> str:
    """Samples that need not be whole: "412", "1.1"."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
