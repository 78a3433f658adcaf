"""What of two studies' settings is compared where one is to go on in the folder of the other."""

from __future__ import annotations

from typing import Any

import pytest

from elastune.core.run import ExecutionSettings
from elastune.tuning.study.resume import changed_settings as differences

EXACT, FAST = ExecutionSettings(workers=2).to_json(), ExecutionSettings(workers=2, mode="fast").to_json()
THEN: dict[str, Any] = {
    "kind": "tune",
    "program": "train.py",
    "objectives": {"loss": "min"},
    "constraints": [],
    "config": {"batch": 8},
    "seed": 7,
    "epochs": None,
    "prices": None,
    "price_per_worker_hour": 2.0,
    "target": "loss <= 1",
    "sampler": "random",
    "stopping": "asha",
    "execution": EXACT,
    "sync": "allreduce",
    "sync_schedule": "",
    "trials": 3,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": "frontier"}, "kind .*got frontier, begun with tune"),
        ({"objectives": {"loss": "max"}}, "objectives .*use --objective loss:min"),
        ({"constraints": ["lr < 1"]}, "constraints .*leave it out"),
        ({"config": {"batch": 16}}, "setting batch .*got 16, begun with 8.*use --set batch=8"),
        ({"config": {"batch": 8, "lr": 1}}, "setting lr .*got 1, begun with not set.*leave out --set lr"),
        ({"seed": 8}, "seed .*got 8, begun with 7.*use --seed 7"),
        ({"epochs": 5}, "epochs .*got 5, begun with none.*leave out --epochs"),
        ({"price_per_worker_hour": 3.0}, "price_per_worker_hour .*use --price 2.0"),
        ({"target": None}, "target .*got none, begun with loss <= 1.*use --target 'loss <= 1'"),
        ({"sampler": "tpe"}, "sampler .*use --sampler random, or warm-start another"),
        ({"stopping": "none"}, "stopping .*use --stopping asha"),
        ({"sync": "local:learners=2,every=4"}, "sync .*use --sync allreduce"),
        ({"start_from": {"source": "a", "fresh": []}}, "weights .*begun with none"),
        ({"execution": FAST}, "mode .*got fast, begun with exact.*use --mode exact"),
        ({"execution": {**EXACT, "num_slots": 8}}, "num_slots .*use --slots 2"),
        ({"execution": {**EXACT, "threads": 2}}, "threads .*use --threads 1"),
        ({"execution": {**EXACT, "compress": "int8"}}, "compress .*leave out --compress"),
        ({"simulated": True}, "goes on with simulated trials only .*got trained ones there"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_one_key_both_values_and_the_fix(changes: dict[str, Any], expected: str) -> None:
    (result,) = differences(THEN, {**THEN, **changes})
    with pytest.raises(type(result), match=expected):
        raise result


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trials": 9, "budget_s": 60.0, "workers": 4, "until": ["loss < 1"], "patience": 3, "keep": "all"},
        {"execution": {**EXACT, "workers": 4, "micro_batch": 8, "device": "cuda"}},
    ],
    ids=str,
)
def test_what_may_differ(changes: dict[str, Any]) -> None:
    assert list(differences(THEN, {**THEN, **changes})) == []


def test_a_journal_of_an_older_version_lacks_some_of_it() -> None:
    older = {name: value for name, value in THEN.items() if name not in ("sampler", "price_per_worker_hour", "sync")}
    assert list(differences(older, THEN)) == []


def test_weights_may_have_been_moved() -> None:
    results = [{**THEN, "start_from": {"source": source, "sha256": "1"}} for source in ("here", "there")]
    assert list(differences(*results)) == []
