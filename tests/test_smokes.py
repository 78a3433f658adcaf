"""The runner of smoke runs: what fails ends it, and is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

RUNNER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import smokes
smokes.BENCHMARKS, smokes.LIMIT_S = Path({folder!r}), 1
sys.exit(smokes.main(1, sys.argv[1:]))
"""
SCRIPTS = {
    "well": "import sys; print('well', *sys.argv[1:])",
    "wrong": "import sys; print('wrong'); sys.exit(3)",
    "hangs": "import time; time.sleep(60)",
}


def ran(folder: Path, *names: str) -> tuple[int, str]:
    (folder / "some").mkdir(exist_ok=True)
    for name, lines in SCRIPTS.items():
        (folder / "some" / f"{name}.py").write_text(lines)
    code = RUNNER.format(tests=str(TESTS), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


def test_each_has_its_options_and_what_it_says_is_told(tmp_path: Path) -> None:
    code, said = ran(tmp_path, "well --at 3", "well")
    assert code == 0
    assert "well --smoke --at 3\n" in said
    assert said.count("code 0") == 2


def test_after_one_that_failed_no_other_begins(tmp_path: Path) -> None:
    code, said = ran(tmp_path, "wrong", "well")
    assert code == 1
    assert "benchmarks/wrong: code 3" in said
    assert "wrong\n" in said
    assert "benchmarks/well" not in said


def test_one_that_hangs_ends_and_says_where_it_stood(tmp_path: Path) -> None:
    code, said = ran(tmp_path, "hangs")
    assert code == 1
    assert "code -14" in said
    assert "hangs.py" in said
