"""What slots cost is told as it was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastune.core.slots import MEASURED_SLOT_COST as MEASURED
from elastune.core.slots import slot_cost, slot_cost_text

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "slots.json"


def test_the_table_is_that_of_the_committed_measurement() -> None:
    cells = json.loads(RESULTS.read_text())["cells"]
    assert {cell["model"] for cell in cells} == {"lenet", "resnet18", "small_gpt"}
    for slots, told in MEASURED.items():
        found = [cell["over_plain"][f"exact_{slots}"]["median"] for cell in cells]
        assert told == pytest.approx((min(found), max(found)), abs=0.051), slots


def test_the_busiest_worker_counts() -> None:
    assert slot_cost(8, 1) == MEASURED[8]
    assert slot_cost(8, 3) == MEASURED[4], "three slots are told as four"
    assert slot_cost(64, 1) == MEASURED[8]


def test_it_is_told_where_it_costs_something_with_what_costs_less() -> None:
    text = slot_cost_text(8, 1)
    low, high = MEASURED[8]
    assert text.startswith(f"8 slots on 1 worker: about {low:g} to {high:g} x the CPU time of plain")
    assert "not here" in text
    assert text.endswith("--mode fast or fewer slots: less")
    assert "at least" in slot_cost_text(16, 1)
    assert slot_cost_text(4, 2) == "", "two slots a worker cost about nothing"
