"""``elastune simulate`` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "simulated.py"
FEW = ("--trials", "8", "--workers", "16", "--sampler", "random")


def test_the_example_tells_what_it_would_take(elastune: Any) -> None:
    said = elastune("simulate", EXAMPLE, *FEW, "--stopping", "asha", "--trial-workers", "1:8", "--out", "out")
    assert said.code == 0, said.err
    assert "of 16 workers in" in said.out
    assert "the surrogate of simulated.py" in said.out
    assert Path("out", "report.html").exists()


def test_json_has_the_object_of_tune_and_the_simulation(elastune: Any) -> None:
    said = elastune("simulate", EXAMPLE, *FEW, "--start", "2", "--pause", "0.5", "--lose-every", "10m", "--json")
    assert said.code == 0, said.err
    found = said.json
    assert found["kind"] == "tune"
    assert sum(found["trials"].values()) == 8
    simulated = found["simulated"]
    assert set(simulated) == {"workers", "seconds", "real_seconds", "used", "source"}
    assert simulated["workers"] == 16
    assert 0 < simulated["used"] <= 1
    assert simulated["seconds"] == pytest.approx(found["seconds"])

    again = elastune("simulate", EXAMPLE, *FEW, "--recorded", found["out"], "--scaling", "amdahl:0.1", "--json")
    assert "recorded trials" in again.json["simulated"]["source"]
    assert "amdahl:0.1" in again.json["simulated"]["source"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("linear.py", "--trials", "3"), "has no surrogate"),
        ((EXAMPLE,), "needs a budget"),
        ((EXAMPLE, "--trials", "3", "--workers", "0"), "--workers must be"),
        ((EXAMPLE, "--trials", "3", "--workers", "9999999"), "--workers must be"),
        ((EXAMPLE, "--trials", "3", "--recorded", "nowhere"), "must exist"),
        ((EXAMPLE, "--trials", "3", "--start", "-1"), "start"),
        ((EXAMPLE, "--trials", "3", "--lose-every", "often"), "--lose-every must be a duration"),
        ((EXAMPLE, "--trials", "3", "--trial-workers", "8:1"), "--trial-workers"),
    ],
)
def test_wrong_input_is_one_line(elastune: Any, arguments: tuple[Any, ...], complaint: str) -> None:
    assert complaint in elastune("simulate", *arguments).line
