"""What is recorded of models' predictions: of the run that makes them, and of kept trials long after it."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from elastune.journal.values import Count, Number

_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class PredictionsKept:
    """The model's outputs on the ``samples`` of the data set ``name``, after ``step`` steps, lie in the run's folder:
    a file of ``size`` bytes with this ``sha256``. Later ones of the same name have taken its place."""

    name: str
    step: Count
    samples: Count
    size: Count
    sha256: str
    kind: Literal["predictions_kept"] = "predictions_kept"


@dataclass(frozen=True, config=_RULES)
class PredictionsAdded:
    """A kept trial's model has been asked about the data set ``name``, whoever trained it long before: the file has
    this ``sha256``, and with it all that stays of the trial has ``size`` bytes."""

    trial: Number
    name: str
    samples: Count
    size: Count
    sha256: str
    kind: Literal["predictions_added"] = "predictions_added"
