"""An ensemble of a study's trials: chosen by one data set, explained, and judged by another that no choice has seen."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastune.core.errors import UserError
from elastune.journal.records import SingleScore
from elastune.reuse.candidates import Candidate, ReadOnDemand, SealedTest, check_chosen_by, library
from elastune.reuse.insight import (
    Diversity,
    MemberWorth,
    Uncertainty,
    contributions,
    diversity,
    mixed,
    uncertainty,
)
from elastune.reuse.scores import SCORES, Figures, Score, score_for
from elastune.reuse.selection import EnsembleLimits, best_single, select
from elastune.reuse.stacking import stack
from elastune.reuse.task import Judged, Task, judged
from elastune.reuse.weights import numbers_in
from elastune.search.space.objective import Direction
from elastune.study.results.study import Study
from elastune.train.predictions import HELD_OUT

METHODS = ("greedy", "stacking", "uniform")
MEMBERS = 8


@dataclass(frozen=True)
class Member:
    """A trial in an ensemble.

    Attributes:
        trial: The number of the trial.
        weight: Its part of the mean.
        alone: Its score by itself, on the data that the choice was made by.
        parameters: The number of parameters that one inference uses.
        worker_seconds: The worker-seconds of its training.
        contribution: What it contributes.
        config: Its settings.
    """

    trial: int
    weight: float
    alone: float
    parameters: int
    worker_seconds: float
    contribution: MemberWorth
    config: dict[str, Any]


@dataclass(frozen=True)
class SettingWorth:
    """What the members with one ``value`` of a setting contribute together.

    Where the values of the setting are lists, such as the views that a model sees, it is about the members that need
    this one element.
    """

    value: Any
    trials: tuple[int, ...]
    contribution: MemberWorth


@dataclass(frozen=True)
class HeldOutFigures:
    """Scores on data that no choice has seen.

    Attributes:
        data: The name of the data set.
        rows: How many rows it has.
        ensemble: The score of the ensemble.
        best_single: The score of the trial that was best by itself where the choice was made.
    """

    data: str
    rows: int
    ensemble: float
    best_single: float


@dataclass(frozen=True)
class Ensemble:
    """An ensemble that was chosen, and why.

    Attributes:
        study: The folder of the study.
        task: The kind of problem.
        method: How the weights were found.
        data: The predictions that the choice was made by; ``rows`` of them.
        objective: The score that was to become better; ``direction`` says which way.
        candidates: The number of trials to choose from.
        members: The chosen trials, the greatest weight first.
        score: The score of the ensemble on ``data``. Like ``best_single``, it is on the data of the choice.
        single: The trial that is best by itself on ``data``.
        best_single: The score of ``single``.
        inference: The members' parameters together, over those of the best single trial.
        diversity: How much the members differ.
        uncertainty: How sure the ensemble is.
        test: Scores on other data; None where not all members have predictions on such data.
        singles: The score of each candidate by itself on ``data``.
        by: The setting whose values ``settings`` is about; None: not asked for.
        settings: What the members of each value of ``by`` contribute.
    """

    study: Path
    task: Task
    method: str
    data: str
    rows: int
    objective: str
    direction: Direction
    candidates: int
    members: tuple[Member, ...]
    score: float
    single: int
    best_single: float
    inference: float
    diversity: Diversity
    uncertainty: Uncertainty
    test: HeldOutFigures | None
    singles: tuple[SingleScore, ...]
    by: str | None
    settings: tuple[SettingWorth, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "study": str(self.study)}


def ensemble(
    study: Study | str | Path,
    *,
    members: int = MEMBERS,
    objective: str | None = None,
    inference_budget: float | None = None,
    data: str = "validation",
    test: str = "test",
    method: str = "greedy",
    seed: int = 0,
    by: str | None = None,
) -> Ensemble:
    """Choose an ensemble among the kept trials of a study (``--keep``) that have ``session.predictions``.

    Args:
        study: The study, or its folder.
        members: The most different models.
        objective: The score that is to become better: "accuracy", "log_loss", "brier"; "mse", "rmse", "mae", "r2".
            None: accuracy or mse.
        inference_budget: How many times the parameters of the best single trial one answer may use; None: no bound.
        data: The name of the predictions that the choice is made by.
        test: The name of the predictions that judge it; they are not read before the choice is made.
        method: "greedy" (selection with replacement, bagged), "stacking" (weights of least log loss or squared error),
            or "uniform" (the best ones, with equal weights).
        seed: Seeds the bags, and sampled contributions.
        by: A setting of the program, such as "inputs": also tell what the members of each of its values contribute
            together; where values are lists of views, what each view contributes.

    Returns:
        The ensemble; ``save_ensemble`` makes one file of it.

    Raises:
        UserError: Where the study has kept no such predictions, or they are damaged, and for impossible options.

    Example:
        >>> found = elastune.ensemble("out", members=8)
        >>> elastune.save_ensemble(found, "ensemble.safetensors")
    """
    check_choice(members, objective, inference_budget, data, test, method, seed)
    found = library(study)
    known = found.having(data)
    seen = judged(ReadOnDemand(known, lambda one: one.predictions(data)))
    score = score_for(objective, seen.task.kind)
    sizes = [parameters_of(one) for one in known]
    single = best_single(seen, score)
    limits = EnsembleLimits(members, math.inf if inference_budget is None else inference_budget * sizes[single])
    weights = _weights(method, seen, score, limits, sizes, seed)
    if not weights.any():
        rule = "an inference budget admits at least one model"
        raise UserError(rule, f"{inference_budget:g}x", f"at least {min(sizes) / sizes[single]:.3g}x is needed")
    order = [at for at in np.argsort(-weights, kind="stable").tolist() if weights[at] > 0]
    chosen, part = [known[at] for at in order], Judged(seen.task, seen.said[order], seen.right)
    alone = score.of(part.said, part.right)
    told = contributions(part, weights[order], score, seed=seed)
    return Ensemble(
        study=found.out,
        task=seen.task,
        method=method,
        data=data,
        rows=len(seen.right),
        objective=score.name,
        direction=score.direction,
        candidates=len(known),
        members=tuple(
            Member(
                one.trial,
                float(weights[at]),
                float(alone[nth]),
                sizes[at],
                one.worker_seconds,
                told[nth],
                one.config,
            )
            for nth, (at, one) in enumerate(zip(order, chosen, strict=True))
        ),
        score=float(score.of(mixed(part.said, weights[order]), part.right)),
        single=known[single].trial,
        best_single=float(score.of(seen.said[single], seen.right)),
        inference=sum(sizes[at] for at in order) / sizes[single],
        diversity=diversity(part),
        uncertainty=uncertainty(part, weights[order]),
        test=_tested(test, chosen, weights[order], known[single], seen.task, score),
        singles=tuple(
            SingleScore(one.trial, value, size)
            for one, value, size in zip(known, score.of(seen.said, seen.right).tolist(), sizes, strict=True)
        ),
        by=by,
        settings=() if by is None else _by_setting(by, chosen, part, weights[order], score, seed),
    )


def _by_setting(
    by: str, chosen: Sequence[Candidate], part: Judged, weights: Figures, score: Score, seed: int
) -> tuple[SettingWorth, ...]:
    """Members in the order of their weights; so are the values. Of lists each part is a value of its own."""
    if not any(by in one.config for one in chosen):
        known = ", ".join(sorted({name for one in chosen for name in one.config}))
        raise UserError("contributions are told by a setting of the program", repr(by)[:60], f"such as {known}"[:200])
    values: list[Any] = [one.config.get(by) for one in chosen]
    parted = all(isinstance(value, list) and value for value in values)
    sides: dict[str, list[int]] = {}
    for at, value in enumerate(values):
        for one_of_it in dict.fromkeys(json.dumps(each, sort_keys=True) for each in (value if parted else [value])):
            sides.setdefault(one_of_it, []).append(at)
    told = contributions(part, weights, score, players=list(sides.values()), seed=seed)
    return tuple(
        SettingWorth(json.loads(value), tuple(chosen[at].trial for at in members), worth)
        for (value, members), worth in zip(sides.items(), told, strict=True)
    )


def check_choice(
    members: int, objective: str | None, budget: float | None, data: str, test: str, method: str, seed: int
) -> None:
    """Raise ``UserError`` for options that no ensemble could be chosen by, whatever was kept."""
    if isinstance(members, bool) or not isinstance(members, int) or members < 1:
        raise UserError("an ensemble has a whole number of members, at least 1", members, "such as 8")
    if budget is not None and not 0 < budget < math.inf:
        raise UserError("an inference budget is a positive number of times", budget, "such as 4x")
    if method not in METHODS:
        raise UserError("an ensemble's weights are found by a known method", method, f"use {', '.join(METHODS)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError("a seed is a whole number, at least 0", seed, "such as 0")
    if objective is not None and objective not in SCORES:
        raise UserError("an ensemble is chosen by a known score", repr(objective)[:60], f"use {', '.join(SCORES)}")
    check_chosen_by(data)
    if not test.startswith(HELD_OUT):  # else something may have been chosen by them
        raise UserError(f"data that judge a choice have a name that begins with {HELD_OUT!r}", test, "such as test")


def parse_times(text: str) -> float:
    """Return the number in "4x" or "1.5x". Raises ``UserError``."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)x?", text.strip())
    if found is None or not float(found[1]):
        raise UserError("an inference budget is a positive number of times", repr(text)[:60], "such as 4x")
    return float(found[1])


def parameters_of(candidate: Candidate) -> int:
    """Return the number of parameters of a candidate's model."""
    return numbers_in(candidate.weights())


def _weights(
    method: str, seen: Judged, score: Score, limits: EnsembleLimits, sizes: Sequence[int], seed: int
) -> Figures:
    if method == "greedy":
        return select(seen, score, limits, sizes, seed=seed)
    if method == "stacking":
        return stack(seen, limits, sizes)
    gains = score.gain(seen.said, seen.right)
    pool: set[int] = set()
    for at in np.argsort(-gains, kind="stable").tolist():
        if limits.admits({*pool, at}, sizes):
            pool.add(at)
    weights = np.zeros(seen.members)
    weights[sorted(pool)] = 1 / max(1, len(pool))
    return weights


def _tested(
    name: str, chosen: Sequence[Candidate], weights: Figures, single: Candidate, task: Task, score: Score
) -> HeldOutFigures | None:
    """Judge what was chosen, once all of it is."""
    everyone = list({one.trial: one for one in (*chosen, single)}.values())
    if any(name not in one.artifact.predictions for one in everyone):
        return None
    sealed = SealedTest(name)
    sealed.unseal(everyone)
    found = judged(ReadOnDemand(everyone, sealed.of))
    if (found.task.kind, found.task.width) != (task.kind, task.width):
        fix = "let the program tell the same outputs of both"
        raise UserError(f"predictions on {name} are of the same task as those chosen by", f"{found.task}", fix)
    best = [one.trial for one in everyone].index(single.trial)
    return HeldOutFigures(
        name,
        len(found.right),
        float(score.of(mixed(found.said[: len(chosen)], weights), found.right)),
        float(score.of(found.said[best], found.right)),
    )
