"""What a logger is, which ones there are, and the processes in which they follow a journal (``--log NAME``).

A logger sends what a run or a study has journaled to a tracker, such as MLflow. Each has a process of its own, which
reads the journal and nothing else. So a slow, broken or absent tracker never changes, delays or stops a training.

No other room imports the loggers: elastune's own are named like those of other packages (docs/extending.md).
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from elastune.core import options
from elastune.core.errors import UserError
from elastune.core.plugins import EXTRAS, Plugins

# --- what a logger receives ---

State = Literal["finished", "stopped", "failed"]
"""How a run has ended."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Something to log.

    Attributes:
        run: The run that it belongs to: "" for the run, study or frontier itself, "trial-3" for a trial.
        at: Seconds since the epoch.
    """

    run: str = ""
    at: float


@dataclass(frozen=True, kw_only=True)
class RunBegan(Logged):
    """A run begins.

    Attributes:
        name: For people: the name of the output folder, and of a trial its number.
        parent: The ``run`` of the study of a trial; None for all others.
        settings: JSON values, some in groups such as "config" and "execution".
    """

    name: str
    parent: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunResumed(Logged):
    """A run goes on.

    Attributes:
        step: What was logged of later steps is void: they are repeated. None: all that was logged counts.
    """

    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class ValuesLogged(Logged):
    """Numbers after ``step`` steps, such as "metrics/accuracy". They may be infinite or NaN."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class LineLogged(Logged):
    """A line for people about ``topic``, such as "decisions/gns"."""

    step: int
    topic: str
    line: str


@dataclass(frozen=True, kw_only=True)
class ArtifactLogged(Logged):
    """A file or folder of the run, such as its newest checkpoint, is at ``path``."""

    step: int
    name: str
    path: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Logged):
    """A run has ended. ``values``: its results; ``line``: why it ended, if that has to be said."""

    state: State
    values: Mapping[str, float] = field(default_factory=dict)
    line: str = ""


Event = RunBegan | RunResumed | ValuesLogged | LineLogged | ArtifactLogged | RunEnded


# --- what a logger does ---


@dataclass(frozen=True)
class Logger(ABC):
    """Sends events to one tracker. Subclasses are frozen dataclasses of their options.

    A logger may raise anything: its process then ends, with one line for the user.

    Example:
        >>> parse_logger("mlflow:experiment=digits")  # an object of the subclass ``MlflowLogger``
    """

    name: ClassVar[str]
    needs: ClassVar[str] = ""
    """The package that it imports, as Python names it; "": none."""

    @abstractmethod
    def open(self, out: Path, ids: dict[str, str]) -> LogWriter:
        """Return the writer for the journal in ``out``.

        Args:
            out: The output folder.
            ids: What the writer may keep, such as the tracker's id of each run. A command that resumes gets it back.
        """


class LogWriter(ABC):
    """An open logger. It gets each event once, in the order of the journal, also over several commands."""

    @abstractmethod
    def write(self, event: Event) -> None:
        """Log ``event``."""

    def flush(self) -> None:
        """Hand on all that was written: what was flushed is not written again. Called about once a second."""
        return

    def close(self) -> None:
        """Flush, and end the connection. Runs without ``RunEnded`` may go on under a later command."""
        self.flush()


LOGGERS = Plugins(
    "elastune.loggers",
    "logger",
    built_in={
        "csv": "elastune.loggers.csv:CsvLogger",
        "mlflow": "elastune.loggers.mlflow:MlflowLogger",
        "tensorboard": "elastune.loggers.tensorboard:TensorBoardLogger",
        "wandb": "elastune.loggers.wandb:WandbLogger",
    },
)
"""All loggers: subclasses of ``Logger``."""


def parse_logger(text: str) -> Logger:
    """Return the logger of ``NAME[:OPTION=VALUE,...]``, whose package is installed but not imported yet.

    Raises:
        UserError: For an unknown logger or option, and for a missing package.
    """
    name, words = options.split(text, "a logger", "mlflow:experiment=digits")
    if name not in LOGGERS.names():
        raise UserError(f"--log must be {' or '.join(LOGGERS.names())}", repr(text), "such as --log csv")
    kind: type[Logger] = LOGGERS.load_class(name, Logger)
    if kind.needs and importlib.util.find_spec(kind.needs) is None:
        extra = EXTRAS.get(kind.needs)
        rule = f"the logger {name} needs {extra.package if extra else kind.needs}"
        raise UserError(rule, "no such package", extra.install if extra else f"install {kind.needs}")
    return options.parse(f"the logger {name}", words, kind)


def check_loggers(texts: Sequence[str]) -> tuple[str, ...]:
    """Return ``texts`` if each names a logger, and none twice. Raises ``UserError``."""
    names = [parse_logger(text).name for text in texts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError("a logger may be named once", twice[0], "leave the others out")
    return tuple(texts)


# --- the process of a logger ---

LAST_S = 60.0
"""How long a logger may take for what is left once the work is over."""


def folder_of(out: Path) -> Path:
    """Where loggers keep how far they have come."""
    return out / "loggers"


@contextmanager
def logging_to(texts: Sequence[str], out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, the loggers ``texts`` follow the journal in ``out``.

    Args:
        texts: As ``check_loggers`` returns them.
        out: The output folder.
        say: Gets a line, from any thread, if a logger fails.
    """
    followers = [Follower(text, out, say) for text in texts]
    try:
        yield
    finally:
        for follower in followers:
            follower.finish()
        for follower in followers:
            follower.wait(LAST_S)


class Follower:
    """The process in which one logger follows a journal. It ends after this process, however that ends."""

    def __init__(self, text: str, out: Path, say: Callable[[str], None]) -> None:
        self._name, self._out, self._say = text.partition(":")[0].strip(), out, say
        self._process: subprocess.Popen[bytes] | None = None
        # -P: a file csv.py in the folder of the user's program is not Python's csv
        command = [sys.executable, "-P", "-m", "elastune.loggers", str(out.absolute()), text]
        pipe = subprocess.PIPE
        try:  # a session of its own: Ctrl-C is for the training
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        except OSError as error:
            self._tell(f"could not start: {error}")
            return
        self._listener = threading.Thread(target=self._listen, name=f"log {self._name}", daemon=True)
        self._listener.start()

    def finish(self) -> None:
        """Tell the process that nothing more will be journaled."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def wait(self, most_s: float) -> None:
        """Wait until all is logged; end the process after ``most_s`` seconds, or at an interrupt."""
        if self._process is None:
            return
        try:
            self._process.wait(most_s)
        except subprocess.TimeoutExpired:
            self._tell(f"had not ended after {most_s:g} s")
        finally:
            self._process.kill()  # no-op if it has ended
            self._process.wait()
            self._listener.join()

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._tell(line.decode("utf-8", "replace").strip())

    def _tell(self, why: str) -> None:
        self._say(f"the logger {self._name} {why}; the rest can be logged later: {later(self._out, self._name)}")


def later(out: Path, name: str) -> str:
    """The command that logs what a logger has not."""
    return f"elastune report {out} --log {name}"
