"""Settings of other types than their fields have are refused in one line, wherever Python code gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elastune
from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.runtime.settings import RunSettings
from elastune.tuning.study.settings import FrontierSettings, StudySettings

WRONG: list[tuple[type, dict[str, Any], str]] = [
    (RunSettings, {"epochs": "3"}, r"epochs must be a whole number or None \(got '3'\): such as epochs=2"),
    (RunSettings, {"epochs": True}, r"epochs must be a whole number or None \(got True\)"),
    (RunSettings, {"seed": 1.5}, r"seed must be a whole number \(got 1.5\)"),
    (RunSettings, {"config": "lr=1"}, r"config must be a dict \(got 'lr=1'\): such as config="),
    (RunSettings, {"execution": "fast"}, r"execution must be of the type ExecutionSettings or None \(got 'fast'\)"),
    (RunSettings, {"workers": "4"}, r"workers must be a whole number or two whole numbers or None \(got '4'\)"),
    (RunSettings, {"policies": [3]}, r"policies must be several texts \(got \(3,\)\): such as policies="),
    (RunSettings, {"out": 3}, r"out must be a text or a path or None \(got 3\)"),
    (RunSettings, {"resume": "yes"}, r"resume must be True or False \(got 'yes'\): such as resume=True"),
    (RunSettings, {"heartbeat_s": "5s"}, r"heartbeat_s must be a number \(got '5s'\): such as heartbeat_s=0.5"),
    (StudySettings, {"objectives": ["accuracy"]}, r"objectives must be a dict \(got \('accuracy',\)\)"),
    (StudySettings, {"budget_s": "3m"}, r"budget_s must be a number or None \(got '3m'\)"),
    (FrontierSettings, {"workers": 4}, r"workers must be several whole numbers \(got 4\): such as workers=\(2, 2\)"),
    (ExecutionSettings, {"workers": "2"}, r"workers must be a whole number \(got '2'\)"),
    (ExecutionSettings, {"mode": 3}, r'mode must be a text \(got 3\): such as mode="exact"'),
    (ExecutionSettings, {"micro_batch": 2.5}, r"micro_batch must be a whole number or None \(got 2.5\)"),
]


@pytest.mark.parametrize(("kind", "values", "line"), WRONG)
def test_a_value_of_another_type_is_refused(kind: Any, values: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        kind(**values)


def nothing(session: Any) -> None: ...


def test_the_functions_refuse_it_too() -> None:
    with pytest.raises(UserError, match="epochs must be a whole number"):
        elastune.run(nothing, epochs="3")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="trials must be a whole number"):
        elastune.tune(nothing, nothing, trials="3")  # type: ignore[arg-type]


def test_numbers_of_numpy_lists_and_paths_fit() -> None:
    settings = RunSettings(epochs=np.int64(3), workers=[1, 4], out=Path("there"), price_per_worker_hour=2)  # type: ignore[arg-type]
    assert type(settings.epochs) is int
    assert (settings.epochs, settings.workers, settings.price_per_worker_hour) == (3, (1, 4), 2)
    assert StudySettings(until="accuracy > 0.9").until == ("accuracy > 0.9",)
