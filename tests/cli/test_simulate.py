"""``elastune simulate`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "simulated.py"
FEW = ("--trials", "8", "--workers", "16", "--sampler", "random")


@pytest.mark.soak
def test_the_example_tells_what_it_would_take(elastune: Any) -> None:
    result = elastune("simulate", EXAMPLE, *FEW, "--stopping", "asha", "--trial-workers", "1:8", "--out", "out")
    assert result.code == 0, result.err
    assert "of 16 workers in" in result.out
    assert "the surrogate of simulated.py" in " ".join(result.out.split())
    assert Path("out", "report.html").exists()
    shared = ("--trial-workers", "1:8", "--allocation", "short_first:held=0.3", "--out", "other")
    assert elastune("simulate", EXAMPLE, *FEW, *shared).code == 0
    assert '"allocation":"short_first:held=0.3"' in Path("other", "journal.jsonl").read_text()


def test_json_has_the_object_of_tune_and_the_simulation(elastune: Any) -> None:
    output = elastune("simulate", EXAMPLE, *FEW, "--start", "2", "--pause", "0.5", "--lose-every", "10m", "--json")
    assert output.code == 0, output.err
    result = output.json
    assert result["kind"] == "tune"
    assert sum(result["trials"].values()) == 8
    simulated = result["simulated"]
    assert set(simulated) == {"workers", "seconds", "real_seconds", "used", "source"}
    assert simulated["workers"] == 16
    assert 0 < simulated["used"] <= 1
    assert simulated["seconds"] == pytest.approx(result["seconds"])

    again = elastune("simulate", EXAMPLE, *FEW, "--recorded", result["out"], "--scaling", "amdahl:0.1", "--json")
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
        ((EXAMPLE, "--trials", "3", "--trial-workers", "1:8", "--allocation", "widest"), "an allocation must be"),
        ((EXAMPLE, "--trials", "3", "--allocation", "steepest"), "add --trial-workers"),
    ],
)
def test_wrong_input_is_one_line(elastune: Any, arguments: tuple[Any, ...], complaint: str) -> None:
    assert complaint in elastune("simulate", *arguments).line


@pytest.fixture
def market(tmp_path: Path) -> tuple[str, ...]:
    """16 spot workers, then 4, at a third of the price of others."""
    offer, prices = tmp_path / "offer.csv", tmp_path / "prices.csv"
    offer.write_text("time,workers\n0,16\n600,4\n36000,4\n")
    prices.write_text("kind,price\nspot,1\non-demand,3\n")
    return "--availability", str(offer), "--prices", str(prices)


def test_a_market_says_what_a_training_costs_and_when_it_is_done(elastune: Any, market: tuple[str, ...]) -> None:
    asked = ("simulate", EXAMPLE, "--workers", "16", *market, "--deadline", "2h", "--start", "2", "--pause", "0.1")
    output = elastune(*asked)
    assert output.code == 0, output.err
    assert "hindsight optimum" in output.out
    result = elastune(*asked, "--json").json
    ways = {way["name"]: way for way in result["ways"]}
    ours, best = ways["spot and on demand (policy spot)"], ways["hindsight optimum"]
    assert ours["in_time"]
    assert best["cost"] <= ours["cost"] <= ways["on demand alone"]["cost"]
    assert ours["useful_s"] <= ours["spot_s"] + ours["on_demand_s"]


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ((), "belong together"),
        (("--deadline", "11h"), "must reach to the deadline"),
        (("--deadline", "2h", "--trials", "3"), "for one training"),
        (("--deadline", "2h", "--recovery", "20s"), "JOIN:LOSS"),
        (("--deadline", "2h", "--spot-patience", "2"), "patience"),
        (("--deadline", "2h", "--spend", "0"), "budget"),
        (("--deadline", "2h", "--prices", "nowhere"), "readable"),
    ],
)
def test_a_wrong_market_is_one_line(
    elastune: Any, market: tuple[str, ...], more: tuple[str, ...], complaint: str
) -> None:
    assert complaint in elastune("simulate", EXAMPLE, *market, *more).line


def test_a_market_is_looked_at_before_the_program(elastune: Any, market: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "offer.csv").write_text("time,workers\n0,many\n")
    assert "a line must be time,workers" in elastune("simulate", "linear.py", *market, "--deadline", "2h").line


def test_a_run_that_has_ended_is_a_training_for_a_market(
    elastune: Any, market: tuple[str, ...], finished_run: Path
) -> None:
    asked = ("simulate", str(finished_run), "--workers", "4", *market, "--deadline", "2h")
    result = elastune(*asked, "--json").json
    ended = json.loads((finished_run / "said.json").read_text())
    assert result["work_s"] == pytest.approx(ended["seconds"]), "of one worker"
    assert f"{ended['steps']} steps" in result["source"]
    assert result["ways"][0]["in_time"]
    assert "taken as it was" in elastune(*asked, "--epochs", "3").line
    assert "existing Python file" in elastune("simulate", str(finished_run), "--trials", "3").line
