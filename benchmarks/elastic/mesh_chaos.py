"""Random kills and reshapes of divided models: for each mechanism one run, and nothing may show that it was disturbed.

Workers are killed (-9), and asked to stand as any mesh of data, shard, tensor and pipeline that the mechanism fits, at
random moments, in the middle of the change before included; new workers come in the place of dead ones. Checked: the
SHA-256 of weights and optimizer state is that of one worker alone, and the ledger shows every sample of every epoch
used once. Where all holders of a piece died before there were two again, the run has to say so (``lost``), and goes on
from its newest checkpoint, to the same bits. What happened is told with its times where anything is wrong.

    python -m benchmarks.elastic.mesh_chaos [--events 18] [--seed 1] [--smoke] \\
        [--out benchmarks/results/mesh_chaos.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.result_file import write_result
from tests.support.elastic_runs import SLOTS, Runs

from elastune.core.journal.records import Record, Regrouped, Restarted, RunFinished, StateLost
from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import MeshChoice
from elastune.core.run import Elastic, ExecutionSettings, Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.elastic_run import ElasticRun

PROGRAM = Program(Path(__file__).parents[1] / "programs" / "mesh_chaos_train.py")
WORKERS = 4
CASES: dict[str, Mesh] = {
    "tensor+zero": Mesh(shard=2, tensor=2),
    "zero": Mesh(data=2, shard=2),
    "sharded": Mesh(shard=4),
    "tensor": Mesh(data=2, tensor=2),
    "pipeline": Mesh(data=2, pipeline=2),
    "tensor+pipeline+zero": Mesh(shard=2, tensor=2),
}
STEPS_OF_EVENT = 4
LONGEST_CHANGE_S = 5.0
LIMIT_S = 400.0


class Dice:
    """What happens to a run, and when: ``seed`` decides, as far as the moments at which workers live allow."""

    def __init__(self, seed: int, events: int, meshes: list[Mesh], until: Path) -> None:
        self.done: list[tuple[float, str]] = []
        self._dice, self._events, self._meshes, self._until = random.Random(seed), events, meshes, until
        self._begun = self._next = 0.0
        self._views = 0  # that there must have been before the next event; else it waits no longer than a while

    def act(self, handle: ElasticRun, records: list[Record]) -> None:
        now = time.monotonic()
        living = [worker for worker in handle.members if worker in handle.pids]
        if not self._begun and living:
            self._begun, self._next = now, now + 0.5
        if not self._begun or now < self._next or self._until.exists():
            return
        if len(self.done) == self._events:
            self._until.touch()
            return
        views = sum(isinstance(record, Regrouped) for record in records)
        if views < self._views and now < self._next + LONGEST_CHANGE_S:
            return
        self._next = now + self._dice.uniform(0.05, 0.6)
        self._views = views + (self._dice.random() < 0.7)
        if self._dice.random() < 0.5 and len(living) > 1:
            worker = self._dice.choice(living)
            handle.kill_worker(worker)
            self._tell(now, f"kill {worker}")
        else:
            mesh = self._dice.choice(self._meshes)
            handle.reshape(mesh, "at random")
            self._tell(now, f"reshape {mesh}")

    def _tell(self, now: float, what: str) -> None:
        self.done.append((round(now - self._begun, 2), what))


def disturbed(cluster: LocalCluster, folder: Path, mechanism: str, events: int, seed: int) -> dict[str, Any]:
    execution: dict[str, Any] = {"mechanism": mechanism}
    if "tensor" in mechanism:
        execution["virtual_tensor"] = 2
    runs = Runs(cluster, folder / mechanism, PROGRAM)
    spec: dict[str, Any] = {"max_steps": 20 + STEPS_OF_EVENT * events, "checkpoint_every_steps": 5}
    alone = runs(1, execution={**execution, "mesh": Mesh()}, spec=spec, limit_s=LIMIT_S)
    execution["mesh"] = CASES[mechanism]
    until = folder / f"{mechanism}-until"
    dice = Dice(seed, events, MeshChoice.of(ExecutionSettings(num_slots=SLOTS, **execution)).meshes(1, WORKERS), until)
    elastic = Elastic(low=1, high=WORKERS, most_losses=10 * events)
    paced: dict[str, Any] = {"pause_s": 0.1, "until": str(until)}
    ran = runs(WORKERS, execution=execution, elastic=elastic, spec=spec, act=dice.act, limit_s=LIMIT_S, **paced)
    wrong = []
    if not isinstance(ran.outcome, RunFinished):
        wrong.append(f"it failed: {ran.outcome}")
    elif ran.sha256 != alone.sha256:
        wrong.append(f"another state: {ran.sha256}")
    if not ran.ledger.exact:
        wrong.append(f"the ledger: {ran.ledger}")
    return {
        "mechanism": mechanism,
        "seed": seed,
        "kills": sum(what.startswith("kill") for _, what in dice.done),
        "reshapes": sum(what.startswith("reshape") for _, what in dice.done),
        "views": len(ran.regrouped),
        "meshes": len({str(view.mesh) for view in ran.regrouped}),
        "steps_discarded": sum(view.discarded for view in ran.regrouped),
        "lost": sum(isinstance(record, StateLost) for record in ran.records),
        "restarts": sum(isinstance(record, Restarted) for record in ran.records),
        "sha256": alone.sha256,
        "ledger_exact": ran.ledger.exact,
        "wrong": wrong,
        "events": [f"{at_s} {what}" for at_s, what in dice.done],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=18, help="of each mechanism's run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mechanisms", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--smoke", action="store_true", help="a few events upon one mechanism")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    mechanisms, events = (args.mechanisms[:1], 4) if args.smoke else (args.mechanisms, args.events)
    told = []
    with tempfile.TemporaryDirectory() as folder, LocalCluster(WORKERS + 1) as cluster:
        for number, mechanism in enumerate(mechanisms):
            told.append(disturbed(cluster, Path(folder), mechanism, events, args.seed + number))
            short = {name: value for name, value in told[-1].items() if name not in ("events", "wrong")}
            print(json.dumps(short), flush=True)
            if told[-1]["wrong"]:
                print("\n".join([*told[-1]["wrong"], *told[-1]["events"]]), flush=True)
    injected = sum(case["kills"] + case["reshapes"] for case in told)
    if args.out:
        result = {
            "injected": injected,
            "runs": told,
        }
        write_result(args.out, result)
    if failed := [case["mechanism"] for case in told if case["wrong"]]:
        raise SystemExit(f"FAILED: {', '.join(failed)}")
    if injected < events * len(mechanisms):
        raise SystemExit(f"FAILED: {injected} of {events * len(mechanisms)} events were injected")
    print(f"ok: {injected} kills and reshapes, and nothing shows")


if __name__ == "__main__":
    main()
