"""Which kept model to start a new task from: sources are ranked by how useful their features would be there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.job.output_dir import JOURNAL
from elastune.journal.reader import read
from elastune.journal.records import StudyStarted
from elastune.reuse.candidates import Candidate, library
from elastune.reuse.logme import logme, targets_of
from elastune.reuse.task import IGNORED
from elastune.search.space.objective import Objective
from elastune.study.results.study import Study
from elastune.train.checkpoints.start_from import digest_of_weights
from elastune.train.predictions import HELD_OUT, check_name

ROWS = 20_000  # that are looked at: an even sample of more
WIDEST = 8192  # numbers a sample: decomposing takes time that grows with their square


@dataclass(frozen=True)
class RankedSource:
    """A kept trial as a source for a new training.

    Attributes:
        study: The folder of its study.
        trial: Its number.
        score: The LogME score of its features; higher is better.
        width: How many features it has.
        start_from: What to give as ``--start-from`` of the new training.
        measured: The best value that trainings which began with it have reached; None: there was none.
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
        tau: Kendall's tau-b of scores and measured values, from -1 to 1; None where fewer than two sources were tried,
            or all are equal.
    """

    data: str
    rows: int
    sources: tuple[RankedSource, ...]
    tau: float | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        told = [{**asdict(one), "study": str(one.study)} for one in self.sources]
        return {"data": self.data, "rows": self.rows, "sources": told, "tau": self.tau}


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
        UserError: Where there are none, they have looked at different samples, or the features are too wide.

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
    found, rows = [], 0
    for out in dict.fromkeys(Path(folder) for folder in studies):
        for one in library(out).having(data):
            told = one.predictions(data)
            if targets is None:
                targets = told["targets"]
            elif not torch.equal(targets, told["targets"]):
                rule, fix = (
                    "all sources have looked at the same samples of the new task",
                    "elastune predict ... --again",
                )
                raise UserError(rule, f"trial {one.trial} of {out} has other targets", fix)
            features, right = _sampled(told, f"trial {one.trial} of {out}")
            rows, score = len(right), logme(features, targets_of(right))
            best = _best_of(one, reached)
            found.append(RankedSource(out, one.trial, score, features.shape[1], str(one.folder), best))
    found.sort(key=lambda source: -source.score)
    return SourceRanking(data, rows, tuple(found), _tau(found, reached))


def _sampled(told: dict[str, torch.Tensor], whose: str) -> tuple[Any, Any]:
    """Features and targets of an even sample, a row each. Raises ``UserError``."""
    outputs, targets = told["outputs"], told["targets"]
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
    """What a study that began with the weights of this digest has reached."""

    sha256: str
    objective: Objective
    value: float


def _reached(folder: str | Path) -> _Measured:
    out = Path(folder)
    entries = read(out / JOURNAL)
    study = Study.of(out, entries)
    settings = next(entry.record.settings for entry in entries if isinstance(entry.record, StudyStarted))
    begun = settings.get("start_from")
    if not isinstance(begun, dict) or not begun.get("sha256"):
        raise UserError("a measured study was begun with --start-from", out, "leave it out")
    if not study.complete:
        raise UserError("a measured study has a trial with a result", out, "leave it out, or go on with it")
    first = study.objectives[0]
    return _Measured(str(begun["sha256"]), first, study.front()[0].values[first.name])


def _check_alike(reached: Sequence[_Measured]) -> None:
    names = {(one.objective.name, one.objective.direction) for one in reached}
    if len(names) > 1:
        rule = "measured studies have the same first objective"
        raise UserError(rule, ", ".join(sorted(name for name, _ in names)), "name studies of one task")


def _best_of(one: Candidate, reached: Sequence[_Measured]) -> float | None:
    """What trainings that began with its weights have reached, wherever they lie by now."""
    if not reached:
        return None
    digest = digest_of_weights(one.folder)
    values = [other.value for other in reached if other.sha256 == digest]
    best = max if reached[0].objective.direction == "max" else min
    return best(values, default=None)


def _tau(sources: Sequence[RankedSource], reached: Sequence[_Measured]) -> float | None:
    from scipy.stats import kendalltau

    tried = [(one.score, one.measured) for one in sources if one.measured is not None]
    if len(tried) < 2:
        return None
    sign = 1.0 if reached[0].objective.direction == "max" else -1.0
    found = float(kendalltau([score for score, _ in tried], [sign * value for _, value in tried]).statistic)
    return found if math.isfinite(found) else None
