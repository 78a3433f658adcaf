"""A thousand faults in one run on real MNIST; afterwards, nothing may show that there was one.

Members are killed, frozen (for good, or shortly), told to leave and added, rank 0 and workers in the middle of a change
included. Checked: the final weights are those of an undisturbed run bit for bit, reports too; the ledger shows every
sample of every epoch seen once; no pause exceeds ten seconds; nothing is left of processes, descriptors or threads.

    ELASTUNE_DATA=... python -m benchmarks.elastic.chaos [--faults 1000] [--smoke] [--out benchmarks/results/chaos.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.pauses import irregular, summary
from benchmarks.common.result_file import write_result
from benchmarks.elastic.driving import LOOK_S, Run, Stalled, running
from benchmarks.elastic.holdings import HeldTrials, growth, holding, marked

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import FaultInjected, Regrouped, Reported, RunFinished
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.recipes.datasets import find
from elastune.report.sample_ledger import ledger, lines
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.output import JOURNAL

KINDS = ("kill", "stop", "pause", "join", "leave", "notice")
WORKERS, HIGH = 3, 4
HEARTBEAT_S = 1.0
LONGEST_HANG_S = 10.0
ONE_MORE = 4  # files, sockets, threads: what one worker more or less at the time of looking makes
MARK = "ELASTUNE_CHAOS"  # an environment variable by which every process of this benchmark is known


class Injector:
    """Does one fault after another to ``run``; ``seed`` decides kinds, victims and distances."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run = run
        self.done: Counter[str] = Counter()
        self.workers: dict[int, list[HeldTrials]] = {}
        self.controller: list[HeldTrials] = []
        self._random = random.Random(seed)
        self._target = WORKERS
        self._victims: set[int] = set()
        self._frozen: dict[int, tuple[int, float]] = {}  # a pidfd -> whose it is, and when it wakes up
        self._moved_at = time.monotonic()
        self._step = 0

    def inject(self, faults: int) -> None:
        """Raises ``Stalled`` when the run stops moving."""
        while self.done.total() < faults:
            # Most come some steps after the one before it, some into the middle of what that one set off.
            steps = self._random.choice((0, 1, 3, 6, 12, 24))
            target = self._step + steps
            while self._step < target or len(self._living()) < 2:
                self._wait()
            self._wait()
            self._do(self._random.choice(KINDS))
            self._weigh()
            if self.done.total() % 50 == 0:
                print(f"{self.done.total()} faults, step {self._step}", flush=True)

    def settle(self) -> None:
        """Until all frozen ones are awake or gone, and some steps more."""
        target = self._step + 20
        while self._frozen or self._step < target:
            self._wait()

    def _do(self, kind: str) -> None:
        if kind in ("join", "leave"):
            self._target = max(2, min(HIGH, self._target + (1 if kind == "join" else -1)))
            self.run.handle.resize(self._target)
            self._told(kind)
            return
        if not (living := self._living()):
            return
        pid = self._random.choice(living)
        with suppress(ProcessLookupError):
            victim = os.pidfd_open(pid)
            what = {"kill": signal.SIGKILL, "notice": signal.SIGTERM}.get(kind, signal.SIGSTOP)
            signal.pidfd_send_signal(victim, what)
            if kind in ("stop", "pause"):  # a pause ends before the heartbeat would be missed
                self._frozen[victim] = pid, time.monotonic() + HEARTBEAT_S * (2.0 if kind == "stop" else 0.3)
            else:
                os.close(victim)
            if kind != "pause":
                self._victims.add(pid)
            self._told(kind)

    def _told(self, kind: str) -> None:
        self.done[kind] += 1
        self.run.note(FaultInjected(kind))

    def _living(self) -> list[int]:
        asleep = {pid for pid, _ in self._frozen.values()}  # a second fault would wake it before its time
        return [pid for pid in self.run.ticks.pids() if pid not in self._victims | asleep]

    def _wait(self) -> None:
        time.sleep(LOOK_S / 2)
        self.run.look()
        now = time.monotonic()
        for victim, (_, wakes) in list(self._frozen.items()):
            if now >= wakes:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(victim, signal.SIGCONT)
                os.close(victim)
                del self._frozen[victim]
        if self.run.step != self._step:
            self._step, self._moved_at = self.run.step, now
        if self.run.outcome is not None:
            raise Stalled(f"the run ended under chaos: {self.run.outcome}")
        if now - self._moved_at > LONGEST_HANG_S + HEARTBEAT_S:
            raise Stalled(f"no step for {now - self._moved_at:.1f} s after step {self._step}; {dict(self.done)}")

    def _weigh(self) -> None:
        for pid in self._living():
            if (held := holding(pid)) is not None:
                self.workers.setdefault(pid, []).append(held)
        if (held := holding(os.getpid())) is not None:
            self.controller.append(held)


@contextmanager
def run_of(folder: Path, name: str, data_set: str, workers: int, max_steps: int | None) -> Iterator[Run]:
    ticks = folder / f"{name}-ticks"
    ticks.mkdir()
    spec = RunSpec(
        program=Program(Path(__file__).parents[1] / "programs" / "chaos_train.py"),
        out=folder / name,
        config={"data_set": data_set, "ticks": str(ticks)},
        seed=7,
        execution=ExecutionSettings(workers=workers, mode="exact", num_slots=8),
        max_steps=max_steps,
        elastic=Elastic(low=1, high=HIGH, heartbeat_s=HEARTBEAT_S),
    )
    with LocalCluster(HIGH + 1) as cluster, running(cluster, spec, ticks) as run:
        yield run


def reports(run: Run, before_step: int) -> list[tuple[int, int, dict[str, float]]]:
    """Of whole epochs: what ends a run by its number of steps evaluates once more, what is asked to stop does not."""
    results = [r for r in run.records if isinstance(r, Reported) and r.step < before_step]
    return [(r.epoch, r.step, r.metrics) for r in results]


def longest_gap_s(run: Run) -> float:
    """Between any two steps of the whole run, by the clock of whoever did them."""
    times = sorted(tick.time_s for line in run.ticks.of.values() for tick in line)
    return max((b - a for a, b in pairwise(times)), default=0.0)


def disturbed(folder: Path, faults: int, seed: int, data_set: str) -> tuple[RunFinished, Run, dict[str, Any]]:
    before = holding(os.getpid())
    with run_of(folder, "disturbed", data_set, WORKERS, None) as run:
        run.until_world(WORKERS, 0.0, 10)
        injector = Injector(run, seed)
        injector.inject(faults)
        injector.settle()
        finished = run.stop()
    after, left = holding(os.getpid()), marked(MARK, os.environ[MARK])
    deadline = time.monotonic() + 5
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = marked(MARK, os.environ[MARK])
    regrouped = [record for record in run.records if isinstance(record, Regrouped)]
    lived = [series for series in injector.workers.values() if len(series) >= 6]
    return finished, run, {
        "faults": dict(injector.done),
        "versions": len(regrouped),
        "pause_ms": summary([record.pause_s * 1e3 for record in regrouped]),
        "steps_discarded": sum(record.discarded for record in regrouped),
        "steps_in_survivors": irregular(run.ticks),
        "longest_gap_s": round(longest_gap_s(run), 2),
        "workers_in_all": len(injector.workers),
        "growth": {"workers": growth(lived), "controller": growth([injector.controller])},
        "controller": {"before": asdict(before) if before else {}, "after": asdict(after) if after else {}},
        "processes_left": len(left),
    }  # fmt: skip


def undisturbed(folder: Path, steps: int, data_set: str) -> tuple[RunFinished, Run]:
    with run_of(folder, "undisturbed", data_set, 2, steps) as run:
        finished = run.finish(60.0 + 0.5 * steps)
    return finished, run


def verdict(data: dict[str, Any], faults: int) -> list[str]:
    """What is wrong, in words."""
    wrong = []
    if data["sha256"]["disturbed"] != data["sha256"]["undisturbed"]:
        wrong.append("the weights are not those of the undisturbed run")
    if not data["reports_equal"]:
        wrong.append("the reports are not those of the undisturbed run")
    if not data["ledger"]["exact"]:
        wrong.append(f"the ledger: {data['ledger']['text']}")
    if sum(data["faults"].values()) != faults:
        wrong.append("not all faults were injected")
    if data["longest_gap_s"] > LONGEST_HANG_S:
        wrong.append(f"no step for {data['longest_gap_s']} s")
    # Lines after a pass's last step may run twice: a worker lost with its part of an evaluation sends all back.
    losses = data["faults"].get("kill", 0) + data["faults"].get("stop", 0)
    repeated = data["steps_in_survivors"]["repeated"] > HIGH * losses
    if data["steps_in_survivors"]["skipped"] or repeated:
        wrong.append(f"steps skipped or repeated: {data['steps_in_survivors']}")
    for who, gained in data["growth"].items():
        wrong += [
            f"{who} gained {gained[name]} {name}" for name in ("files", "sockets", "threads") if gained[name] > ONE_MORE
        ]
    before, after = data["controller"]["before"], data["controller"]["after"]
    wrong += [
        f"the controller kept {n}: {after[n] - before[n]}"
        for n in ("files", "sockets")
        if after[n] > before[n] + ONE_MORE
    ]
    if data["processes_left"]:
        wrong.append(f"{data['processes_left']} processes are left")
    return wrong


def chaos(faults: int, seed: int, data_set: str, keep: Path | None) -> dict[str, Any]:
    os.environ[MARK] = f"{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        finished, run, outcome = disturbed(folder, faults, seed, data_set)
        outcome["minutes"] = round((time.monotonic() - started) / 60, 1)
        outcome["steps"], outcome["metrics"] = finished.steps, finished.metrics
        print(f"{faults} faults in {outcome['minutes']} minutes, {finished.steps} steps; now undisturbed", flush=True)
        result = ledger(read(folder / "disturbed" / JOURNAL))
        calm, calm_run = undisturbed(folder, finished.steps, data_set)
        outcome |= {
            "ledger": {"exact": result.exact, "text": lines(result)[-1]},
            "sha256": {"disturbed": finished.sha256, "undisturbed": calm.sha256},
            "reports_equal": reports(run, finished.steps) == reports(calm_run, finished.steps),
        }
    outcome["wrong"] = verdict(outcome, faults)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--data-set", default="mnist", choices=("mnist", "digits"))
    parser.add_argument("--smoke", action="store_true", help="6 faults, within half a minute")
    parser.add_argument("--keep", type=Path, help="a new folder for journals, logs and ticks")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.data_set == "mnist" and find("mnist") is None:
        raise SystemExit("MNIST must be on this machine: set ELASTUNE_DATA to the folder that holds it")
    faults = 6 if args.smoke else args.faults
    try:
        outcome = chaos(faults, args.seed, args.data_set, args.keep)
    except (Stalled, UserError) as error:
        raise SystemExit(f"FAILED: {error}") from None
    print(json.dumps(outcome, indent=1))
    if args.out:
        result = {"chaos": outcome}
        write_result(args.out, result)
    if outcome["wrong"]:
        raise SystemExit("FAILED: " + "; ".join(outcome["wrong"]))
    print(f"ok: {faults} faults, and nothing shows")


if __name__ == "__main__":
    main()
