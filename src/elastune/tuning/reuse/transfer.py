"""Which kept model to start a new task from: sources are ranked by how useful their features would be there.

The rank is LogME: You, Liu, Wang, Long 2021, "LogME: Practical Assessment of Pre-trained Models for Transfer
Learning" (ICML). For features F (n samples, d numbers each) and one target y, w ~ N(0, I / alpha) and
y ~ N(F w, I / beta). The score is the logarithm of p(y | F, alpha, beta), largest over alpha and beta, divided by n.
For several targets (each class against the rest, each value) it is their mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import StudyStarted
from elastune.runtime.job.output import JOURNAL
from elastune.train.checkpoints.start_from import digest_of_weights
from elastune.train.predictions import HELD_OUT, check_name
from elastune.tuning.reuse.kept_models import Candidate, library
from elastune.tuning.reuse.predictions import IGNORED, Array
from elastune.tuning.search.objective import Objective
from elastune.tuning.study.results import Study

EPSILON = 1e-5  # as in the authors' program: it keeps alpha and beta finite
LEAST = 1e-12
ROUNDS = 1000
PRECISION = 1e-9  # of alpha / beta, from one round to the next
ROWS = 20_000  # the most rows that are read: an even sample of more
WIDEST = 8192  # the most numbers of a sample: the time of the decomposition grows with their square


# --- the score ---


def logme(features: Array, targets: Array) -> float:
    """Return the LogME score; higher is better.

    With m = beta A^-1 F'y and A = alpha I + beta F'F, the logarithm of p(y | F, alpha, beta) is

        n/2 log beta + d/2 log alpha - n/2 log 2 pi - beta/2 |F m - y|^2 - alpha/2 |m|^2 - 1/2 log |A|

    MacKay's fixed point gives alpha and beta: alpha = g / |m|^2 and beta = (n - g) / |F m - y|^2. Here g is the sum of
    beta s_i / (alpha + beta s_i) over the eigenvalues s_i of F'F. One singular value decomposition serves all targets.

    Args:
        features: Of shape (n, d), with n at least 2.
        targets: Of shape (n, k), one column a target.
    """
    left, singular, _ = np.linalg.svd(features, full_matrices=False)
    eigen = singular**2
    along = left.T @ targets  # the part of each target that the features span
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
    """The score of one target, at the best alpha and beta."""
    alpha = beta = 1.0
    for _ in range(ROUNDS):
        weights2, error2, effective = _fit(eigen, along, beyond, alpha, beta)
        before = alpha / beta
        alpha = max(effective / (weights2 + EPSILON), LEAST)  # features that are all 0 leave it undetermined
        beta = max((rows - effective) / (error2 + EPSILON), LEAST)
        if abs(alpha / beta - before) <= PRECISION * before:
            break
    weights2, error2, _ = _fit(eigen, along, beyond, alpha, beta)
    log_det = float(np.log(alpha + beta * eigen).sum()) + (width - len(eigen)) * math.log(alpha)
    evidence = rows * math.log(beta) + width * math.log(alpha) - rows * math.log(2 * math.pi)
    return (evidence - beta * error2 - alpha * weights2 - log_det) / 2 / rows


def _fit(eigen: Array, along: Array, beyond: float, alpha: float, beta: float) -> tuple[float, float, float]:
    """Return |m|^2, |F m - y|^2 and g (see ``logme``)."""
    share = beta * eigen / (alpha + beta * eigen)
    weights2 = float((beta**2 * eigen * along**2 / (alpha + beta * eigen) ** 2).sum())
    error2 = beyond + float((((1 - share) * along) ** 2).sum())
    return weights2, error2, float(share.sum())


# --- ranking sources ---


@dataclass(frozen=True)
class RankedSource:
    """A kept trial as a source for a new training.

    Attributes:
        study: The folder of its study.
        trial: Its number.
        score: The LogME score of its features; higher is better.
        width: How many features it has.
        start_from: The value of ``--start-from`` for the new training.
        measured: The best value of the trainings that began with it; None: there was none.
    """

    study: Path
    trial: int
    score: float
    width: int
    start_from: str
    measured: float | None = None


@dataclass(frozen=True)
class SourceRanking:
    """Sources for a task, the best first.

    Attributes:
        data: The name of the predictions that were read.
        rows: How many of their rows.
        sources: The sources.
        tau: Kendall's tau-b of scores and measured values, from -1 to 1; None if fewer than two sources were tried, or
            all are equal.
    """

    data: str
    rows: int
    sources: tuple[RankedSource, ...]
    tau: float | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        sources = [{**asdict(each), "study": str(each.study)} for each in self.sources]
        return {"data": self.data, "rows": self.rows, "sources": sources, "tau": self.tau}


def rank_sources(studies: Sequence[str | Path], data: str, *, measured: Sequence[str | Path] = ()) -> SourceRanking:
    """Rank the kept trials of earlier studies by how useful their features would be for a new task (LogME).

    Args:
        studies: Folders of studies whose kept trials have, as the predictions ``data``, features of the new task's
            samples with the new task's targets. ``elastune predict STUDY --program FILE`` makes them, where the
            ``predict`` of FILE returns features (such as those before the last layer) and targets.
        data: The name of these predictions.
        measured: Folders of studies that were begun with ``--start-from`` one of these trials. Their best value by
            their first objective is compared with the estimate.

    Returns:
        All sources, the most promising first.

    Raises:
        UserError: If there are no sources, if their samples differ, or if the features are too wide.

    Example:
        >>> elastune.rank_sources(["cats", "cars"], "newtask").sources[0].start_from
    """
    check_name(data)
    if data.startswith(HELD_OUT):
        raise UserError(f"nothing is chosen by data whose name begins with {HELD_OUT!r}", data, "name others")
    if not studies:
        raise UserError("sources are trials of earlier studies", "no study", "name their folders")
    reached = [_reached(folder) for folder in measured]
    _check_alike(reached)
    targets: torch.Tensor | None = None
    ranked, rows = [], 0
    for out in dict.fromkeys(Path(folder) for folder in studies):
        for candidate in library(out).with_predictions(data):
            predictions = candidate.predictions(data)
            if targets is None:
                targets = predictions["targets"]
            elif not torch.equal(targets, predictions["targets"]):
                rule, fix = (
                    "all sources have looked at the same samples of the new task",
                    "elastune predict ... --again",
                )
                raise UserError(rule, f"trial {candidate.trial} of {out} has other targets", fix)
            features, right = _sampled(predictions, f"trial {candidate.trial} of {out}")
            rows, score = len(right), logme(features, targets_of(right))
            best = _best_of(candidate, reached)
            ranked.append(RankedSource(out, candidate.trial, score, features.shape[1], str(candidate.folder), best))
    ranked.sort(key=lambda source: -source.score)
    return SourceRanking(data, rows, tuple(ranked), _tau(ranked, reached))


def _sampled(predictions: dict[str, torch.Tensor], whose: str) -> tuple[Any, Any]:
    """The features and targets of an even sample of rows. Raises ``UserError``."""
    outputs, targets = predictions["outputs"], predictions["targets"]
    if targets.ndim > 1 and not targets.is_floating_point():  # tokens: each is a sample
        outputs, targets = outputs.reshape(targets.numel(), -1), targets.reshape(-1)
    outputs = outputs.reshape(len(outputs), -1)
    counts = torch.ones(len(targets), dtype=torch.bool) if targets.is_floating_point() else targets != IGNORED
    outputs, targets = outputs[counts], targets[counts]
    if len(targets) < 2:
        raise UserError("features are of two samples at least", f"{len(targets)} of {whose}", "ask about more")
    if outputs.shape[1] > WIDEST:
        fix = "give those before the last layer, or their mean over places"
        raise UserError(f"features have at most {WIDEST} numbers a sample", f"{outputs.shape[1]} of {whose}", fix)
    every = -(-len(targets) // ROWS)
    return outputs[::every].double().numpy(), targets[::every].numpy()


@dataclass(frozen=True)
class _Measured:
    """The best value of a study that began with the weights of this digest."""

    sha256: str
    objective: Objective
    value: float


def _reached(folder: str | Path) -> _Measured:
    out = Path(folder)
    entries = read(out / JOURNAL)
    study = Study.of(out, entries)
    settings = next(entry.record.settings for entry in entries if isinstance(entry.record, StudyStarted))
    source = settings.get("start_from")
    if not isinstance(source, dict) or not source.get("sha256"):
        raise UserError("a measured study was begun with --start-from", out, "leave it out")
    if not study.complete:
        raise UserError("a measured study has a trial with a result", out, "leave it out, or go on with it")
    first = study.objectives[0]
    return _Measured(str(source["sha256"]), first, study.front()[0].values[first.name])


def _check_alike(reached: Sequence[_Measured]) -> None:
    names = {(measured.objective.name, measured.objective.direction) for measured in reached}
    if len(names) > 1:
        rule = "measured studies have the same first objective"
        raise UserError(rule, ", ".join(sorted(name for name, _ in names)), "name studies of one task")


def _best_of(candidate: Candidate, reached: Sequence[_Measured]) -> float | None:
    """The best value of trainings that began with the candidate's weights; a digest identifies the weights."""
    if not reached:
        return None
    digest = digest_of_weights(candidate.folder)
    values = [other.value for other in reached if other.sha256 == digest]
    best = max if reached[0].objective.direction == "max" else min
    return best(values, default=None)


def _tau(sources: Sequence[RankedSource], reached: Sequence[_Measured]) -> float | None:
    from scipy.stats import kendalltau

    tried = [(source.score, source.measured) for source in sources if source.measured is not None]
    if len(tried) < 2:
        return None
    sign = 1.0 if reached[0].objective.direction == "max" else -1.0
    tau = float(kendalltau([score for score, _ in tried], [sign * value for _, value in tried]).statistic)
    return tau if math.isfinite(tau) else None
