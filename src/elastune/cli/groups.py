"""Groups of options that several commands take, and the values that each group makes of its options."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from elastune.cli import options
from elastune.cli.flatten import Chosen
from elastune.cli.machine import choose_device, choose_out, use_data
from elastune.core import logs, notation
from elastune.core.errors import UserError
from elastune.core.fields import setting
from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import settled
from elastune.core.run import OPEN, ExecutionSettings, Place, Program

if TYPE_CHECKING:
    from elastune.cli.chaos import Faults
    from elastune.runtime.preemption import NoticeSource


@dataclass(frozen=True)
class ExecutionOptions:
    """The execution settings of a command line.

    Attributes:
        given: The values by the names of the fields of ``ExecutionSettings``. What is left out, others decide.
    """

    chosen: Mapping[str, Any]

    def __post_init__(self) -> None:
        if (slots := self.chosen.get("num_slots", 1)) < 1:
            raise UserError("a run has at least one slot", f"{slots} slots", "leave --slots out or raise it")
        if (blocks := self.chosen.get("virtual_tensor", 1)) < 1:
            raise UserError("virtual blocks must be from 1 on", blocks, "leave --virtual-tensor out or raise it")

    @property
    def mode(self) -> str:
        """The mode, "exact" or "fast"."""
        return str(self.chosen["mode"])

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of --mesh, or None."""
        return self.chosen.get("mesh")

    def on(self, workers: int | None, *, local: bool = True) -> ExecutionSettings:
        """The execution settings for ``workers`` or for the workers of --mesh. The job checks most values.

        ``local``: whether the workers run on this machine. Other hosts may have devices that this machine lacks.
        """
        device = choose_device(self.chosen["device"], local=local)
        return ExecutionSettings(**{**self.chosen, "device": device, "workers": workers or 0})

    def execution(
        self, workers: int | None, most_workers: int | None = None, learners: int = 1, *, local: bool = True
    ) -> ExecutionSettings:
        """The execution settings, with as many slots as the training needs; arguments as in ``settled`` and ``on``."""
        device = choose_device(self.chosen["device"], local=local)
        return settled({**self.chosen, "device": device}, workers, most_workers, learners)


Execution = Annotated[
    ExecutionOptions, Chosen(ExecutionSettings, without=("workers",), defaults={"device": "auto"}, open=OPEN)
]
FastExecution = Annotated[
    ExecutionOptions,
    Chosen(ExecutionSettings, without=("workers",), defaults={"device": "auto", "mode": "fast"}, open=OPEN),
]
WorkerExecution = Annotated[
    ExecutionOptions,
    Chosen(
        ExecutionSettings,
        without=("workers", "num_slots", "mesh", "copies", "topology", "bucket_bytes"),
        defaults={"device": "auto"},
        open=OPEN,
    ),
]


@dataclass(frozen=True)
class OutputOptions:
    """The folder of data, and the form of the output."""

    data: options.Data = None
    json: options.Json = False

    def program(self, file: Path, arguments: Sequence[str] | None, out: Path, *, resume: bool) -> Program:
        """The program in ``file``. Its data folder is absolute, so that commands in a journal work in any folder.

        ``arguments``: its own; without any, a command that goes on in ``out`` has those that it was begun with.
        """
        words = tuple(arguments or ())
        if resume and not words:
            from elastune.runtime.job.resumption import arguments_at_start

            words = arguments_at_start(out)
        return Program(file, data=None if self.data is None else self.data.resolve(), arguments=words)

    def choose(self, out: str | Path | None, file: Path, command: str, *, resume: bool) -> Path:
        """Make the data folder known to the program, and return the folder for the results of ``command``."""
        use_data(self.data)
        return choose_out(out, file, command, resume)


@dataclass(frozen=True)
class LogOptions:
    """What this command and its workers log."""

    log_level: str | None = setting(
        None,
        "Log what happens to workers and to the run, from this level on: the command and agents to stderr, workers to "
        "their logs in OUT/logs. [default: $ELASTUNE_LOG_LEVEL, or nothing]",
        metavar="debug|info|warning|error",
        panel=options.OUTPUT,
    )
    log_format: str | None = setting(
        None,
        "Form of these lines. [default: $ELASTUNE_LOG_FORMAT, or text]",
        metavar="text|json",
        panel=options.OUTPUT,
    )

    def begin(self, **facts: str) -> None:
        """Log from now on in this process and in all that it starts; ``facts``: as of ``core.logs.describe``.

        Raises ``UserError`` for a wrong level or format.
        """
        given = logs.from_environment(os.environ)
        chosen = logs.LogSettings(self.log_level or given.level, self.log_format or given.format)
        os.environ.update(chosen.variables)
        logs.begin(chosen)
        logs.describe(**facts)


@dataclass(frozen=True)
class NoticeOptions:
    """The sources of notices that this machine will be taken away."""

    notice_file: Path | None = setting(
        None,
        "A file that appears when this machine is about to be taken away. The command then stops in good order and "
        "exits with code 75.",
        panel="Cluster",
    )
    notice_url: str | None = setting(
        None,
        "A URL that answers 404 until this machine is about to be taken away. It is asked again and again. The command "
        "then stops as for --notice-file.",
        panel="Cluster",
    )
    notices: str | None = setting(
        None,
        "A cloud whose metadata service says when this machine is about to be taken away. The command then stops as "
        "for --notice-file. =URL asks another address, such as a proxy.",
        metavar="aws|google|azure[=URL]",
        panel="Cluster",
    )
    notice_seconds: float = setting(
        120.0, "Seconds between a notice and the machine's end, where the notice does not say.", panel="Cluster"
    )

    def sources(self) -> list[NoticeSource]:
        """The sources to watch. Raises ``UserError`` for a --notice-seconds out of range."""
        from elastune.runtime.preemption import CloudNotice, FileNotice, UrlNotice

        if not 0 < self.notice_seconds <= notation.LONGEST_S:
            raise UserError("--notice-seconds must be above 0", self.notice_seconds, "such as 120")
        file, url = self.notice_file, self.notice_url
        sources: list[NoticeSource] = [] if file is None else [FileNotice(file, self.notice_seconds)]
        sources += [] if url is None else [UrlNotice(url, self.notice_seconds)]
        return sources if self.notices is None else [*sources, CloudNotice(self.notices)]


@dataclass(frozen=True)
class FaultOptions:
    """The faults to inject into a run."""

    chaos: str | None = setting(
        None,
        "Inject faults, for tests: kill, stop, join, leave, notice, reshape. At random with a rate per second "
        '("kill:0.05/s,stop"; 0.05/s where none is given), or once ("kill@40%" of the run, "kill@step:120").',
        metavar="FAULTS",
        panel="Faults",
    )
    chaos_verify: bool = setting(
        False,
        "With --chaos: train again on one worker without faults, and compare. Exit code 1 where the states differ, and "
        "where no fault, or not every one with a point of its own, has happened.",
        panel="Faults",
    )

    def choose(self, mode: str, place: Place | None) -> Faults:
        """The faults of a run in ``mode``. ``place``: the worker's place if another launcher has started it."""
        from elastune.cli.chaos import Faults

        return Faults.of(self.chaos, self.chaos_verify, mode, place)
