"""A logger that reports to the run what a script for Fabric logs."""

from __future__ import annotations

from typing import Any

from lightning.fabric.loggers.logger import Logger

from elastune.adapters.passes import Passes
from elastune.train.session import Session


class RunLogger(Logger):
    """Reports, once in a run, what is logged at the end of a step or between passes."""

    name, version = "elastune", None

    def __init__(self, session: Session, passes: Passes) -> None:
        self._session = session
        self._passes = passes

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not self._passes.again and self._session.ends_step:
            told: dict[str, Any] = {name: float(value) for name, value in metrics.items()}
            self._session.report(**told)

    def log_hyperparams(self, params: Any, *given: Any, **options: Any) -> None:
        """Do nothing: the run's journal has its settings."""
