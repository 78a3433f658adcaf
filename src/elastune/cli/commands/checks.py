"""``elastune doctor`` looks at this machine or a cluster; ``elastune check`` looks at a program.

The doctor also prints the command that installs what is missing. A program is right if it gives the same result on
any number of workers.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options
from elastune.cli.groups import flatten
from elastune.cli.output import FAILED, OK, WIDTH, WRONG, print_error, print_json, print_lines, use_data
from elastune.core.errors import UserError
from elastune.core.notation import duration_text
from elastune.core.settings import ProgramSettings
from elastune.runtime.settings import ClusterSettings

if TYPE_CHECKING:
    from elastune.core.run import Program
    from elastune.runtime.agents.host_report import HostReport


# --- elastune doctor ---

PACKAGES: Mapping[str, str] = {
    "optuna-dashboard": "pip install 'elastune[optuna-dashboard]'",
    "onnxruntime": "pip install 'elastune[dev]'",
}
"""Optional packages, each with the command that installs it."""


@dataclass(frozen=True)
class Finding:
    """Whether ``what`` is on this machine: ``value`` describes it, or is None and ``install`` is the command for it."""

    what: str
    value: str | None
    install: str = ""


@flatten
def doctor(
    where: ClusterSettings,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --cluster: the output folder of later runs. Each host says whether it sees this folder."
        ),
    ] = None,
    json: options.Json = False,
) -> int:
    """Show what this machine, or each host of a cluster, offers.

    Each missing thing stands beside the command that installs it.

    With --cluster hosts:PORT: listen for agents for the time of --gather, describe each host, and say whether it sees
    the folder --out. The exit code is 2 if a host is unfit, or none comes. With --cluster slurm[:partition=NAME]: show
    what Slurm tells, and what one node tells. With --cluster ray: show what Ray tells. With both of them the exit
    code is 2 if something is missing.
    """
    if out is not None:
        check_place(out, local=where.local)
    if not where.local:
        return _show_cluster(where, out, json=json)
    from elastune.runtime.placement import devices
    from elastune.train.machine import cores

    memory = memory_gib()
    device_names = devices()
    findings = [*_machine(device_names), *_launchers(), *_mechanisms(), *_packages(), *_data_sets()]
    if json:
        machine = {"cores": cores(), "memory_gib": memory, "devices": device_names}
        print_json({"kind": "doctor", **machine, "findings": [asdict(finding) for finding in findings]})
        return OK
    _print([Finding("cores", str(cores())), Finding("memory", f"{memory:.1f} GiB"), *findings])
    return OK


def check_place(out: Path, *, local: bool) -> None:
    """Raise ``UserError`` for a folder that no host is asked about, or that cannot be made."""
    if local:
        fix = "add --cluster hosts:PORT, or leave --out out"
        raise UserError("--out is for the hosts of a cluster, which say whether they see it", out, fix)
    file = next((each for each in (out, *out.parents) if each.exists() and not each.is_dir()), None)
    if file is not None:
        raise UserError("--out must be a folder", f"{out}: {file} is a file", "use another --out")


def _show_cluster(where: ClusterSettings, out: Path | None, *, json: bool) -> int:
    request = where.request(print_error)
    findings = [Finding(finding.name, finding.value, finding.fix) for finding in request.kind.examine()]
    if not findings:
        return _show_hosts(where, out, json=json)
    if json:
        print_json({"kind": "doctor", "cluster": where.cluster, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    return OK if all(finding.value is not None for finding in findings) else WRONG


def _show_hosts(where: ClusterSettings, out: Path | None, *, json: bool) -> int:
    request = where.request(print_error)
    reports = request.kind.inspect(request.access, out)
    if not reports:
        rule = "a host must join before doctor can describe it"
        raise UserError(
            rule, f"none within {duration_text(where.gather_s)}", "start elastune agent there, or raise --gather"
        )
    if json:
        print_json({"kind": "doctor", "cluster": where.cluster, "hosts": [_host_json(report) for report in reports]})
    else:
        print("\n".join(report.line for report in reports))
    return WRONG if any(report.unfit for report in reports) else OK


def _host_json(report: HostReport) -> dict[str, object]:
    facts = report.facts
    return {
        "host": report.host,
        "workers": report.workers,
        "versions": report.versions or None,
        "devices": None if facts is None else facts.devices,
        "interface": None if facts is None else facts.interface,
        "clock_skew_s": None if facts is None else report.skew_s,
        "clock_error_s": None if facts is None else report.skew_error_s,
        "shared": None if facts is None else facts.shared,
        "unfit": report.unfit or None,
    }


def memory_gib(root: Path = Path("/")) -> float:
    """The machine's memory, or the limit of this process's control group (version 2) if that is less."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    limit = root / "sys/fs/cgroup/memory.max"
    text = limit.read_text().strip() if limit.is_file() else ""
    return round(min(gib, int(text) / 2**30) if text.isdigit() else gib, 1)


def _machine(devices: tuple[str, ...]) -> list[Finding]:
    import torch.distributed as dist

    gpus = [name for name in devices if name != "cpu"]
    gloo, nccl = dist.is_available() and dist.is_gloo_available(), dist.is_available() and dist.is_nccl_available()
    return [
        Finding("GPUs", ", ".join(gpus) or None, "a machine with a GPU and its driver; all runs on CPU without"),
        Finding("Python", platform.python_version()),
        Finding("elastune", _version("elastune")),
        Finding("torch", _version("torch"), "pip install torch"),
        Finding("reductions", _reductions(gpus, nccl=nccl)),
        Finding("exact mode", _exact_mode()),
        Finding("gloo", "in torch" if gloo else None, "pip install torch"),
        Finding(
            "nccl",
            "in torch" if nccl else None,
            "pip install --force-reinstall torch, a CUDA build (only GPUs need it)",
        ),
    ]


def _reductions(gpus: Sequence[str], *, nccl: bool) -> str:
    """The backend of reductions between workers on this machine."""
    if not gpus:
        return "gloo: workers run on CPU"
    if not nccl:
        return "gloo, over CPU memory: this torch has no NCCL"
    if len(gpus) == 1:
        return "gloo, over CPU memory, for several workers on the one GPU"
    return f"nccl for at most {len(gpus)} workers, one a GPU; gloo, over CPU memory, for more"


def _exact_mode() -> str:
    """The cost of exact mode, by the number of slots of a worker."""
    from elastune.core.slots import MEASURED_SLOT_COST as MEASURED

    ranges = ", ".join(f"{slots}: {low:g} to {high:g}" for slots, (low, high) in MEASURED.items())
    return f"CPU time over plain PyTorch's, by slots a worker: {ranges} (measured elsewhere); 1 slot is the default"


def _launchers() -> list[Finding]:
    has_slurm = shutil.which("srun")
    return [
        Finding(
            "torchrun", "with torch" if importlib.util.find_spec("torch.distributed.run") else None, "pip install torch"
        ),
        Finding("Slurm", has_slurm, "apt-get install slurm-wlm"),
        Finding("Ray", _version("ray"), "pip install 'elastune[ray]'"),
    ]


def _mechanisms() -> list[Finding]:
    """A finding for each mechanism: its abilities, or the command that installs its package."""
    from elastune.core.mesh import INSTALLED, MechanismName
    from elastune.parallel.mechanisms.registry import DIVIDES, MECHANISMS, STATES, installed_mechanism

    findings = []
    for word in (*MECHANISMS, *STATES, *DIVIDES, *INSTALLED.names()):
        name = MechanismName.parse(word)
        axes = () if name.installed else name.dividing  # only its own check knows
        try:
            mechanism = installed_mechanism(word) if name.installed else MECHANISMS.get(word)
        except UserError as error:
            findings.append(Finding(f"mechanism {word}", None, str(error)))
            continue
        can = None if mechanism is None else mechanism.capabilities
        abilities = ["exact and fast" if mechanism is None or mechanism.exact else "fast"]
        abilities += [f"divides along {' and '.join(axes)}"] if axes else []
        abilities += ["workers come and go" if can is None or can.elastic else "workers stay"]
        abilities += (
            [f"ZeRO stages {', '.join(map(str, sorted(can.stages)))}"] if can is not None and can.stages else []
        )
        lacks = can is not None and not can.installed
        install = "" if can is None else can.install
        findings.append(Finding(f"mechanism {word}", None if lacks else "; ".join(abilities), install))
    return findings


def _packages() -> list[Finding]:
    return [Finding(name, _version(name), install) for name, install in PACKAGES.items()]


def _data_sets() -> list[Finding]:
    from elastune.recipes.datasets import find, find_digits

    return [
        Finding("digits", _text(find_digits()), "pip install scikit-learn"),
        Finding(
            "MNIST",
            _text(find("mnist")),
            "ELASTUNE_DOWNLOAD=1 elastune run examples/mnist.py, or set ELASTUNE_DATA to the folder of its idx files",
        ),
        Finding("Fashion-MNIST", _text(find("fashion_mnist")), "apt-get install dataset-fashion-mnist"),
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for finding in findings:
        if finding.value is None:
            table.add_row(Text(finding.what), Text("missing", style="yellow"), Text(finding.install))
        else:
            table.add_row(Text(finding.what), Text(finding.value, style="green"), Text(""))
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    console.print(table)


# --- elastune check ---

MOST_STEPS, MOST_SLOTS = 1000, 64


@flatten
def check(
    program_settings: ProgramSettings,
    file: options.FileOrCommand = None,
    arguments: options.Arguments = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAIN.py", help="Compare with this plain script instead. It runs unchanged, with the same ARGS."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Number of steps to compare, from 1 to 1000 [default: 6; 20 with --against].")
    ] = None,
    slots: Annotated[int, typer.Option(help="Slots of each batch, as for elastune run.")] = 4,
    time: Annotated[
        int,
        typer.Option(
            metavar="STEPS", help="Number of steps to time in exact mode and in one pass a batch, such as 50. 0: none."
        ),
    ] = 0,
    command: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Check a script of your own instead, which elastune leaves as it is. For example: "
            '"torchrun --nproc-per-node {workers} train.py".',
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="With --command: number of processes to compare with one.")] = 2,
    time_limit: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="With --command: end each of its two runs after this time, and compare what they did until then.",
        ),
    ] = 120.0,
    data: options.Data = None,
    json: options.Json = False,
) -> int:
    """Check whether a program trains as its plain loop does, on any number of workers.

    Its first steps are taken in one pass a batch, in --slots passes, on two workers, and cut and resumed in fresh
    processes, in exact mode; gradients and weights are compared. Each finding is one line: what makes FILE train
    otherwise, and what to change. With one or more findings the exit code is 1. A note is no finding: BatchNorm
    normalises each slot by itself, and each slot draws its own dropout. Epochs are cut to a third of --steps.

    With --against FILE is compared with a plain script instead, in one pass a batch. The script runs unchanged, on the
    CPU, in a process of its own; its DataLoader gets FILE's order of samples and random numbers, and its optimizers
    FILE's first weights. The line says over how many steps losses and weights are the same, or which step is the first
    that is not, and why.

    With --command no elastune program is needed: the command runs on one process and on --workers processes, and its
    samples, losses, gradients and weights are compared. The finding names the line and the kind of the first
    difference: samples read twice, a sampler without set_epoch, a rate or a loss that is scaled, gradients that are
    not averaged, BatchNorm, buffers, seeds, padding in evaluation.

    With --time, exact mode is also measured beside one pass a batch, as a plain training loop has it: how long a step
    takes, and which metrics differ by more than rounding.

    A program in which nothing is found is remembered by its digest, in XDG_CACHE_HOME/elastune/checked: elastune run
    then does not advise to check it.
    """
    from elastune.core.run import Program
    from elastune.runtime.job.preflight import note_check
    from elastune.runtime.job.program_check import STEPS, WORKERS, check_program, exact_cost

    if steps is not None and not 1 <= steps <= MOST_STEPS:
        raise UserError(f"--steps must be from 1 to {MOST_STEPS}", steps, "such as --steps 6")
    if not 0 <= time <= MOST_STEPS:
        raise UserError(f"--time must be from 0 to {MOST_STEPS} steps", time, "such as --time 50")
    use_data(data)
    if command is not None:
        _refuse_beside_command(file=file, against=against, time=time)
        return _check_command(command, program_settings, workers=workers, steps=steps, time_s=time_limit, json=json)
    if file is None:
        raise UserError("a check needs a program", "none", "give FILE, or --command")
    program = Program(file, arguments=tuple(arguments or ()))
    if against is not None:
        return _check_against(program, against, program_settings, steps=steps, json=json)
    if not 1 <= slots <= MOST_SLOTS:
        raise UserError(f"--slots must be from 1 to {MOST_SLOTS}", slots, "such as --slots 4")
    checked = check_program(
        program, program_settings.config, steps=steps or STEPS, seed=program_settings.seed, slots=slots
    )
    try:
        note_check(program, passed=not checked.problems)
    except OSError as error:
        print_error(f"this check cannot be remembered: {error}")
    trains = all(difference.kind != "fails" for difference in checked.problems)
    cost = (
        exact_cost(program, program_settings.config, steps=time, seed=program_settings.seed)
        if time and trains
        else None
    )
    if json:
        measured = {} if cost is None else {"exact": asdict(cost)}
        print_json({"kind": "check", **asdict(checked), **measured})
    for problem in () if json else (*checked.problems, *checked.notes):
        print_lines(problem.as_line(file.name))
    if not checked.problems and not json:
        cut = "in one pass a batch" if slots == 1 else f"in {slots} slots as in one pass a batch"
        runs_text = f"the same {cut}, again, on {WORKERS} workers, and cut and resumed"
        print_lines(f"{file.name}: {checked.steps} steps, {runs_text}")
    for line in cost.as_lines() if cost is not None and not json else ():
        print_lines(f"{file.name}: {line}")
    return FAILED if checked.problems else OK


def _check_against(
    program: Program, script: Path, program_settings: ProgramSettings, *, steps: int | None, json: bool
) -> int:
    from elastune.runtime.job.program_check import SCRIPT_STEPS, check_against
    from elastune.runtime.job.run import JobFailed

    try:
        compared = check_against(
            program, script, program_settings.config, steps=steps or SCRIPT_STEPS, seed=program_settings.seed
        )
    except JobFailed as error:
        raise UserError("a program must train before it can be compared", error.failure.detail, "mend that") from None
    if json:
        print_json({"kind": "against", **asdict(compared)})
    else:
        print_lines(compared.as_line(program.path.name))
    return FAILED if compared.problem else OK


MOST_PROCESSES, LONGEST_S = 64, 86_400.0


def _refuse_beside_command(**others: object) -> None:
    """Raise ``UserError`` for an option that looks at a FILE."""
    for name, value in others.items():
        if value:
            word = "FILE" if name == "file" else f"--{name}"
            raise UserError("a check of a --command has no FILE, --against or --time", word, "leave one of them out")


def _check_command(
    text: str, program_settings: ProgramSettings, *, workers: int, steps: int | None, time_s: float, json: bool
) -> int:
    from elastune.runtime.observe.command import STEPS, check_command
    from elastune.train.program.command import parse_command

    if not 2 <= workers <= MOST_PROCESSES:
        raise UserError(f"--workers must be from 2 to {MOST_PROCESSES}", workers, "such as --workers 2")
    if not 0 < time_s <= LONGEST_S:
        raise UserError(f"--time-limit must be from 1 to {LONGEST_S:.0f} seconds", time_s, "such as --time-limit 300")
    checked = check_command(
        parse_command(text),
        program_settings.config,
        workers=workers,
        steps=steps or STEPS,
        time_s=time_s,
        seed=program_settings.seed,
    )
    if json:
        print_json({"kind": "check_command", **asdict(checked)})
    for difference in () if json else (*checked.differences, *checked.notes):
        print_lines(difference.as_line())
    if not checked.differences and not json:
        print_lines(f"{checked.steps} steps: the same on 1 process and on {workers}")
    return FAILED if checked.differences else OK
