"""``elastune run`` trains a program once; ``elastune resume`` continues from the journal of an output folder."""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, chdir, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options
from elastune.cli.commands.dashboard import page_beside
from elastune.cli.groups import (
    Execution,
    ExecutionOptions,
    FaultOptions,
    LogOptions,
    NoticeOptions,
    OutputOptions,
    flatten,
    resumed_words,
)
from elastune.cli.output import (
    FAILED,
    OK,
    TRY_AGAIN,
    WRONG,
    print_error,
    print_lines,
    print_result,
    stopped_code,
)
from elastune.core.cost import Prices
from elastune.core.errors import UserError
from elastune.core.formatting import plain
from elastune.core.mesh import Mesh
from elastune.core.run import CommandLine, Elastic, ExecutionSettings, Place, Program, RunSpec
from elastune.runtime.job.output import discard_refused, is_url
from elastune.runtime.logger import check_loggers, logging_to
from elastune.runtime.settings import RunSettings, read_prices

if TYPE_CHECKING:
    from elastune.cli.chaos import Faults, Verdict
    from elastune.cli.progress import RunTracker
    from elastune.core.journal.records import RunFailed
    from elastune.runtime.clusters.base import Cluster
    from elastune.runtime.clusters.kind import ClusterRequest
    from elastune.runtime.preemption import NoticeSource
    from elastune.runtime.spot import SpotWatch


# --- elastune resume ---

Call = Callable[[list[str]], int]
RESUMABLE = ("run", "tune", "frontier", "tree")


def resume_by(call: Call) -> Callable[..., int]:
    """Return the command ``elastune resume``, which runs the words of a command line by ``call``."""

    def resume(
        context: typer.Context,
        out: Annotated[str, typer.Argument(metavar="OUT", help="The output folder of a run, a study or a frontier.")],
        workers: Annotated[str | None, typer.Option(metavar="N|LOW:HIGH", help="Other workers than before.")] = None,
        epochs: Annotated[
            int | None,
            typer.Option(help="Train for more epochs than before, in all. An earlier --max-steps no longer counts."),
        ] = None,
        max_steps: Annotated[int | None, typer.Option(help="End after this many steps, in all.")] = None,
        json: options.Json = False,
    ) -> int:
        """Go on with a run, a study or a frontier.

        File, options and cluster are those of the command that began it; its journal has them. Other options of that
        command may be given behind OUT, such as --trials 40 or --set epochs=20. They replace what was said before. What
        would change the result of what is there already is refused.
        """
        changes = [f"--{name}={value}" for name, value in (("workers", workers), ("epochs", epochs)) if value]
        changes += [] if max_steps is None else [f"--max-steps={max_steps}"]
        command_line = _command_line(out)
        as_json = ["--json"] if json else []
        words = resumed_words(command_line, [*changes, *as_json, *context.args], Path(out).resolve())
        folder, behind = Path(command_line.folder), words[words.index("--") + 1 :]
        file = behind[0] if behind else "the file of --space"
        if not folder.is_dir() and not Path(file).exists():
            command = shlex.join(["elastune", *words])
            rule = "a command is given again in the folder that it was given in"
            raise UserError(rule, f"no folder {folder}", f"go to where {file} is, and give it yourself: {command}")
        with chdir(folder) if folder.is_dir() else nullcontext():
            return call(words)

    return resume


def _command_line(out: str) -> CommandLine:
    """The newest command line in the journal of ``out``. Raises ``UserError`` where the journal has none."""
    from elastune.core.journal.files import read
    from elastune.core.journal.records import RunStarted, StudyStarted
    from elastune.runtime.job.output import JOURNAL, is_url

    if out.startswith("-"):
        raise UserError("the output folder comes first", out, "elastune resume OUT, and options behind it")
    if is_url(out):
        raise UserError("elastune resume needs a folder", out, f"give the command again with --resume --out {out}")
    records = [entry.record for entry in read(Path(out) / JOURNAL)]
    starts = [record for record in records if isinstance(record, RunStarted | StudyStarted)]
    if not starts:
        raise UserError("only a run, a study or a frontier can be resumed", out, "name the folder of one")
    commands = [record.command for record in starts if record.command is not None]
    if not commands:
        fix = f"give its command again with --resume --out {out}; in Python, call it again with resume=True"
        raise UserError("elastune resume needs the command line that began it", f"none in the journal of {out}", fix)
    words = commands[-1].words
    if not words or words[0] not in RESUMABLE or "--" not in words:
        rule = "the command in a journal must be as elastune wrote it"
        raise UserError(
            rule, shlex.join(words)[:100] or "none", f"give the command yourself, with --resume --out {out}"
        )
    return commands[-1]


# --- elastune run ---


@flatten
def run(
    file: options.File,
    settings: RunSettings,
    execution_options: Execution,
    output: OutputOptions,
    faults: FaultOptions,
    notices: NoticeOptions,
    logging: LogOptions,
    command: CommandLine,
    arguments: options.Arguments = None,
    dry_run: options.DryRun = False,
    dashboard: options.Dashboard = False,
) -> int:
    """Train a program once, on one or more workers.

    Under torchrun, srun or mpirun this process is one of the workers that they started, and the number of workers does
    not change.

    A policy is one of elastune's, one of a plug-in, or a class of FILE that inherits from elastune.Policy. With several
    policies, all are asked.

    On the CPU, with several slots, or several workers in fast mode, the first step begins with a proof. A few passes
    over up to 32 samples, in at most a second, show whether the loss is a mean and has the same gradient on all
    workers. A loss that is a sum, and a gradient that depends on the worker, are refused.

    Exit code 1: the run failed. Exit code 75: SIGTERM has ended it, or the machine is about to be taken away, as
    SIGUSR1 or another notice said; the run has written a checkpoint, and the same command with --resume goes on.
    """
    from elastune.runtime.job.preflight import with_proof
    from elastune.runtime.placement import from_environment

    logging.begin()
    loggers = check_loggers(settings.log)
    place = from_environment(os.environ)
    chosen, cluster = faults.choose(execution_options.mode, place), settings.request(print_error)
    if place is not None and not settings.local:
        rule = "workers of torchrun, srun or mpirun are where those started them"
        raise UserError(rule, f"--cluster {settings.cluster}", "leave it out, or start the command by itself")
    sources = notices.sources()
    prices = read_prices(settings, settings.price_per_worker_hour, kinds_known=settings.kinds_known)
    if place is not None:
        check_launched(settings, place)
    out = output.choose(settings.out, file, "run", resume=settings.resume)
    execution_on = _execution_settings(settings, execution_options, out)
    program = output.program(file, arguments, out, resume=settings.resume)
    spec = _spec(settings, execution_options.mesh, place, program, out, execution_on)
    spec = with_proof(spec, unchecked=settings.unchecked)
    spot = _spot(spec) if spec.adapt.policies else None
    if place is not None:
        if spot is not None:
            raise UserError("the policy spot chooses among hosts", "workers of a launcher", "use --cluster hosts:PORT")
        if dry_run:
            return OK if place.rank else _dry_run(spec, "launcher", as_json=output.json)
        with page_beside(out, dashboard and place.rank == 0):
            return _run_static(spec, place, output.json, loggers, prices, command)
    adopts, tracker = _checked(spec)
    if dry_run:
        return _dry_run(spec, str(settings.cluster), as_json=output.json)
    with page_beside(out, dashboard), _room(cluster, spec, settings, adopts, spot) as opened_cluster:
        if opened_cluster is not None and settings.changes and execution_options.mesh is None and opened_cluster.free:
            begin = min(spec.elastic.high or spec.execution.workers, opened_cluster.free)
            spec = replace(spec, execution=execution_on(begin))
        return _run_local(spec, tracker, output.json, chosen, sources, loggers, opened_cluster, prices, command)


def check_launched(settings: RunSettings, place: Place) -> None:
    """Refuse other workers than those that a launcher has started, and folders that they do not share."""
    if settings.workers not in (None, place.world):
        value = ":".join(map(str, settings.workers)) if isinstance(settings.workers, tuple) else settings.workers
        raise UserError("the launcher has started the workers", f"--workers {value}", f"it started {place.world}")
    if settings.verify is not None:
        rule = "a worker that computes wrong is replaced, which only elastune's own workers can be"
        raise UserError(rule, "--verify with workers of a launcher", "start the command by itself")
    if settings.out is None or is_url(str(settings.out)):
        fix = "give --out, the same for all"
        raise UserError("workers of a launcher need one folder", settings.out or "no --out", fix)


def _spec(
    settings: RunSettings,
    mesh: Mesh | None,
    place: Place | None,
    program: Program,
    out: Path,
    execution_on: Callable[[int], ExecutionSettings],
) -> RunSpec:
    """The run that the command line asks for. ``place``: that of this worker, if another launcher has started it."""
    begin, elastic = settings.elastic(mesh)
    if place is not None:
        begin, elastic = place.world, Elastic(collective_timeout_s=elastic.collective_timeout_s)
    return settings.spec(program, out, execution_on(begin), elastic)


def _checked(spec: RunSpec) -> tuple[bool, RunTracker]:
    """Make all checks before a worker starts. Returns whether workers may be adopted, and the progress tracker."""
    from elastune.runtime.job.preflight import examined_meanwhile
    from elastune.runtime.job.resumption import accepted_changes, check_resumed, may_adopt
    from elastune.runtime.job.run import check_free

    check_free(spec.out, spec.resume)
    adopts = may_adopt(spec)
    if not adopts:
        accepted_changes(spec)
    if beyond := check_resumed(spec):
        print_error(f"the run is to be longer than it was begun for: {beyond}")
    with nullcontext() if adopts else examined_meanwhile(spec):
        return adopts, _tracker(spec, adopts=adopts)  # before agents come: loading torch can take longer than they wait


def _room(
    cluster: ClusterRequest, spec: RunSpec, settings: RunSettings, adopts: bool, spot: SpotWatch | None
) -> AbstractContextManager[Cluster | None]:
    """The cluster, once it has room for the run."""
    from elastune.runtime.clusters.kind import CapacityRequest, opened

    least = spec.elastic.low if settings.changes else spec.execution.workers
    room = CapacityRequest(spec.out, least, spec.most_workers, grace_s=spec.elastic.grace_s, adopts=adopts, spot=spot)
    return opened(cluster, room)


def _execution_settings(
    settings: RunSettings, execution_options: ExecutionOptions, out: Path
) -> Callable[[int], ExecutionSettings]:
    """The execution settings on a number of workers. A resumed run keeps those that change its result."""
    from elastune.runtime.job.resumption import execution_at_start, with_recorded

    recorded = execution_at_start(out) if settings.resume else None
    high = settings.workers[1] if isinstance(settings.workers, tuple) else None

    def execution_on(workers: int) -> ExecutionSettings:
        execution = execution_options.execution(workers, high, settings.learners, local=settings.local)
        return with_recorded(execution, recorded, execution_options.chosen)

    return execution_on


def _dry_run(spec: RunSpec, cluster: str, *, as_json: bool) -> int:
    from elastune.cli.dry_run import of_run, print_dry_run

    return print_dry_run(of_run(spec, cluster), as_json=as_json)


def _spot(spec: RunSpec) -> SpotWatch | None:
    from elastune.runtime.job.validation import spot_watch
    from elastune.train.program.load import load_as_guest

    return spot_watch(spec, load_as_guest(spec.program, spec.seed))


def _run_local(
    spec: RunSpec,
    tracker: RunTracker,
    as_json: bool,
    faults: Faults,
    notices: list[NoticeSource],
    loggers: Sequence[str],
    cluster: Cluster | None,
    prices: Prices | None,
    command: CommandLine,
) -> int:
    from elastune.cli.progress import Progress
    from elastune.runtime.job.run import JobFailed, run_job

    injector = faults.injector(spec, tracker.epochs)
    noticed = False
    progress = Progress(tracker)
    with logging_to(loggers, spec.out, progress.say), progress:
        try:
            run_job(
                spec,
                cluster=cluster,
                observe=progress.observe,
                notices=notices,
                injector=injector,
                command=command,
            )
        except JobFailed as failed:  # the journal holds the reason, too
            noticed = failed.noticed
        finally:
            for source in notices:
                source.close()
    code = _print_outcome(spec.out, as_json, faults.verdict(spec, injector), prices)
    return TRY_AGAIN if noticed else code


def _run_static(
    spec: RunSpec, place: Place, as_json: bool, loggers: Sequence[str], prices: Prices | None, command: CommandLine
) -> int:
    """Be one worker; rank 0 also shows progress and prints the result. Returns the exit code."""
    from elastune.cli.progress import Progress
    from elastune.core.journal.records import RunFailed
    from elastune.runtime.job.run import on_device, run_here

    place = on_device(place, spec.execution.device, os.environ)
    if place.rank != 0:
        end = run_here(spec, place)
        if isinstance(end, RunFailed):
            return WRONG if end.reason == "user_error" else FAILED
        return OK
    progress = Progress(_tracker(spec))
    with logging_to(loggers, spec.out, progress.say), progress:
        run_here(spec, place, progress.observe, command)
    return _print_outcome(spec.out, as_json, prices=prices)


def _tracker(spec: RunSpec, *, adopts: bool = False) -> RunTracker:
    """The progress tracker of a run, after its program and its execution settings are checked.

    ``adopts``: workers may wait to be adopted, so neither the program nor torch is loaded before they are.
    """
    from elastune.cli.progress import RunTracker
    from elastune.train.program.load import load_as_guest

    program_config, notes = {}, []
    if not adopts:
        importlib.import_module("torch")  # where it cannot be loaded that is not the program's fault
        from elastune.runtime.job.validation import check_execution

        check_execution(spec)
        from elastune.core.plan.memory import copies_text

        program_config = load_as_guest(spec.program, spec.seed).config
        notes = [_advice(spec), copies_text(spec.execution), _one_slot_text(spec), _stages_text(spec)]
    epochs = spec.epochs or {**program_config, **spec.config}.get("epochs")
    return RunTracker(epochs if isinstance(epochs, int) else None, spec.max_steps, notes)


def _advice(spec: RunSpec) -> str:
    """Advice on a program that no one checked on several worker counts; "" if there is none."""
    from elastune.runtime.job.preflight import is_checked

    path = spec.program.path
    if spec.execution.mode != "exact" or spec.most_workers == 1 or is_checked(spec.program):
        return ""
    return f"{path.name} was never checked: 'elastune check {shlex.quote(str(path))}' compares one worker with two"


def _one_slot_text(spec: RunSpec) -> str:
    """How a run may get more workers than the one that its one slot allows; empty where it has several slots."""
    if spec.execution.num_slots > 1 or spec.most_workers > 1 or spec.resume:
        return ""
    later = ", or --slots 4 to resume on up to four" if spec.execution.mode == "exact" else ""
    return f"1 slot, so 1 worker throughout; a run that begins with --workers 1:4 may get more{later}"


def _stages_text(spec: RunSpec) -> str:
    """What keeps the stages of a pipeline busy; empty where they have passes to share."""
    execution = spec.execution
    if execution.mode != "exact" or not execution.parts.pipeline or execution.micro_batch is not None:
        return ""
    mesh = execution.first_mesh
    if mesh.pipeline == 1 or execution.num_slots > mesh.batch:
        return ""
    return f"a replica has 1 slot, so its {mesh.pipeline} stages wait for each other; --slots {4 * mesh.workers}: less"


def _print_outcome(out: Path, as_json: bool, chaos: Verdict | None = None, prices: Prices | None = None) -> int:
    from elastune.cli.results import result_of, with_money

    result = replace(result_of(out), tables=())  # decisions: progress has printed each
    if prices is not None:
        result = with_money(result, out, prices)
    failure = result.failure
    if chaos is not None:
        result = replace(result, data={**result.data, "chaos": chaos.data}, lines=(*result.lines, *chaos.lines))
    page = None if failure is not None and failure.reason == "user_error" else _write_page(out)
    if failure is None or (as_json and failure.reason != "user_error"):
        print_result(result, as_json=as_json, report=page)
    if failure is not None:
        if chaos is not None and not as_json:
            print_lines("\n".join(chaos.lines))
        return _explain(failure, out)
    if result.stopped in ("requested", "notice"):
        notice = plain(result.data.get("stop_why") or "this machine will be taken away", 300)
        why = "stopped on request" if result.stopped == "requested" else f"stopped: {notice}"
        print_error(f"{why}; go on with --resume --out {out}")
        return stopped_code() if result.stopped == "requested" else TRY_AGAIN
    return OK if result.stopped != "unfinished" and (chaos is None or chaos.good) else FAILED


def _write_page(out: Path) -> str | None:
    """Write the page of the run in ``out``; return its path, or None where it cannot be written."""
    from elastune.core.journal.files import read
    from elastune.core.plugins import missing_extra
    from elastune.runtime.job.output import JOURNAL

    try:
        from elastune.report.page import write_run_report

        return str(write_run_report(read(out / JOURNAL), out, images=False))
    except UserError as error:
        print_error(f"no report was written: {error}")
    except ImportError as error:  # a run needs the core alone, its page also the extra "report"
        print_error(f"no report was written: {missing_extra(error) or error}")
    return None


def _explain(failure: RunFailed, out: Path) -> int:
    from elastune.runtime.clusters.base import LocalFiles

    if failure.reason == "user_error":
        discard_refused()
        print_error(failure.detail)
        return WRONG
    if failure.reason == "interrupted":
        saved = LocalFiles().checkpoints(out)
        how = f"go on after step {saved[-1]} with --resume --out {out}" if saved else "there is no checkpoint yet"
        print_error(f"{failure.detail}; {how}")
        return stopped_code()
    log = out / "logs" / f"worker-{failure.rank}.log"
    where = f" (log: {log})" if log.exists() else ""
    print_error(f"the run failed on worker {failure.rank}, {failure.reason.replace('_', ' ')}: {failure.detail}{where}")
    return FAILED
