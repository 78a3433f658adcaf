"""What a simulated run has kept, as of any time that a journal may go back to."""

from __future__ import annotations

from pathlib import Path

from elastune.tuning.simulate.trial_model import Position, Progress, load_progress, save_progress


def epoch(folder: Path, at: float) -> int | None:
    result = load_progress(folder, at)
    return None if result is None else result.position.epoch


def test_an_end_that_nobody_heard_of_may_come_again_and_again(tmp_path: Path) -> None:
    save_progress(tmp_path, Progress(Position(1)), 10.0)
    for _ in range(3):  # controllers die right after it, one after the other
        save_progress(tmp_path, Progress(Position(3)), 30.0)
        assert epoch(tmp_path, 29.0) == 1
        assert epoch(tmp_path, 30.0) == 3
    save_progress(tmp_path, Progress(Position(5)), 50.0)
    assert epoch(tmp_path, 49.0) == 3
    assert epoch(tmp_path, 50.0) == 5


def test_before_its_first_end_there_was_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        save_progress(tmp_path, Progress(Position(1)), 10.0)
        assert epoch(tmp_path, 9.0) is None
