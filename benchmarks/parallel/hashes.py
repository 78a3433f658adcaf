"""Do small trainings still end with the same bits? SHA-256 of the weights, steps and samples, against those of a file.

A LeNet and a GRU (``programs/hashes_train.py``), both modes, one to three workers, faults, resizes, policies, runs that
are killed and resumed, and a checkpoint of an earlier version. Only the command line is used, so that any two versions
of elastune can be compared. Bits depend on processor and torch: where these differ from the file's, only what must be
equal on every machine is compared (a run on two workers, or with faults, with the one on one worker).

    python -m benchmarks.parallel.hashes --write benchmarks/results/hashes.json
    python -m benchmarks.parallel.hashes --check benchmarks/results/hashes.json [--smoke] [--only TEXT]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parents[1]
PROGRAM = HERE / "programs" / "hashes_train.py"
OLD_CHECKPOINT = HERE / "results" / "hashes_checkpoint"  # "gru, 1 worker" of commit fe4ff17 with --max-steps 24
LIMIT_S = 180.0
USER_ERROR = 2  # the exit code of a refusal


class Failed(Exception):
    """A run that did not end as it must."""


class Refused(Failed):
    """One line said why nothing was trained: an old checkpoint may be refused."""


@dataclass(frozen=True)
class Outcome:
    """What must stay the same."""

    sha256: str
    steps: int
    samples: int


@dataclass(frozen=True)
class Case:
    """One training: ``options`` of ``elastune run``.

    ``like``: the case that it must equal on every machine. ``shows``: what its result must count, and at least how
    often, or the case would test nothing. ``way``: what is done to it, one of ``WAYS``.
    """

    name: str
    options: str
    like: str = ""
    shows: tuple[str, int] | None = None
    way: str = "once"
    smoke: bool = False


GRU = "--set model=gru"
SLOW = "--set pace_s=0.05 --heartbeat 1s"  # time for faults and resizes to happen
GNS = "--policy gns:max_batch=256,factor=1,settle=5,cooldown=5,lr=adascale --set batch_size=32"
DIVERGENCE = "--policy divergence:factor=1.2,patience=1,every=3 --set lr=3.0"
SCHEDULES = "--policy warmup:steps=15 --policy scheduled_batch:at=1/2,lr=linear,ramp_steps=5"
ADASCALE = "--policy adascale:base_batch=32"
DECIDED = ("decisions", 3)
CASES = (
    Case("lenet, 1 worker", "--workers 1", smoke=True),
    Case("lenet, 2 workers", "--workers 2", like="lenet, 1 worker"),
    Case("lenet, 3 workers", "--workers 3", like="lenet, 1 worker"),
    Case("lenet, fast, 1 worker", "--mode fast --workers 1"),
    Case("lenet, fast, 2 workers", "--mode fast --workers 2", smoke=True),
    Case("lenet, micro-batch, 1 worker", "--micro-batch 3 --workers 1"),
    Case("lenet, micro-batch, 2 workers", "--micro-batch 3 --workers 2", like="lenet, micro-batch, 1 worker"),
    Case("lenet, bf16, 1 worker", "--precision bf16 --workers 1"),
    Case("lenet, bf16, 2 workers", "--precision bf16 --workers 2", like="lenet, bf16, 1 worker"),
    Case("gru, 1 worker", f"{GRU} --workers 1", smoke=True),
    Case("gru, 2 workers", f"{GRU} --workers 2", like="gru, 1 worker"),
    Case("gru, 3 workers", f"{GRU} --workers 3", like="gru, 1 worker"),
    Case("gru, fast, 1 worker", f"{GRU} --mode fast --workers 1"),
    Case("gru, fast, 2 workers", f"{GRU} --mode fast --workers 2"),
    Case(
        "lenet, kills and a freeze",
        f"--workers 3 {SLOW} --chaos kill@step:8,kill@step:20,stop@step:32",
        like="lenet, 1 worker",
        shows=("faults", 3),
    ),
    Case(
        "lenet, join, kill, leave, notice",
        f"--workers 2:3 {SLOW} --chaos join@step:6,kill@step:16,leave@step:26,notice@step:34",
        like="lenet, 1 worker",
        shows=("faults", 4),
    ),
    Case(
        "gru, kills and a leave",
        f"{GRU} --workers 1:3 {SLOW} --chaos kill@step:8,leave@step:20,kill@step:30",
        like="gru, 1 worker",
        shows=("faults", 2),
    ),
    Case("gru, resized", f"{GRU} --workers 1:3 {SLOW}", like="gru, 1 worker", shows=("changes", 2), way="resized"),
    Case("policy of the program, 1 worker", f"{GRU} --workers 1 --policy Adapt", shows=DECIDED, smoke=True),
    Case(
        "policy of the program, changing workers",
        f"{GRU} --workers 1:3 --set pace_s=0.03 --policy Adapt",
        like="policy of the program, 1 worker",
        shows=("changes", 2),
        smoke=True,
    ),
    Case(
        "policy of the program, kills",
        f"{GRU} --workers 3 {SLOW} --policy Adapt --chaos kill@step:8,kill@step:24",
        like="policy of the program, 1 worker",
        shows=("faults", 2),
    ),
    Case("policy that averages, 1 worker", f"{GRU} --workers 1 --policy Adapt:average=true", shows=DECIDED),
    Case(
        "policy that averages, 3 workers",
        f"{GRU} --workers 3 --policy Adapt:average=true",
        like="policy that averages, 1 worker",
        shows=DECIDED,
    ),
    Case("set by a policy, 1 worker", "--workers 1 --policy Set", shows=DECIDED),
    Case("set by a policy, 2 workers", "--workers 2 --policy Set", like="set by a policy, 1 worker", shows=DECIDED),
    Case("gns, 1 worker", f"--workers 1 {GNS}", shows=("decisions", 2)),
    Case("gns, 2 workers", f"--workers 2 {GNS}", like="gns, 1 worker", shows=("decisions", 2)),
    Case(
        "gns, kills",
        f"--workers 3 {SLOW} {GNS} --chaos kill@step:5,kill@step:20",
        like="gns, 1 worker",
        shows=("faults", 2),
    ),
    Case("divergence, 1 worker", f"--workers 1 {DIVERGENCE}", shows=DECIDED),
    Case("divergence, 2 workers", f"--workers 2 {DIVERGENCE}", like="divergence, 1 worker", shows=DECIDED),
    Case("warmup and scheduled_batch, 1 worker", f"--workers 1 {SCHEDULES}", shows=DECIDED),
    Case(
        "warmup and scheduled_batch, 2 workers",
        f"--workers 2 {SCHEDULES}",
        like="warmup and scheduled_batch, 1 worker",
        shows=DECIDED,
    ),
    Case("adascale, 1 worker", f"--workers 1 {ADASCALE}", shows=DECIDED),
    Case(
        "adascale and scheduled_workers",
        f"--workers 1:3 --set pace_s=0.03 {ADASCALE} --policy scheduled_workers:by=step,at=10/25,workers=3/1",
        like="adascale, 1 worker",
        shows=("changes", 2),
    ),
    Case(
        "lenet, killed and resumed",
        f"--workers 2 {SLOW} --checkpoint-every 10",
        like="lenet, 1 worker",
        shows=("resumed_step", 10),
        way="killed",
    ),
    Case(
        "policy of the program, killed and resumed",
        f"{GRU} --workers 1 {SLOW} --policy Adapt --checkpoint-every 10",
        like="policy of the program, 1 worker",
        shows=("resumed_step", 10),
        way="killed",
    ),
    Case(
        "gru, from an old checkpoint",
        f"{GRU} --workers 2",
        like="gru, 1 worker",
        shows=("resumed_step", 24),
        way="old",
    ),
)


def elastune(*words: object) -> list[str]:
    return [sys.executable, "-m", "elastune", *map(str, words)]


def start(case: Case, out: Path, *more: str) -> subprocess.Popen[str]:
    command = elastune("run", PROGRAM, "--out", out, "--json", "--slots", 8, *shlex.split(case.options), *more)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def finish(case: Case, out: Path, run: subprocess.Popen[str]) -> Outcome:
    """Raises ``Failed`` unless the run ended well and shows what the case is about."""
    try:
        text, errors = run.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise Failed(f"no end within {LIMIT_S:g} s") from None
    said = errors.strip().splitlines()
    refusals = [line for line in said if "(got " in line]  # beside notices
    if run.returncode == USER_ERROR and len(refusals) == 1:
        raise Refused(refusals[0])
    if run.returncode:
        raise Failed(f"exit code {run.returncode}: {(said or ['nothing said'])[-1]}")
    result = json.loads(text)
    if case.shows is not None:
        what, least = case.shows
        if (number := counts(result, out)[what]) < least:
            raise Failed(f"{what}: {number}, which is less than {least}: nothing was tested")
    return Outcome(result["sha256"], result["steps"], result["samples"])


def counts(result: Mapping[str, Any], out: Path) -> dict[str, int]:
    """How much happened to a run that is said to end with the same bits nevertheless."""
    records = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    resumed = [record["resumed_step"] for record in records if record["kind"] == "run_started"]
    return {
        "changes": result["changes"],
        "decisions": result.get("adapt", {}).get("decisions", 0),
        "faults": sum(result.get("chaos", {}).get("faults", {}).values()),
        "resumed_step": resumed[-1] or 0,
    }


def once(case: Case, out: Path) -> Outcome:
    return finish(case, out, start(case, out))


def resized(case: Case, out: Path) -> Outcome:
    """To three workers, and later to one."""
    run = start(case, out)
    wait(lambda: '"reported"' in journal(out), run, "an epoch")
    for workers in (3, 1):
        subprocess.run(elastune("resize", out, workers), check=False, capture_output=True)
        time.sleep(0.5)
    return finish(case, out, run)


def killed(case: Case, out: Path) -> Outcome:
    """All processes at once, after a checkpoint; then resumed."""
    run = start(case, out)
    wait(lambda: '"checkpointed"' in journal(out), run, "a checkpoint")
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    return finish(case, out, start(case, out, "--resume"))


def from_old(case: Case, out: Path) -> Outcome:
    """Goes on from a checkpoint that an earlier version has written."""
    shutil.copytree(OLD_CHECKPOINT, out / "checkpoints")
    return finish(case, out, start(case, out, "--resume"))


WAYS: dict[str, Callable[[Case, Path], Outcome]] = {
    "once": once, "resized": resized, "killed": killed, "old": from_old,
}  # fmt: skip


def journal(out: Path) -> str:
    path = out / "journal.jsonl"
    return path.read_text() if path.exists() else ""


def wait(condition: Callable[[], bool], run: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if run.poll() is not None or time.monotonic() > deadline:
            raise Failed(f"the run ended, or nothing happened, before {what}")
        time.sleep(0.02)


def train(cases: Sequence[Case], jobs: int) -> Iterator[Outcome | Failed]:
    """What each case ended with, in their order; ``jobs`` of them run side by side."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:

        def of(numbered: tuple[int, Case]) -> Outcome | Failed:
            number, case = numbered
            try:
                return WAYS[case.way](case, Path(folder) / str(number))
            except Failed as failed:
                return failed

        yield from pool.map(of, enumerate(cases))


def verdict(case: Case, found: Mapping[str, Outcome | Failed], kept: Outcome | None, here: bool) -> tuple[bool, str]:
    """Whether all is well with a case, and why. ``kept``: what the file has; ``here``: it is of this machine."""
    outcome, like = found[case.name], found.get(case.like)
    if isinstance(outcome, Refused) and case.way == "old":
        return True, f"refused, as it may be: {outcome}"
    if isinstance(outcome, Failed):
        return False, f"failed: {outcome}"
    if case.way == "old" and not here:
        return True, "resumed; what it began with is of another machine"
    if isinstance(like, Outcome) and outcome != like:
        return False, f"DIFFERENT from {case.like}: {outcome}"
    if here and kept is not None:
        return outcome == kept, "equal" if outcome == kept else f"DIFFERENT: {outcome}, not {kept}"
    return True, f"equal to {case.like}" if isinstance(like, Outcome) else "trained, compared with nothing"


def machine() -> dict[str, str]:
    """What decides which bits a kernel gives."""
    results: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        results.setdefault(name.strip(), value.strip())
    processor = f"{results.get('model name')}, family {results.get('cpu family')}, model {results.get('model')}"
    return {"processor": processor, "capability": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}


def commit() -> str:
    """Of the elastune that is tested, which need not be the one beside this file."""
    spec = importlib.util.find_spec("elastune")
    if spec is None or spec.origin is None:
        return "unknown"
    git = ["git", "-C", str(Path(spec.origin).parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", type=Path, help="keep the hashes in this file")
    way.add_argument("--check", type=Path, help="compare with this file")
    parser.add_argument("--smoke", action="store_true", help="five of the cases, within half a minute")
    parser.add_argument("--only", default="", help="the cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="trainings side by side")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    file = json.loads(args.check.read_text()) if args.check else {"machine": machine(), "hashes": {}}
    here = file["machine"] == machine()
    if not here:
        print(f"the file is of another machine, {file['machine']}: only equalities among the cases are checked")
    cases = [case for case in CASES if (case.smoke or not args.smoke) and args.only in case.name]
    kept = {name: Outcome(**row) for name, row in file["hashes"].items()}
    results: dict[str, Outcome | Failed] = {}
    bad = 0
    for case, outcome in zip(cases, train(cases, args.jobs), strict=True):
        results[case.name] = outcome
        good, why = verdict(case, results, kept.get(case.name), here)
        bad += not good
        print(f"{case.name:<44} {why}", flush=True)
    if bad:
        raise SystemExit(f"FAILED: {bad} of {len(cases)} cases")
    if args.write:
        hashes = {name: asdict(outcome) for name, outcome in results.items() if isinstance(outcome, Outcome)}
        from benchmarks.common.result_file import (
            write_result,  # what is tested may be an elastune that lacks what this imports
        )

        write_result(args.write, {"commit": commit(), "machine": machine(), "hashes": hashes})
    print(f"ok: {len(cases)} cases, elastune {commit()}")


if __name__ == "__main__":
    main()
