"""``elastune check FILE --against plain.py``: does a program take the same steps as a plain script, run unchanged?

The program trains in one pass a batch on one worker. The script runs in a process of its own, on the CPU, and is fed
with the same samples (``train.proof.plain``). Then losses, gradients and weights are compared step by step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.core.run import Config, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.program_check import environment
from elastune.runtime.job.run import run_job
from elastune.train.proof.compare import StepDifference, distance, first_difference
from elastune.train.proof.plain import PlainOutcome, PlainRequest
from elastune.train.proof.recorder import BEGINNING, VARIABLE, Recording
from elastune.train.proof.records import RunRecord, StepRecord, read_run

STEPS = 20
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
    steps: int = STEPS,
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
