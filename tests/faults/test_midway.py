"""A run whose workers change has the undisturbed run's weights after EACH step, not only at its end; and what ranks
report differently is averaged over those who are there."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from tests.support.elastic_runs import Ran, Runs

from elastune.core.journal.records import Reported
from elastune.core.run import Program

PROGRAM = Program(Path(__file__).parent / "programs" / "midway.py")
STEPS = 32


def by_step(ran: Ran) -> dict[int, dict[str, float]]:
    """What was reported in each step; a step that was done again has told the same."""
    results: dict[int, dict[str, float]] = {}
    for result in (record for record in ran.records if isinstance(record, Reported)):
        hashes = {results.get(result.step, result.metrics)["hash"], result.metrics["hash"]}
        assert len(hashes) == 1, f"step {result.step} has come to two results"
        results[result.step] = result.metrics
    return results


@pytest.mark.parametrize(
    ("workers", "resize", "faults", "sizes"),
    [(1, ["3 3", "19 2"], [], {1, 2, 3}), (3, ["20 1"], ["kill 0 9 before"], {1, 3})],
)
def test_each_step_has_the_undisturbed_weights(
    runs: Runs, undisturbed: Ran, workers: int, resize: list[str], faults: list[str], sizes: set[int]
) -> None:
    ran = runs(workers, resize=resize, faults=faults)
    result, expected = by_step(ran), by_step(undisturbed)
    assert len(expected) == STEPS
    assert len({metrics["hash"] for metrics in expected.values()}) == STEPS, "each step changes the weights"
    assert {step: metrics["hash"] for step, metrics in result.items()} == {
        step: metrics["hash"] for step, metrics in expected.items()
    }
    assert {metrics["size"] for metrics in result.values()} >= sizes, "the workers changed in mid-run"
    for step, metrics in result.items():
        size = int(metrics["size"])
        mean = sum(Fraction(1 / (rank + 1)) for rank in range(size)) / size
        assert metrics["share"] == float(mean), f"step {step}: exactly rounded, of {size} ranks"
