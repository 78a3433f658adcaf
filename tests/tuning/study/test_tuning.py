"""What the trials of a study have from its request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.run import Elastic, ExecutionSettings, Program
from elastune.runtime.clusters.base import LocalFiles
from elastune.tuning.search.schedule import FixedTrial
from elastune.tuning.search.suggester import Suggestion
from elastune.tuning.study.experiment import PreparedTrial, Tuning
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.validate import check


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1)}


def test_all_trials_wait_for_each_other_as_long_as_was_asked(tiny: Program, tmp_path: Path) -> None:
    asked = StudyRequest(
        tiny, tmp_path / "out", objectives={"loss": "min"}, trials=1, workers=2, collective_timeout_s=90.0
    )
    for bounds in (None, (1, 2)):
        plan = check(replace(asked, trial_workers=bounds), space)
        tuning = Tuning(plan, LocalFiles(), checkpoints=False)
        values = {**plan.config, "policy": "none"}
        new = tuning.new(Suggestion(0, {}, {}, values, "random"), None)
        fixed = tuning.fixed(1, FixedTrial(plan.config, 0, ExecutionSettings(), "naive"))
        assert isinstance(new, PreparedTrial)
        assert new.spec.elastic == Elastic(*(bounds or ()), collective_timeout_s=90.0)
        assert fixed.spec.elastic == Elastic(collective_timeout_s=90.0)
    with pytest.raises(UserError, match="wait for each other"):
        check(replace(asked, collective_timeout_s=0.01), space)
