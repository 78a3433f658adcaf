"""Workers that compute wrong on purpose: whether ``--verify`` names the right one, and what it costs.

- "found": from some step on a worker flips one random bit of a random leaf in each slot that it computes, on 2 to 4
  workers, replicated and ``zero``. Counted are those that were named, the steps until then, and equal final weights.
- "false": the same runs without an error. Counted are the slots that were computed twice, and the alarms.
- "cost": step times with ``every=25`` over those without, in pairs of runs.

    python -m benchmarks.elastic.verify [--smoke] [--errors 40] [--clean 6] [--pairs 3] \\
        [--out benchmarks/results/verify.json]

It fails (exit code 1) where a worker was not named, the wrong one was, or the weights differ. Errors are injected by
software: no chip here is known to be wrong.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.result_file import write_result
from tests.support.elastic_runs import Ran, Runs

from elastune.core.journal.records import Record, RunFinished, StepsVerified, VerificationEnded, WorkerWrong
from elastune.core.run import Program
from elastune.core.slots import VerifyPlan
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.elastic_run import ElasticRun

PROGRAM = Program(Path(__file__).parents[2] / "tests" / "faults" / "programs" / "shares.py")
EVERY = 25
EPOCHS = 16  # of 10 steps
WITHIN = 100
LAYOUTS = tuple(itertools.product((2, 3, 4), ("replicated", "zero")))
SPEC: dict[str, Any] = {"verify": VerifyPlan(EVERY)}


class WrongFrom:
    """From ``step`` on a worker computes wrong; ``dice`` choose which one."""

    def __init__(self, step: int, dice: random.Random) -> None:
        self._step, self._dice = step, dice
        self.worker, self.began = -1, 0

    def __call__(self, handle: ElasticRun, records: list[Record]) -> None:
        if self.worker < 0 and handle.members and handle.step >= self._step:
            self.worker, self.began = self._dice.choice(handle.members), handle.step
            handle.corrupt(self.worker, "gradient", once=False, seed=self._dice.getrandbits(32))


def run(folder: Path, workers: int, mechanism: str, act: Any = lambda handle, records: None, *, verify: bool) -> Ran:
    """One run on a cluster of its own: a place that was marked stays empty."""
    spec = SPEC if verify else {**SPEC, "verify": None}
    with LocalCluster(capacity=workers + 1) as cluster:
        runs = Runs(cluster, folder, PROGRAM)
        return runs(workers, act=act, spec=spec, execution={"mechanism": mechanism}, epochs=EPOCHS)


def found(folder: Path, count: int, undisturbed: str) -> list[dict[str, Any]]:
    """A row for each injected error."""
    rows = []
    for number, (workers, mechanism) in zip(range(count), itertools.cycle(LAYOUTS), strict=False):
        dice = random.Random(number)
        wrong = WrongFrom(dice.randrange(2, 50), dice)
        ran = run(folder / f"wrong-{number}", workers, mechanism, wrong, verify=True)
        named = [record for record in ran.records if isinstance(record, WorkerWrong)]
        first = named[0] if named else None
        row = {
            "workers": workers,
            "mechanism": mechanism,
            "right": first is not None and [record.worker for record in named] == [wrong.worker],
            "steps": None if first is None else first.step - wrong.began,
            "equal": isinstance(ran.outcome, RunFinished) and ran.outcome.sha256 == undisturbed and ran.ledger.exact,
            "outcome": ran.outcome.kind if isinstance(ran.outcome, RunFinished) else ran.outcome.detail[:200],
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def clean(folder: Path, count: int) -> dict[str, int]:
    """Slots that were computed twice without an error, and alarms."""
    slots = alarms = 0
    for number, (workers, mechanism) in zip(range(count), itertools.cycle(LAYOUTS), strict=False):
        ran = run(folder / f"clean-{number}", workers, mechanism, verify=True)
        slots += sum(record.slots for record in ran.records if isinstance(record, StepsVerified))
        alarms += sum(isinstance(record, WorkerWrong | VerificationEnded) for record in ran.records)
    return {"runs": count, "slots": slots, "alarms": alarms}


def cost(folder: Path, pairs: int) -> dict[str, Any]:
    """The median ratio of training times of pairs of runs, with and without verification."""
    ratios = []
    for number in range(pairs):
        seconds = {}
        for verify in (number % 2 == 0, number % 2 == 1):
            outcome = run(folder / f"cost-{number}-{verify}", 2, "replicated", verify=verify).outcome
            assert isinstance(outcome, RunFinished), outcome
            seconds[verify] = outcome.seconds
        ratios.append(seconds[True] / seconds[False])
    return {"pairs": pairs, "median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one run of each kind")
    parser.add_argument("--errors", type=int, default=40)
    parser.add_argument("--clean", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    errors, cleans, pairs = (1, 1, 1) if asked.smoke else (asked.errors, asked.clean, asked.pairs)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        undisturbed = run(at / "undisturbed", 1, "replicated", verify=False).sha256
        rows, without = found(at, errors, undisturbed), clean(at, cleans)
        result = {"every": EVERY, "errors": rows, "clean": without, "cost": cost(at, pairs)}
    steps = [row["steps"] for row in rows if row["steps"] is not None]
    result["summary"] = {
        "injected": len(rows),
        "named": sum(row["right"] for row in rows),
        "equal": sum(row["equal"] for row in rows),
        "most_steps": max(steps, default=None),
    }
    print(result["summary"], without, result["cost"])
    if asked.out is not None:
        write_result(asked.out, result)
    good = all(row["right"] and row["equal"] and row["steps"] <= WITHIN for row in rows) and not without["alarms"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
