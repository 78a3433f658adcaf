"""Results that the same command goes on from: what is measured again, what is refused, and Ctrl-C on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.common.kept import OutOfTime, Rows, begun, ended
from tests.support.agent_runs import AgentRun

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STUDIES = [SimpleNamespace(key=f"a by me {seed}") for seed in range(4)]


def test_what_a_result_has_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = tmp_path / "new" / "out.json", []

    def found(rows: Rows, number: int) -> list[int]:
        return rows.of(f"seed {number}", lambda: asked.append(number) or {"found": [number]})["found"]

    for seeds in (2, 2, 3):
        monkeypatch.setattr(sys, "argv", ["one.py", "--run", str(len(asked))])
        rows = Rows(out, {"sizes": (1, 2)})
        rows.told["sum"] = sum(found(rows, number)[0] for number in range(seeds))
        rows.write()
    assert asked == [0, 1, 2]
    data = json.loads(out.read_text())
    assert (data["sum"], data["settings"]) == (3, {"sizes": [1, 2]})
    assert list(data["cells"]) == ["seed 0", "seed 1", "seed 2"]
    assert data["command"].endswith("python one.py --run 2")
    rows = Rows(out, {"sizes": (1, 2)})
    monkeypatch.setattr(sys, "argv", ["one.py", "--run", "nothing is measured"])
    rows.write()
    assert json.loads(out.read_text())["command"] == data["command"]  # and so is the machine: the newest row's
    assert os.listdir(out.parent) == [out.name]


@pytest.mark.parametrize(
    "content",
    [
        '{"settings": {"gpus": 8}, "cells": {}, "command": "python one.py"}',
        '{"cells": {}, "command": "python one.py"}',
        '{"settings": {"gpus": 4}, "cells": {}, "command": "python other.py"}',
        "[1]",
        '{"cells": {',
    ],
)
def test_results_of_others_are_refused_in_one_line(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/one.py"])
    out = tmp_path / "out.json"
    out.write_text(content)
    assert ended(lambda: len(Rows(out, {"gpus": 4}).cells)) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert out.read_text() == content


def test_no_row_is_begun_that_would_end_too_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, late = Rows(None, limit_s=60.0), Rows(tmp_path / "out.json", limit_s=40.0)
    rows.cells |= {"seed 0": {"took_s": 50.0}}
    late.cells |= rows.cells
    assert list(rows.of("seed 1", dict)) == ["took_s"]
    assert late.of("seed 0", dict) == {"took_s": 50.0}
    with pytest.raises(OutOfTime, match="after 1"):
        late.of("seed 1", dict)
    assert ended(lambda: len(late.of("seed 1", dict))) == 0
    assert "the same command goes on" in capsys.readouterr().out


def test_studies_that_were_cut_are_completed_and_too_short_ones_measured_again(tmp_path: Path) -> None:
    out, asked = tmp_path / "out.json", []

    def measure(study: Any, cut_at: int | None, steps: int) -> dict[str, Any]:
        seed = int(study.key[-1])
        if seed == cut_at:
            raise KeyboardInterrupt
        asked.append(seed)
        return {"steps": steps}

    assert ended(lambda: Rows(out).complete(STUDIES, lambda one: measure(one, 2, 50), bool) or 0) == 130
    assert list(begun(out, {})["cells"]) == ["a by me 0", "a by me 1"]
    Rows(out).complete(STUDIES, lambda one: measure(one, None, 50), bool)
    assert asked == [0, 1, 2, 3]
    Rows(out).complete(STUDIES[:2], lambda one: measure(one, None, 100), lambda row: row["steps"] >= 100)
    assert asked == [0, 1, 2, 3, 0, 1]
    assert [row["steps"] for row in Rows(out).cells.values()] == [100, 100, 50, 50]


def test_a_row_that_ended_is_kept_though_ctrl_c_strikes_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out.json", os.replace

    def struck(*paths: Any) -> None:
        monkeypatch.setattr(os, "replace", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", struck)
    with pytest.raises(KeyboardInterrupt):
        Rows(out).of("seed 0", lambda: {"found": 1})
    assert begun(out, {})["cells"]["seed 0"]["found"] == 1


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, sys.argv[1])
from benchmarks.common.kept import Rows, ended

def measure(study):
    seed = int(study.key[-1])
    while seed >= 2 and not Path("go").exists():
        time.sleep(0.02)
    return {"seed": seed, "process": os.getpid()}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    studies = [SimpleNamespace(key=f"a me {seed}") for seed in range(4)]
    sys.exit(ended(lambda: Rows(Path("out.json")).complete(studies, measure, bool, 2) or 0))
"""


@pytest.mark.soak
def test_several_processes_lose_nothing_by_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    out, command = tmp_path / "out.json", [sys.executable, "program.py", str(BENCHMARKS.parent)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as cut:
        while cut.poll() is None and (not out.exists() or len(json.loads(out.read_text())["cells"]) < 2):
            time.sleep(0.02)
        os.killpg(cut.pid, signal.SIGINT)  # as a terminal does: to all processes
        said = cut.communicate()[1]  # when none of them holds it any more
    assert cut.returncode == 130
    assert "interrupted; the same command goes on" in said  # a process that has just begun may say more
    before = json.loads(out.read_text())["cells"]
    assert sorted(before) == ["a me 0", "a me 1"]
    (tmp_path / "go").touch()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    after = json.loads(out.read_text())["cells"]
    assert sorted(after) == ["a me 0", "a me 1", "a me 2", "a me 3"]
    assert before.items() <= after.items()


def test_what_a_command_that_it_runs_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where a training wants data that this machine has not got."""
    network: Any = SimpleNamespace(address="127.0.0.1", hosts=[])

    def measured() -> int:
        run = AgentRun(network, tmp_path, "run", str(tmp_path / "no_such_program.py"))
        try:
            run.until(lambda: False)
        finally:
            run.close()
        return 0

    assert ended(measured) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no_such_program.py" in line
