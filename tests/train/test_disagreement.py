"""Workers that do not mean the same samples must not train on: the commit gate, between real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    for folder in (here, here.parent / "comm"):
        monkeypatch.syspath_prepend(str(folder))


def ends(out: Path, mode: str, seeds: list[int], counts: list[int]) -> list[tuple[Any, ...]]:
    """How each of two workers ended: its error, and its steps."""
    from disagreeing_workers import train

    from elastune.testing.worker_processes import processes

    with processes(2, train, str(out), mode, seeds, counts) as workers:
        return [workers.receive(rank) for rank in range(2)]


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize(
    ("seeds", "counts", "words"),
    [([0, 1], [64, 64], "samples whose numbers"), ([0, 0], [64, 60], "a pass of 64 samples")],
    ids=["orders differ", "data sets differ"],
)
def test_workers_that_disagree_about_the_data_complete_no_step(
    tmp_path: Path, mode: str, seeds: list[int], counts: list[int], words: str
) -> None:
    for error, steps in ends(tmp_path, mode, seeds, counts):
        assert error.startswith("UserError: all ranks must take a step with the same data")
        assert "in step 1, rank 0 has " in error
        assert words in error
        assert "; rank 1 has " in error
        assert steps == 0


def test_workers_that_agree_train(tmp_path: Path) -> None:
    assert ends(tmp_path, "exact", [0, 0], [64, 64]) == [("", 4), ("", 4)]


DETAIL = "every worker must ask session.change for the same"


@pytest.mark.parametrize(
    ("wishes", "seen", "asked", "detail"),
    [
        ([{}, {"lr": 0.5}], 4, {}, f"rank 0 asked for nothing, another did; {DETAIL}"),
        ([{"lr": 0.5}, {}], 3, {"lr": 0.5}, DETAIL),
        ([{"lr": 0.5}, {"lr": 0.25}], 3, {"lr": 0.5}, DETAIL),
    ],
    ids=["another than rank 0", "rank 0 alone", "different wishes"],
)
def test_a_change_that_not_all_ask_for_is_told_whoever_asked(
    tmp_path: Path, wishes: list[dict[str, Any]], seen: int, asked: dict[str, Any], detail: str
) -> None:
    from disagreeing_workers import ask

    from elastune.testing.worker_processes import processes

    with processes(2, ask, str(tmp_path), wishes) as workers:
        (told, rate), (others, other_rate) = [workers.receive(rank) for rank in range(2)]
    assert told == [("program", 4, seen, 0.1, "disagreed", asked, detail)]
    assert others == [], "of a run that others launched only rank 0 keeps the journal"
    assert rate == other_rate == 0.1
