"""Records of what someone asked of a running study from outside: by a command, or by a click on its page."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from elastune.core.journal.run_records import EXACT, Count, Words

_RULES = ConfigDict(extra="forbid")
_Some = Annotated[int, Field(ge=1, le=EXACT)]
_Amount = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
ActName = Literal["stop", "pause", "go_on", "budget", "workers", "end"]
OF_TRIALS = ("stop", "pause", "go_on")


@dataclass(frozen=True, config=_RULES)
class ActAsked:
    """Someone asks a study to do ``act``. The study acknowledges that by this record, and does it later (``ActDone``).

    Attributes:
        act: "stop", "pause" or "go_on" with ``trial``; change the "budget" or the "workers"; "end" in good order.
        ask: The name of the request; no other request has it.
        by: Who asked, and by what.
        trial: The number of the trial.
        trials, budget_s, worker_hours: The new budget; None: that part stays as it is.
        workers: The new number of workers of all trials together.
        refused: Why the study does not do it: rule, value and fix; "" if it does.
    """

    act: ActName
    ask: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
    by: Annotated[Words, Field(max_length=200)]
    trial: Count | None = None
    trials: _Some | None = None
    budget_s: _Amount | None = None
    worker_hours: _Amount | None = None
    workers: _Some | None = None
    refused: Words = ""
    kind: Literal["act_asked"] = "act_asked"

    @model_validator(mode="after")
    def _complete(self) -> ActAsked:
        if (self.trial is not None) != (self.act in OF_TRIALS):
            raise ValueError(f"trial: must be given for {', '.join(OF_TRIALS)}, and only for them")
        budget = (self.trials, self.budget_s, self.worker_hours)
        if any(part is not None for part in budget) != (self.act == "budget"):
            raise ValueError("trials, budget_s or worker_hours must be given for a budget, and only for it")
        if (self.workers is not None) != (self.act == "workers"):
            raise ValueError("workers: must be given for workers, and only for them")
        return self


@dataclass(frozen=True, config=_RULES)
class ActDone:
    """The study has done what ``ActAsked`` with the name ``ask`` asked for, or cannot any more: see ``outcome``."""

    ask: str
    outcome: Words
    kind: Literal["act_done"] = "act_done"
