"""``elastune.find_plan`` asks what ``elastune plan`` asks, and answers with what it prints."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import elastune
from elastune.cli import main
from elastune.core.errors import UserError
from elastune.tuning.cluster_plan.find_plan import PlanRequest

PROGRAM = "config = {'lr': 0.05}\n\ndef train(session):\n    raise RuntimeError('no such thing')\n"


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "planned.py"
    path.write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("planned", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planned"] = module
    spec.loader.exec_module(module)
    yield module.train
    del sys.modules["planned"]


def test_it_asks_what_the_command_line_asks(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PlanRequest] = []

    def note(request: PlanRequest) -> None:
        asked.append(request)
        raise UserError("asked", "enough", "nothing")

    monkeypatch.setattr("elastune.tuning.cluster_plan.find_plan.plan_cluster", note)
    words = ["--nodes", "4", "--gpus-per-node", "8", "--memory", "24GiB", "--deadline", "8h", "--price", "2.5"]
    words += ["--runs", "64", "--crowding", "0.01", "--link", "25Gbit/s", "--noise-scale", "500", "--calibrate", "9s"]
    words += ["--out", "kept", "--from", "before", "--mesh", "data=2,tensor=2"]
    words += ["--variation", "0.3", "--generations", "--stopping", "asha", "--sampler", "random"]
    assert (
        main(
            [
                "plan",
                str(tmp_path / "planned.py"),
                *words,
                "--top",
                "3",
                "--measure",
                "2",
                "--set",
                "lr=0.1",
                "--seed",
                "7",
            ]
        )
        == 2
    )
    with pytest.raises(UserError, match="asked"):
        elastune.find_plan(
            train,
            nodes=4,
            workers_per_node=8,
            memory_bytes=24 * 2**30,
            deadline_s=8 * 3600.0,
            price_per_worker_hour=2.5,
            runs=64,
            crowding=0.01,
            variation=0.3,
            generations=True,
            sampler="random",
            stopping="asha",
            mesh="data=2,tensor=2",
            link_gbit_s=25.0,
            noise_scale=500.0,
            calibrate_s=9.0,
            top=3,
            measure=2,
            out="kept",
            earlier=["before"],
            config={"lr": 0.1},
            seed=7,
        )
    by_words, by_call = asked
    assert replace(by_words, program=by_call.program) == by_call
    assert by_words.program.path == by_call.program.path


def test_both_leave_out_the_same(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PlanRequest] = []

    def note(request: PlanRequest) -> None:
        asked.append(request)
        raise UserError("asked", "enough", "nothing")

    monkeypatch.setattr("elastune.tuning.cluster_plan.find_plan.plan_cluster", note)
    assert main(["plan", str(tmp_path / "planned.py"), "--nodes", "2"]) == 2
    with pytest.raises(UserError, match="asked"):
        elastune.find_plan(train, nodes=2)
    assert replace(asked[0], program=asked[1].program) == asked[1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"nodes": 0}, "nodes"),
        ({"nodes": 1, "memory_bytes": -1.0}, "memory of a worker"),
        ({"nodes": 1, "deadline_s": 0.0}, "deadline"),
        ({"nodes": 1, "price_per_worker_hour": 0.0}, "price"),
        ({"nodes": 1, "link_gbit_s": float("nan")}, "link_gbit_s"),
        ({"nodes": 1, "calibrate_s": -1.0}, "calibrate"),
        ({"nodes": 1, "top": 0}, "can be shown"),
        ({"nodes": 1, "measure": -1}, "can be measured"),
        ({"nodes": 1, "runs": 0}, "at least one training"),
        ({"nodes": 1, "variation": -1.0}, "variation"),
        ({"nodes": 1, "stopping": "pbt"}, "early stopping"),
        ({"nodes": 1, "sampler": "gentic"}, "sampler must be known"),
        ({"nodes": 1, "mesh": "data=x"}, "mesh"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(train: Any, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        elastune.find_plan(train, **wrong)
