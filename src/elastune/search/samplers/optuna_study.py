"""Optuna studies: made for our objectives, and used without Optuna's own messages."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence

import optuna
from optuna.samplers import RandomSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection

from elastune.search.space.objective import Objective

NAME = "elastune"


def new_study(objectives: Sequence[Objective], storage: BaseStorage | None = None) -> optuna.Study:
    """An empty study, in memory unless a ``storage`` is given. Its sampler draws at random until it gets another."""
    directions = [StudyDirection.MAXIMIZE if o.direction == "max" else StudyDirection.MINIMIZE for o in objectives]
    with quiet():
        return optuna.create_study(
            study_name=NAME, storage=storage, directions=directions, sampler=RandomSampler(seed=0)
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's warnings (experimental parts, clipped infinities) and notes, on which no caller can act.

    By the levels of its handlers: to change that of a logger, as its verbosity, empties the caches of all loggers.
    """
    levels = [(handler, handler.level) for handler in logging.getLogger("optuna").handlers]
    for handler, level in levels:
        handler.setLevel(max(level, logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)
