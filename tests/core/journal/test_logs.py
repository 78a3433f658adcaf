"""Logging: silent by default, one line a record, and never the end of a training."""

from __future__ import annotations

import io
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal import logs
from elastune.core.journal.records import Checkpointed, MembershipEvent, RunFailed

LOG = logging.getLogger("elastune.tests")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Returns what was written to stderr."""
    monkeypatch.setattr(logs, "_FACTS", {"host": socket.gethostname})  # not those of other tests
    yield lambda: capsys.readouterr().err
    logs.begin(logs.LogSettings())


def test_a_library_is_silent() -> None:
    words = "import logging, elastune; logging.getLogger('elastune.x').warning('something'); print('ok')"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("ok\n", "")


def test_a_program_hears_the_records_by_its_own_handlers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "elastune"):
        logs.log_record(LOG, Checkpointed(7, "step-7"))
        logs.run_logger("elastune.tests", "out").info("hello")
    assert [record.message for record in caplog.records] == ["checkpointed step=7 path=step-7", "hello"]
    assert caplog.records[1].run == "out"  # type: ignore[attr-defined]


def test_json_lines_have_all_facts(written: Callable[[], str]) -> None:
    logs.begin(logs.LogSettings("info", "json"))
    steps = iter([3, 4])
    logs.describe(run="out", rank=1, host="a", step=lambda: next(steps))
    LOG.debug("not written")
    LOG.info("two\nlines")
    try:
        raise ValueError("why")
    except ValueError:
        LOG.exception("it failed")
    logs.run_logger("elastune.tests", "other").warning("no step: %s", 1)
    first, second, third = (json.loads(line) for line in written().splitlines())
    assert list(first) == ["time", "level", "logger", "message", "run", "rank", "host", "step"]
    assert (first["message"], first["level"], first["logger"]) == ("two\nlines", "info", "elastune.tests")
    assert [first[name] for name in logs.FACTS] == ["out", 1, "a", 3]
    assert "ValueError: why" in second["error"]
    assert (third["run"], third["step"]) == ("other", None), "the step is not known any more"


def test_a_line_of_text_is_for_a_terminal(written: Callable[[], str]) -> None:
    logs.begin(logs.LogSettings("warning"))
    logs.describe(run="out", host="a")
    LOG.info("not written")
    LOG.warning("red \x1b[31m")
    line = written()
    assert line.endswith(" WARNING elastune.tests [run=out host=a] red \\x1b[31m\n")


def test_levels_of_records(written: Callable[[], str]) -> None:
    logs.begin(logs.LogSettings("debug"))
    logs.log_record(LOG, RunFailed("exception", "x" * 999, 0))
    logs.log_record(LOG, MembershipEvent({"event": "lost"}))
    (line,) = written().splitlines()
    assert " ERROR " in line
    assert len(line) < 600


def test_begin_again_replaces(written: Callable[[], str]) -> None:
    for level in ("info", "error", None):
        logs.begin(logs.LogSettings(level))
        LOG.warning("once %s", level)
        assert logs.active() == (level is not None)
    assert written().count("once") == 1
    assert logging.getLogger("elastune").propagate


@pytest.mark.parametrize("wrong", [{"level": "loud"}, {"level": "INFO"}, {"level": "info", "format": "xml"}])
def test_another_level_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is one of"):
        logs.LogSettings(**wrong)


def test_settings_pass_through_an_environment() -> None:
    settings = logs.LogSettings("debug", "json")
    assert logs.from_environment(settings.variables) == settings
    assert logs.from_environment({}).variables == {}


FULL = """
import logging, os, sys
from elastune.core.journal import logs
logs.begin(logs.LogSettings("info"))
kept = os.dup(2)
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
for number in range(3):
    logging.getLogger("elastune.x").info("lost")
os.dup2(kept, 2)
logging.getLogger("elastune.x").info("back")
print("trained on")
"""


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=True)
    assert done.stdout == "trained on\n"
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith("back\n")


def test_lines_that_cannot_be_written_are_announced_once(capfd: pytest.CaptureFixture[str]) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    stderr, sys.stderr = sys.stderr, Full()
    try:
        logs.begin(logs.LogSettings("info"))
        LOG.info("lost")
        LOG.info("lost, too")
    finally:
        sys.stderr = stderr
        logs.begin(logs.LogSettings())
    assert capfd.readouterr().err == ("elastune: log lines are lost from here on: [Errno 28] No space left on device\n")
