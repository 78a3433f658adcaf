"""Logging: silent by default, one line a record, and never the end of a training."""

from __future__ import annotations

import io
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.sessions import lone_session
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.core.journal import logs
from elastune.core.journal.logs import _FilledFields
from elastune.core.journal.records import Checkpointed, MembershipEvent, Record, RunFailed

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


class Told:
    """A value that counts how often it is made text."""

    def __init__(self) -> None:
        self.times = 0

    def __str__(self) -> str:
        self.times += 1
        return "told"

    __repr__ = __str__


@dataclass
class Fact:
    """A record of the journal, at each level that records have."""

    value: Told
    kind: str


@pytest.mark.parametrize("kind", ["reported", "checkpointed", "worker_gone", "run_failed"])
def test_what_nobody_hears_is_never_made_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs.ROOT, "propagate", False)  # pytest hears all that is above
    told = Told()
    record = Fact(told, kind)
    logs.log_record(LOG, record)
    assert told.times == 0
    assert f"value={told}" in str(_FilledFields(record))


def test_a_step_logs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of the journal asks once whether anybody hears it. Nothing else asks, so a step pays nothing."""
    asked: list[str] = []
    sent: list[Record] = []
    is_enabled = logging.Logger.isEnabledFor

    def counting(logger: logging.Logger, level: int) -> bool:
        asked.extend([logger.name] if logger.name.startswith("elastune") else [])
        return is_enabled(logger, level)

    monkeypatch.setattr(logging.Logger, "isEnabledFor", counting)

    def send(record: Record) -> None:
        sent.append(record)
        logs.log_record(LOG, record)

    session = lone_session(tmp_path / "run", send=send)
    model: Any = torch.nn.Linear(2, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in session.epochs(1):
        for (x,) in session.batches(TensorDataset(torch.ones(64, 2)), batch_size=4):
            session.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert 0 < len(sent) < session.progress.position.step
    assert asked == [LOG.name] * len(sent)


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
from elastune.core.journal.logs import _FilledFields
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
