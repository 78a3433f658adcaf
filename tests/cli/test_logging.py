"""``--log-level`` and ``--log-format``: what the command, its workers and an agent log, and what they do without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked import elastune

from elastune.cli import main
from elastune.core.journal import logs

PROGRAM = Path(__file__).parents[1] / "faults" / "programs" / "elastic.py"
TRAINING = ["--set", "epochs=1", "--set", "samples=256", "--set", "plain=true", "--workers", "2", "--slots", "2"]
FACTS = ("time", "level", "logger", "message", *logs.FACTS)
LIMIT_S = 120.0


def trained(folder: Path, *options: str) -> tuple[list[str], list[list[str]]]:
    """The lines of stderr of a run, and those of its workers' logs."""
    with (folder / "said").open("wb") as said, (folder / "result").open("wb") as result:
        words = ["run", str(PROGRAM), *TRAINING, "--out", str(folder / "run"), *options]
        assert elastune(*words, out=result, err=said).wait(LIMIT_S) == 0, (folder / "said").read_text()
    workers = sorted((folder / "run" / "logs").glob("worker-*.log"))
    return (folder / "said").read_text().splitlines(), [path.read_text().splitlines() for path in workers]


def parsed(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_json_lines_of_the_command_and_of_each_worker(tmp_path: Path) -> None:
    said, workers = trained(tmp_path, "--log-level", "info", "--log-format", "json")
    controller = parsed(said)
    assert all(tuple(line)[: len(FACTS)] == FACTS for line in controller)
    assert {line["run"] for line in controller} == {str(tmp_path / "run")}
    text = "\n".join(line["message"] for line in controller)
    for part in ("worker 1: Connected", "InstallView", "checkpointed step=", "run_finished", "has ended: code 0"):
        assert part in text
    assert "token" not in text
    assert any(line.startswith("[") and "done: " in line for line in said), "the story is told as ever"
    assert len(workers) == 2
    for rank, lines in enumerate(map(parsed, workers)):
        entered = next(line for line in lines if "in view 1" in line["message"])
        assert (entered["run"], entered["rank"], entered["step"]) == (str(tmp_path / "run"), rank, 0)
        assert entered["host"]
        assert [line["step"] for line in lines][-1] > 0


def test_without_the_option_nothing_is_logged(tmp_path: Path) -> None:
    said, workers = trained(tmp_path)
    lines = [line for each in (said, *workers) for line in each]
    assert not [line for line in lines if "elastune.elastic" in line or line.startswith("{")]


@pytest.mark.parametrize("command", ["run", "tune", "frontier"])
@pytest.mark.parametrize("option", [("--log-level", "loud"), ("--log-format", "xml")])
def test_another_level_or_form_is_refused_in_one_line(
    command: str, option: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([command, str(PROGRAM), *option, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{option[0]} (or its environment variable) is one of" in line
    assert not (tmp_path / "out").exists()


def test_an_agent_refuses_it_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a" * 64)
    (tmp_path / "token").chmod(0o600)
    join = ["agent", "--join", "127.0.0.1:1", "--token-file", str(tmp_path / "token")]
    assert main([*join, "--log-level", "loud"]) == 2
    assert "'loud'" in capsys.readouterr().err
