"""The main job as a user runs it, at a small size: what it prints, what its report shows, what its journal holds."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked

from elastune.core.journal.files import read
from elastune.core.journal.records import FrontierFound, TrialFinished, TrialStarted
from elastune.train.machine import cores

ROOT = Path(__file__).resolve().parents[2]
COUNTS = (1, 2, 16)
MOST = 4  # workers of the tests' cluster


Command = Callable[..., dict[str, Any]]


def elastune(*arguments: str) -> dict[str, Any]:
    """What a command says, as a process of its own."""
    command = [sys.executable, "-m", "elastune", *arguments, "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


@pytest.fixture
def here(command_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Command:
    """What a command says that is called in this process."""
    monkeypatch.chdir(ROOT)

    def call(*arguments: str) -> dict[str, Any]:
        result = command_here(*arguments, "--json")
        assert result.code == 0, result.err
        return result.json

    return call


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The README's command, smaller."""
    out = tmp_path_factory.mktemp("frontier") / "out"
    counts = ",".join(map(str, COUNTS))
    return out, elastune(
        *("frontier", "examples/digits.py", "--workers", counts, "--target", "0.85", "--budget", "auto"),
        *("--epochs", "4", "--seeds", "2", "--sampler", "tpe", "--out", str(out)),
    )


@pytest.mark.soak
def test_every_worker_count_has_a_naive_row_and_some_are_tuned(found: tuple[Path, dict[str, Any]]) -> None:
    _, result = found
    rows = {(r["role"], r["workers"]): r for r in result["rows"]}
    left_out = result["phases"]["left_out"]  # by a machine that became busier
    assert {w for role, w in rows if role == "naive"} == set(COUNTS) >= {w for _, w in rows}
    for (role, workers), row in rows.items():
        naive = (32 * workers, pytest.approx(0.02 * workers))
        assert ((row["batch_size"], row["lr"]) == naive) is (role == "naive"), "nothing but what was tuned is called so"
        assert row["quality_label"] == ("measured" if workers == 1 else "emulated")
        timed = "measured" if workers <= cores() else "modelled"
        assert row["seconds_label"] == timed or (role == "tuned" and any("timing" in words for words in left_out))
        assert row["config"]["epochs"] == 4, "the epochs that were trained"
    assert rows["naive", 16]["quality"] < rows["naive", 1]["quality"], "the naive rule costs accuracy here"
    sides = {side["side"]: side for side in result["volumes"]["sides"]}
    assert set(sides) == {"naive rule", "naive rule, tuned", "search"}
    assert sides["search"]["against"]
    assert all(0 <= side["volume"] <= 1 for side in sides.values())
    assert sides["naive rule"]["ci"] is not None


def test_all_phases_fit_into_the_budget(found: tuple[Path, dict[str, Any]]) -> None:
    """It was chosen by the first steps; what a busier machine then left out is told."""
    _, result = found
    phases = result["phases"]
    assert set(phases["took"]) == {"calibrate", "throughput", "naive", "policy", "search", "confirm", "timing"}
    assert sum(phases["took"].values()) <= phases["budget_s"] + 15
    short = any("search" in words for words in phases["left_out"])
    assert short or phases["took"]["search"] >= 0.35 * phases["budget_s"]
    assert {*phases["left_out"]} <= {*result["answer"]["not_done"]}


def test_what_is_said_is_what_was_shown(found: tuple[Path, dict[str, Any]]) -> None:
    _, result = found
    for row in result["rows"]:
        low, high = row["ci"]
        assert 0 <= low <= row["quality"] <= high <= 1
        assert row["test_samples"] == 400
        met = "holds" if low >= 0.85 else "falls" if high < 0.85 else "not shown"
        assert row["diverged"] or row["verdict"] == met
        assert row["seconds_factor"] == 1.0 or row["seconds_label"] == "modelled"
    outcome = result["answer"]
    assert len(outcome["sentence"].split()) <= 20
    if outcome["pick"] is not None:
        picked = result["rows"][outcome["pick"]]
        shown = outcome["conclusion"] in ("use", "fewest are enough", "fewest may be enough")
        assert (picked["verdict"] == "holds") == shown
        assert (outcome["workers"] is None) == (picked["workers"] == 1)
        assert result["reasons"][0]["weight"] == "decides"


def test_the_numbers_are_those_of_the_journal(found: tuple[Path, dict[str, Any]]) -> None:
    out, result = found
    records = [entry.record for entry in read(out / "journal.jsonl")]
    kept = next(r for r in records if isinstance(r, FrontierFound))
    started = {r.trial: r for r in records if isinstance(r, TrialStarted)}
    ended = {r.trial: r for r in records if isinstance(r, TrialFinished)}
    assert len(kept.rows) == len(result["rows"])
    for row, printed in zip(kept.rows, result["rows"], strict=True):
        assert (row.quality, row.seconds, row.cost) == (printed["quality"], printed["seconds"], printed["cost"])
        trainings = [ended[t] for t in row.trials if ended[t].run is not None]
        assert row.quality == pytest.approx(statistics.fmean(t.metrics["test_accuracy"] for t in trainings))
        assert row.validation == pytest.approx(statistics.fmean(t.metrics["accuracy"] for t in trainings))
        assert row.seeds == len({started[t.trial].seed for t in trainings}) == 2
        assert all(started[t.trial].config == row.config for t in trainings)
        assert {started[t.trial].execution["num_slots"] for t in trainings} == {row.num_slots} == {row.workers}
        assert row.cost == pytest.approx(row.workers * row.seconds / 3600)
    tuned = [row for row in kept.rows if row.role == "tuned"]
    searched = {r.seed for r in started.values() if r.phase == "search"}
    naive_configs = [row.config for row in kept.rows if row.role == "naive"]
    for row in tuned:
        if row.config not in naive_configs:
            assert not searched & {started[t].seed for t in row.trials}, "confirmed with seeds the search never saw"


def test_the_report_shows_them(found: tuple[Path, dict[str, Any]]) -> None:
    out, result = found
    page = re.sub(r"<script\b.*?</script>", "", (out / "report.html").read_text(), flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", " ", page)
    assert result["answer"]["sentence"] in " ".join(text.split()).replace("&#x27;", "'")
    assert not re.search(r"""(src|href)\s*=\s*["']https?:""", page)
    for row in result["rows"]:
        assert f"{row['quality']:.2g}"[:4] in text
    for name in ("tradeoff.png", "front.png", "history.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def repeat(call: Command, result: dict[str, Any], out: Path, **changed: str) -> dict[str, Any]:
    """What the printed command says of its run; ``changed``: other values of its options."""
    words = shlex.split(result["answer"]["command"])
    assert words[0] == "elastune"
    for name, value in changed.items():
        words[words.index(f"--{name}") + 1] = value
    return call(*words[1:], "--out", str(out))


def check_repeated(result: dict[str, Any], found: Path, run: dict[str, Any]) -> None:
    """``run`` is the training that was told, on the workers it was told of: metrics and weights, to the last bit."""
    row, answer = result["rows"][result["answer"]["pick"]], result["answer"]
    results = {r.trial: r for r in (e.record for e in read(found / "journal.jsonl")) if isinstance(r, TrialFinished)}
    assert answer["command_trial"] in row["trials"]
    trained = results[answer["command_trial"]].run
    assert trained is not None
    assert answer["command_metrics"] == trained.metrics == run["metrics"]
    assert run["sha256"] == trained.sha256
    assert (run["workers"], run["num_slots"]) == (min(row["workers"], MOST), row["workers"])
    name = f"test_{result['quality']}"
    assert f"it gives {name} {run['metrics'][name]!r} again" in answer["command_note"]
    seeds = [results[trial].metrics[name] for trial in row["trials"] if results[trial].run]
    assert row["quality"] == pytest.approx(statistics.fmean(seeds))
    assert run["metrics"][name] in seeds


def test_the_command_trains_the_pick(found: tuple[Path, dict[str, Any]], tmp_path: Path, here: Command) -> None:
    out, result = found
    workers = min(MOST, result["rows"][result["answer"]["pick"]]["workers"])  # with equal bits
    check_repeated(result, out, repeat(here, result, tmp_path / "run", workers=str(workers)))


@pytest.mark.parametrize("mode", ["exact", *soaked("fast")])
def test_what_is_told_of_several_workers_is_what_the_command_gives(tmp_path: Path, mode: str, here: Command) -> None:
    """With dropout and with BatchNorm: here it shows in the result what a pass holds."""
    out = tmp_path / "out"
    asked = ("--workers", "3,4", "--budget", "auto", "--seeds", "2", "--epochs", "1", "--mode", mode)
    result = here("frontier", "tests/programs/normalised.py", *asked, "--sampler", "random", "--out", str(out))
    picked = result["rows"][result["answer"]["pick"]]
    assert picked["quality_label"] == ("emulated" if mode == "exact" else "measured")
    repeated = repeat(here, result, tmp_path / "run")
    check_repeated(result, out, repeated)
    fewer = repeat(here, result, tmp_path / "fewer", workers="1")
    assert (fewer["sha256"] == repeated["sha256"]) is (mode == "exact"), "only there workers do not show"
