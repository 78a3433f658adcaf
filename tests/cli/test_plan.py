"""``elastune plan`` from the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest


def test_a_plan_of_a_program_as_json(elastune: Any, here: Any) -> None:
    told = elastune(
        "plan",
        "linear.py",
        "--nodes",
        4,
        "--calibrate",
        "1s",
        "--runs",
        8,
        "--memory",
        "1GiB",
        "--measure",
        2,
        "--out",
        "kept",
        "--json",
    )
    assert told.code == 0, told.err
    found = json.loads(told.out)
    assert found["kind"] == "plan"
    best = found["plans"][0]
    assert 1 <= best["workers"] <= 4
    assert best["interval_s"][0] <= best["seconds"] <= best["interval_s"][1]
    assert found["size"]["batch_size"] == 16
    assert found["probed"]["data=1, 16 samples a pass"] > 0
    assert found["memory"].startswith("fits: ")
    assert len(found["measured"]) == 2
    for row in found["measured"]:
        assert row["failed"] == ""
        assert row["step_error"] == pytest.approx(row["step_s"] / row["measured_step_s"] - 1)
        assert row["memory_error"] == pytest.approx(row["memory_bytes"] / row["measured_memory_bytes"] - 1)
        low, high = row["step_interval_s"]
        assert row["within"] == (low <= row["measured_step_s"] <= high)
    assert (here / "kept" / "probe-1" / "journal.jsonl").exists()
    assert elastune("plan", "linear.py", "--nodes", 1, "--out", "kept").err.count("must not be there yet") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes", 0), "--nodes"),
        (("--nodes", 70_000), "65,536"),
        (("--nodes", 1, "--gpus-per-node", 0), "--gpus-per-node"),
        (("--nodes", 1, "--memory", "much"), "--memory"),
        (("--nodes", 1, "--link", "fast"), "--link"),
        (("--nodes", 1, "--deadline", "soon"), "--deadline"),
        (("--nodes", 1, "--top", 0), "--top"),
        (("--nodes", 1, "--runs", 0), "--runs"),
        (("--nodes", 1, "--crowding", "nan"), "--crowding"),
        (("--nodes", 1, "--noise-scale", "-1"), "--noise-scale"),
        (("--nodes", 1, "--price", 0), "price"),
        (("--nodes", 1, "--measure", 101), "can be measured"),
        (("--nodes", 1, "--from", "nowhere"), "must have journals"),
    ],
)
def test_wrong_input_is_one_line(elastune: Any, options: tuple[object, ...], words: str) -> None:
    told = elastune("plan", "linear.py", *options)
    assert told.code == 2
    assert words in told.err
    assert told.err.count("\n") == 1


def test_a_program_that_fails_tells_its_own_error_once(elastune: Any, here: Any) -> None:
    (here / "broken.py").write_text("def train(session):\n    raise RuntimeError('no such thing')\n")
    told = elastune("plan", "broken.py", "--nodes", 1)
    assert told.code == 2
    assert told.err.count("no such thing") == 1
