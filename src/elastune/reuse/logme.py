"""How useful a model's features would be for another task, without training: the evidence of linear models on them.

LogME: You, Liu, Wang, Long 2021, "LogME: Practical Assessment of Pre-trained Models for Transfer Learning" (ICML). For
features F (n samples, d numbers each) and one target y, w ~ N(0, I / alpha) and y ~ N(F w, I / beta); the logarithm of
p(y | F, alpha, beta), largest over alpha and beta, over n is the score; of several targets (each class against the
rest, each value) the mean. With m = beta A^-1 F'y and A = alpha I + beta F'F it is

    n/2 log beta + d/2 log alpha - n/2 log 2 pi - beta/2 |F m - y|^2 - alpha/2 |m|^2 - 1/2 log |A|

and alpha and beta are found by MacKay's fixed point: alpha = g / |m|^2, beta = (n - g) / |F m - y|^2 with
g = sum of beta s_i / (alpha + beta s_i) over the eigenvalues s_i of F'F. One singular value decomposition serves all.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from elastune.reuse.task import Array

EPSILON = 1e-5  # as the authors' program has it: neither alpha nor beta becomes infinite
LEAST = 1e-12
ROUNDS = 1000
PRECISION = 1e-9  # of alpha / beta, from one round to the next


def logme(features: Array, targets: Array) -> float:
    """Return the score; higher is better.

    Args:
        features: Of shape (n, d), with n at least 2.
        targets: Of shape (n, k), one column a target.
    """
    left, singular, _ = np.linalg.svd(features, full_matrices=False)
    eigen = singular**2
    along = left.T @ targets  # of each target the part that features can say
    beyond = np.maximum((targets**2).sum(0) - (along**2).sum(0), 0.0)
    rows, width = features.shape
    scores = [_evidence(eigen, along[:, at], float(beyond[at]), rows, width) for at in range(targets.shape[1])]
    return float(np.mean(scores))


def targets_of(right: NDArray[np.generic]) -> Array:
    """Return the columns of a task: each class against the rest, for integers, or else the values."""
    if right.dtype.kind in "iub":
        classes = np.unique(right)
        return np.asarray((right[:, None] == classes[None]).astype(float))
    return np.asarray(right.reshape(len(right), -1), dtype=float)


def _evidence(eigen: Array, along: Array, beyond: float, rows: int, width: int) -> float:
    """Of one target, at the best alpha and beta."""
    alpha = beta = 1.0
    for _ in range(ROUNDS):
        weights2, error2, known = _fit(eigen, along, beyond, alpha, beta)
        before = alpha / beta
        alpha = max(known / (weights2 + EPSILON), LEAST)  # features that are all 0 say nothing of it
        beta = max((rows - known) / (error2 + EPSILON), LEAST)
        if abs(alpha / beta - before) <= PRECISION * before:
            break
    weights2, error2, _ = _fit(eigen, along, beyond, alpha, beta)
    log_det = float(np.log(alpha + beta * eigen).sum()) + (width - len(eigen)) * math.log(alpha)
    evidence = rows * math.log(beta) + width * math.log(alpha) - rows * math.log(2 * math.pi)
    return (evidence - beta * error2 - alpha * weights2 - log_det) / 2 / rows


def _fit(eigen: Array, along: Array, beyond: float, alpha: float, beta: float) -> tuple[float, float, float]:
    """|m|^2, |F m - y|^2 and g."""
    share = beta * eigen / (alpha + beta * eigen)
    weights2 = float((beta**2 * eigen * along**2 / (alpha + beta * eigen) ** 2).sum())
    error2 = beyond + float((((1 - share) * along) ** 2).sum())
    return weights2, error2, float(share.sum())
