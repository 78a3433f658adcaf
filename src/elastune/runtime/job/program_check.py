"""``elastune check``: does a program give the same result on any number of workers, and the same as a plain script?

Short runs of the program are recorded step by step (``train.proof``) and compared. The cost is the time of steps in
``exact`` mode beside those of a plain loop with one pass a batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.core.journal.records import Record, Reported, RunFinished
from elastune.core.run import Config, ExecutionSettings, Program, RunSpec
from elastune.core.slots import Mode
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job
from elastune.train.program.load import FOLDER, written_by_several
from elastune.train.proof.compare import RunRecord, StepDifference, StepRecord, distance, first_difference, read_run
from elastune.train.proof.findings import ShortRun, TrainingProblem, judge
from elastune.train.proof.plain import PlainOutcome, PlainRequest
from elastune.train.proof.recorder import BEGINNING, VARIABLE, Recording

# ``elastune check``: does a program train as its plain loop, on any number of workers; the cost of ``exact`` mode.

# --- the cost of ``exact`` mode ---
SLOTS = 4
MODES: tuple[Mode, Mode] = ("exact", "fast")
ROUNDS = 2  # of both modes in turn, so that other work of the machine affects both
APART = 1e-3  # a larger relative difference of metrics is more than rounding


@dataclass(frozen=True)
class ExactCost:
    """The time of a step in ``exact`` mode and in a plain loop, both measured on one worker of this machine.

    Attributes:
        steps: The number of steps of each.
        exact_s: The median seconds of a step that runs each of ``SLOTS`` slots by itself.
        plain_s: The median seconds of a step with one pass for the batch.
        apart: The metrics that differ by more than rounding: by name, in exact mode and in one pass.
    """

    steps: int
    exact_s: float
    plain_s: float
    apart: dict[str, tuple[float, float]]

    def as_lines(self) -> list[str]:
        """The result for people, line by line."""
        times = f"{self.exact_s * 1e3:.3g} ms a step in {SLOTS} slots, {self.plain_s * 1e3:.3g} ms in one pass"
        lines = [f"exact mode: {times} (x{self.exact_s / self.plain_s:.2f}; medians of {self.steps} steps, one worker)"]
        for name, (exact, plain) in sorted(self.apart.items()):
            why = "batches are normalised, or compared within, a slot at a time"
            lines.append(
                f"{name}: {exact:.6g} in exact mode, {plain:.6g} in one pass: {why}, or dropout draws otherwise"
            )
        return lines


def exact_cost(program: Program, config: Config, *, steps: int, seed: int = 0) -> ExactCost:
    """Train ``steps`` steps of ``program`` in each mode, in turn, and compare the times of steps.

    Args:
        program: The program.
        config: Settings in place of the program's.
        steps: The number of steps.
        seed: The seed of the runs.

    Returns:
        The times, and the metrics that differ.

    Raises:
        UserError: If the steps are too few to time.
        JobFailed: If the program does not train.

    Example:
        >>> exact_cost(Program(Path("train.py")), {}, steps=50).as_lines()
    """
    runs: dict[Mode, list[RunFinished]] = {mode: [] for mode in MODES}
    with LocalCluster(capacity=1) as cluster, tempfile.TemporaryDirectory(prefix="elastune-check-") as place:
        for nth in range(ROUNDS):
            for mode in MODES:
                execution, out = ExecutionSettings(mode=mode, num_slots=SLOTS), Path(place) / f"{mode}{nth}"
                spec = RunSpec(program, out, config, seed=seed, execution=execution, max_steps=steps)
                runs[mode].append(run_job(spec, cluster=cluster))
    times = {mode: [run.step_s for run in done if run.step_s is not None] for mode, done in runs.items()}
    exact, plain = runs["exact"][0], runs["fast"][0]
    if not all(times.values()):
        raise UserError("a few steps are needed to time them", f"{exact.steps}", "such as --time 20, and more epochs")
    apart = {
        name: (value, plain.metrics[name])
        for name, value in exact.metrics.items()
        if name in plain.metrics and abs(value - plain.metrics[name]) > APART * max(abs(value), APART)
    }
    return ExactCost(exact.steps, min(times["exact"]), min(times["fast"]), apart)


# --- short runs that must do the same ---
CHECK_SLOTS, WORKERS = 4, 2
EPOCH_STEPS = 2  # of each epoch in a check, so that ends of epochs are checked too
STEPS = 6


@dataclass(frozen=True)
class Checked:
    """What came of ``check_program``.

    Attributes:
        steps: The steps that were compared.
        sha256: The weights' hash after them.
        problems: What makes the program train otherwise somewhere.
        notes: Differences that are no mistakes, such as statistics of BatchNorm.
    """

    steps: int
    sha256: str
    problems: tuple[TrainingProblem, ...]
    notes: tuple[TrainingProblem, ...] = field(default=())


def check_program(
    program: Program, config: Config, *, steps: int = STEPS, seed: int = 0, slots: int = CHECK_SLOTS
) -> Checked:
    """Train the first steps of ``program`` in several ways, in ``exact`` mode, and compare them step by step.

    The ways: one pass a batch; ``slots`` passes, in two processes that have imported the program apart; two workers;
    cut after the first step and after the first epoch, and resumed in other processes. Epochs have
    ``EPOCH_STEPS`` steps, or a third of ``steps``.

    Args:
        program: The program.
        config: Settings over the program's own.
        steps: How many steps are compared at most.
        seed: The seed of the runs.
        slots: The slots of each batch.

    Returns:
        What was found; nothing, where all is alike.

    Raises:
        UserError: For what can be known before a worker starts.

    Example:
        >>> for each in check_program(Program(Path("train.py")), {"lr": 0.1}).problems:
        ...     print(each.as_line("train.py"))
    """
    with (
        LocalCluster(capacity=WORKERS) as cluster,
        LocalCluster(capacity=1) as fresh,  # a server of its own, since Python draws another hash seed there
        tempfile.TemporaryDirectory(prefix="elastune-check-") as place,
    ):
        runs = ShortRunsOfProgram(program, config, Path(place), cluster, fresh, steps, seed, slots)
        both = list(judge(program.path.read_text(), runs))
        one = runs.slots
    problems = tuple(each for each in both if not each.note)
    notes = tuple(each for each in both if each.note)
    return Checked(one.steps, one.sha256, problems, notes) if isinstance(one, ShortRun) else Checked(0, "", problems)


class ShortRunsOfProgram:
    """The short runs of a check, each made when it is asked for, and once."""

    def __init__(
        self,
        program: Program,
        config: Config,
        folder: Path,
        cluster: Cluster,
        fresh: Cluster,
        steps: int,
        seed: int,
        num_slots: int,
    ) -> None:
        self.num_slots = num_slots
        self._program = program
        self._config = config
        self._folder = folder
        self._cluster, self._fresh = cluster, fresh
        self._steps = steps
        self._epoch_steps = max(EPOCH_STEPS, steps // 3)
        self._seed = seed
        self._made: dict[str, ShortRun | str] = {}

    @property
    def slots(self) -> ShortRun | str:
        """The run in slots, on one worker; a text: why it failed."""
        return self._once("slots", lambda: self._run("slots", apart=1))

    @property
    def whole(self) -> ShortRun | str:
        """In one pass a batch."""
        return self._once("whole", lambda: self._run("whole", num_slots=1, apart=1))

    @property
    def again(self) -> ShortRun | str:
        """In slots, by a process that has imported the program apart."""
        return self._once("again", lambda: self._run("again", cluster=self._fresh))

    @property
    def workers(self) -> ShortRun | str:
        """On two workers."""
        return self._once("workers", self._on_two_workers)

    @property
    def files(self) -> dict[str, int]:
        """The files that both workers have written, with the program's lines."""
        written = written_by_several(self._folder / "written")
        return {path: line for path, line in written.items() if not path.startswith(f"{self._folder}/")}

    @property
    def resumed(self) -> ShortRun | str:
        """Cut after the first step and after the first epoch, and resumed in other processes."""
        return self._once("resumed", self._cut_and_resumed)

    def quiet(self, *, whole: bool, salt: int = 0) -> ShortRun | str:
        """The first step without dropout, noise and statistics of batches; in one pass where ``whole``."""
        name, num_slots = f"quiet{whole}{salt}", 1 if whole else self.num_slots
        options: dict[str, Any] = {"num_slots": num_slots, "apart": 1, "quiet": True, "salt": salt, "steps": 1}
        return self._once(name, lambda: self._run(name, **options))

    def _once(self, name: str, make: Callable[[], ShortRun | str]) -> ShortRun | str:
        if name not in self._made:
            try:
                self._made[name] = make()
            except JobFailed as error:
                self._made[name] = error.failure.detail
        return self._made[name]

    def _on_two_workers(self) -> ShortRun:
        written = self._folder / "written"
        written.mkdir()
        with environment(FOLDER, str(written)):
            return self._run("workers", workers=WORKERS)

    def _cut_and_resumed(self) -> ShortRun:
        whole = self.slots
        assert isinstance(whole, ShortRun)
        parts = [self._run("cut", steps=1)]
        if whole.record.epochs > 1:
            parts.append(self._run("cut", resume=True, until_epoch=1, cluster=self._fresh))
        if whole.steps > sum(len(part.record.steps) for part in parts):
            last = self._cluster if len(parts) > 1 else self._fresh
            parts.append(self._run("cut", resume=True, cluster=last))
        record = parts[0].record
        for part in parts[1:]:
            record = record.joined(part.record)
        return ShortRun(parts[-1].sha256, parts[-1].steps, record)

    def _run(
        self,
        name: str,
        *,
        workers: int = 1,
        num_slots: int | None = None,
        steps: int | None = None,
        cluster: Cluster | None = None,
        apart: int = 0,
        quiet: bool = False,
        salt: int = 0,
        resume: bool = False,
        until_epoch: int | None = None,
    ) -> ShortRun:
        place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
        recording = Recording(str(place), self._epoch_steps, apart, quiet, salt)
        execution = ExecutionSettings(workers=workers, num_slots=num_slots or self.num_slots)
        spec = RunSpec(
            self._program,
            self._folder / name,
            self._config,
            seed=self._seed,
            execution=execution,
            max_steps=self._steps if steps is None else steps,
            until_epoch=until_epoch,
            resume=resume,
        )
        records: list[Record] = []
        with environment(VARIABLE, recording.encode()):
            done = run_job(spec, cluster=cluster or self._cluster, observe=records.append)
        reports = [(record.step, record.metrics) for record in records if isinstance(record, Reported)]
        return ShortRun(done.sha256, done.steps, read_run(place, reports))


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Workers that start meanwhile have ``value`` in their environment."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


# ``elastune check FILE --against plain.py``: does a program take the same steps as a plain script, run unchanged?
#
# The program trains in one pass a batch on one worker. The script runs in a process of its own, on the CPU, and is
# fed with the same samples (``train.proof.plain``). Then losses, gradients and weights are compared step by step.

SCRIPT_STEPS = 20
MOST_APART = 1e-6  # relative, of losses and weights
LIMIT_S = 300.0
_WORDS = {
    "beginning": "the weights differ before it",
    "samples": "it has other samples",
    "content": "the samples have other values: do the transforms draw from a generator of their own?",
    "settings": "the optimizer has other settings",
    "loss": "the loss differs",
    "gradient": "the loss is the same, and its gradient differs",
    "weights": "the gradient is the same, and the update differs",
    "steps": "one of them stops",
}


@dataclass(frozen=True)
class AgainstPlain:
    """What came of a comparison with a plain script.

    Attributes:
        script: The script's name.
        steps: The steps that are the same.
        apart: The largest relative difference of losses and weights in them.
        problem: The first step that is not the same, and why; or why nothing could be compared. "": all are the same.
    """

    script: str
    steps: int
    apart: float
    problem: str = ""

    def as_line(self, name: str) -> str:
        """In one line; ``name``: the program's file."""
        if self.problem:
            return f"{name}: not the same as {self.script}: {self.problem}"
        near = "the same bits as" if self.apart == 0 else f"the same to {max(self.apart, 1e-9):.0e} as"
        return f"{name}: {near} {self.script} over {self.steps} steps"


def check_against(
    program: Program,
    script: Path,
    config: Config,
    *,
    steps: int = SCRIPT_STEPS,
    seed: int = 0,
) -> AgainstPlain:
    """Compare the first steps of ``program``, in one pass a batch, with those of the plain ``script``.

    Args:
        program: The program; its arguments are the script's, too.
        script: The plain script, which runs as ``python script ARGUMENTS`` would run it.
        config: Settings over the program's own.
        steps: How many steps are compared at most.
        seed: The seed of the run; the script gets the samples and random numbers that follow from it.

    Returns:
        How many steps are the same, or why they are not.

    Raises:
        UserError: The script is no file, or the program cannot train.
        JobFailed: The program does not train.

    Example:
        >>> check_against(Program(Path("train.py")), Path("plain.py"), {}).as_line("train.py")
        'train.py: the same bits as plain.py over 20 steps'
    """
    if not script.is_file():
        raise UserError("--against must name an existing Python file", script, "check the path")
    with tempfile.TemporaryDirectory(prefix="elastune-against-") as place:
        folder = Path(place)
        run = _recorded(program, config, folder, steps, seed)
        if not run.steps:
            return AgainstPlain(script.name, 0, 0.0, "the program took no step")
        mine = by_batch(run)
        turns = -(-len(run.steps) // len(mine.steps))
        plain = folder / "plain"
        plain.mkdir()
        request = plain_request(mine, script, program.arguments, folder / "records", plain, seed, turns)
        outcome = _run_script(request, folder)
        if outcome.problem:
            return AgainstPlain(script.name, 0, 0.0, outcome.problem)
        theirs = read_run(plain)
        return judge_against(script.name, mine, theirs, outcome)


def _recorded(program: Program, config: Config, folder: Path, steps: int, seed: int) -> RunRecord:
    records = folder / "records"
    records.mkdir()
    spec = RunSpec(
        program,
        folder / "run",
        config,
        seed=seed,
        execution=ExecutionSettings(num_slots=1),
        max_steps=steps,
        checkpoint_every_steps=0,
    )
    recording = Recording(str(records), beginning=True)
    with LocalCluster(capacity=1) as cluster, environment(VARIABLE, recording.encode()):
        run_job(spec, cluster=cluster)
    return read_run(records)


def by_batch(run: RunRecord) -> RunRecord:
    """``run`` with the steps that each batch had in turn as one: a plain script is recorded batch by batch."""
    steps: list[StepRecord] = []
    for step in run.steps:
        if steps and (steps[-1].epoch, steps[-1].numbers) == (step.epoch, step.numbers):
            earlier = steps[-1]
            losses = (*earlier.passes[0].losses, *step.passes[0].losses)
            one = replace(step.passes[0], losses=losses)
            # The script has gradient and settings of its last update alone: they are not compared.
            values: dict[str, Any] = {"gradient": {}, "settings": {}, "before": earlier.before, "passes": (one,)}
            steps[-1] = replace(step, step=earlier.step, **values)
        else:
            steps.append(replace(step, step=len(steps) + 1))
    return RunRecord(tuple(steps), run.reports)


def plain_request(
    mine: RunRecord, script: Path, arguments: Sequence[str], records: Path, plain: Path, seed: int, turns: int = 1
) -> PlainRequest:
    """What ``script`` is to do to be compared with ``mine``.

    Args:
        mine: The steps of the program, batch by batch.
        script: The plain script.
        arguments: Its command line.
        records: The folder with the program's records.
        plain: The folder for the script's.
        seed: The seed of the program's run.
        turns: How many steps the program takes with each batch.
    """
    epochs: dict[int, list[tuple[int, ...]]] = {}
    for step in mine.steps:
        epochs.setdefault(step.epoch, []).append(step.passes[0].numbers)
    batches, samples = tuple(map(tuple, epochs.values())), mine.steps[0].samples
    files = {"beginning": str(records / BEGINNING), "records": str(plain / "0.jsonl")}
    return PlainRequest(
        str(script), tuple(arguments), batches=batches, samples=samples, seed=seed, turns=turns, **files
    )


def _run_script(request: PlainRequest, folder: Path) -> PlainOutcome:
    request_file, outcome_file = folder / "request.json", folder / "outcome.json"
    request_file.write_text(json.dumps(asdict(request)))
    command = [sys.executable, "-m", "elastune.train.proof.plain", str(request_file), str(outcome_file)]
    path = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return PlainOutcome(0, None, f"it took no {len(request.batches)} epochs within {LIMIT_S:g} s")
    if not outcome_file.is_file():
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        return PlainOutcome(0, None, f"the script ended its process: {last}")
    return PlainOutcome(**json.loads(outcome_file.read_text()))


def judge_against(script: str, mine: RunRecord, theirs: RunRecord, outcome: PlainOutcome) -> AgainstPlain:
    """Compare the batches of a program, ``mine``, with those of a plain script."""
    count = min(len(mine.steps), len(theirs.steps))
    cut, other = RunRecord(mine.steps[:count]), RunRecord(theirs.steps[:count])
    pairs = [_comparable(a, b, outcome) for a, b in zip(cut.steps, other.steps, strict=True)]
    cut, other = RunRecord(tuple(a for a, _ in pairs)), RunRecord(tuple(b for _, b in pairs))
    apart = first_difference(cut, other, most=MOST_APART)
    if outcome.without_step is not None and (apart is None or outcome.without_step <= apart.step):
        finding = f"the script takes no optimizer step after batch {outcome.without_step}"
        fix = "does it accumulate gradients over batches? Make the batches larger instead (docs/programs.md)"
        return AgainstPlain(
            script, outcome.without_step - 1, _largest(cut, other, outcome.without_step - 1), f"{finding}: {fix}"
        )
    if apart is not None:
        why = _why(apart, cut.steps[apart.step - 1], other.steps[apart.step - 1])
        same = apart.step - 1
        return AgainstPlain(script, same, _largest(cut, other, same), f"first in step {apart.step}: {why}")
    return AgainstPlain(script, count, _largest(cut, other, count))


def _comparable(mine: StepRecord, theirs: StepRecord, outcome: PlainOutcome) -> tuple[StepRecord, StepRecord]:
    """Both steps without what only one of them has."""
    (one,), (other,) = mine.passes, theirs.passes
    if outcome.by_itself:
        other = replace(other, content=one.content)
    if len(one.losses) != len(other.losses):  # losses that one of them adds up before it takes their gradient
        one, other = replace(one, losses=(sum(one.losses),)), replace(other, losses=(sum(other.losses),))
    theirs = theirs if mine.gradient else replace(theirs, gradient={}, settings={})
    # A script's optimizers show what they train; tensors of the program beside these are frozen.
    weights = {name: leaf for name, leaf in mine.weights.items() if name in theirs.weights}
    before = None if mine.before is None or theirs.before is None else mine.before
    if before is not None and theirs.before is not None:
        before = {name: leaf for name, leaf in before.items() if name in theirs.before}
    return replace(mine, passes=(one,), weights=weights, before=before), replace(theirs, passes=(other,))


def _why(apart: StepDifference, mine: StepRecord, theirs: StepRecord) -> str:
    finding = f"{_WORDS[apart.what]} ({apart.detail})"
    if apart.what == "loss" and theirs.loss:
        ratio = mine.loss / theirs.loss
        return f"{finding}: {ratio:.4g} times the script's"
    return finding


def _largest(one: RunRecord, other: RunRecord, count: int) -> float:
    pairs = list(zip(one.steps[:count], other.steps[:count], strict=True))
    losses = [abs(a.loss - b.loss) / max(abs(a.loss), 1e-30) for a, b in pairs]  # of several turns their sum
    return max([0.0, *losses, *(distance(a.weights, b.weights) for a, b in pairs)])
