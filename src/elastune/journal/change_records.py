"""What is recorded where a run or a study goes on with another program or other data than it was begun with."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from elastune.journal.values import Count

_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class ChangesAccepted:
    """``--accept-changes``: from here on a run or a study goes on with what had changed.

    Attributes:
        what: The changes, a text each: "train.py, line 12, in build", "data: 960 samples, had 1,920".
        step: Of a run: the last step before them.
        epoch: Of a run: how many epochs were completed by then.
        first_trial: Of a study: trials with lower numbers began before them.
    """

    what: list[str] = field(default_factory=list)
    step: Count = 0
    epoch: Count = 0
    first_trial: Count = 0
    kind: Literal["changes_accepted"] = "changes_accepted"
