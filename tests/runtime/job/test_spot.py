"""The policy ``spot`` of a run, as its controller has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastune.adapt.policies.library.spot import SpotRules
from elastune.core.errors import UserError
from elastune.core.run import Adapt, Elastic, ExecutionSettings, Program, RunSpec
from elastune.runtime.job.validation import spot_watch
from elastune.train.program.load import load_as_guest


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text("kind,price\nspot,1\non-demand,3\n")
    return path


def asked(tiny: Program, *policies: str) -> RunSpec:
    execution = ExecutionSettings(workers=2, num_slots=8)
    return RunSpec(tiny, Path("out"), execution=execution, elastic=Elastic(1, 8), adapt=Adapt(policies))


def test_its_options_are_the_rules_of_a_run_with_room_for_the_most_workers(tiny: Program, prices: Path) -> None:
    program = load_as_guest(tiny)
    assert spot_watch(asked(tiny, "gns", "warmup:steps=5"), program) is None
    watch = spot_watch(asked(tiny, "gns", f"spot:deadline_h=20,prices={prices},spend=50,patience=0.2"), program)
    assert watch is not None
    assert watch.rules == SpotRules(72000.0, 8, 50.0, 0.2, changeover_s=10.0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("deadline_h=20", "prices"),
        ("prices={}", "deadline_h"),
        ("deadline_h=0,prices={}", "a deadline lies in the future"),
        ("deadline_h=20,prices={},patience=2", "patience lies from 0"),
        ("deadline_h=20,prices={},spend=-1", "spend is"),
        ("deadline_h=20,prices={}.gone", "readable"),
        ("deadline_h=20,prices={}.spot", "every kind of host needs a price"),
    ],
)
def test_what_is_wrong_is_told_before_a_worker_starts(
    tiny: Program, prices: Path, options: str, complaint: str
) -> None:
    Path(f"{prices}.spot").write_text("kind,price\nspot,1\n")
    with pytest.raises(UserError, match=complaint):
        spot_watch(asked(tiny, f"spot:{options.format(prices)}"), load_as_guest(tiny))


def test_a_run_has_one_deadline(tiny: Program, prices: Path) -> None:
    twice = (f"spot:deadline_h=20,prices={prices}",) * 2
    with pytest.raises(UserError, match="one deadline"):
        spot_watch(asked(tiny, *twice), load_as_guest(tiny))
