"""A study's controller is killed (SIGKILL) at 100 random moments: what is lost, and what is left behind?

Each life resumes the study of the one before and is killed a random time after its start, from 0 to ``--longest``
seconds, so that kills strike while it starts, asks, writes, pauses and resumes trials. Two workers, successive halving
(trials are paused with checkpoints and resumed). After every kill: what had been recorded as finished still is, nothing
is recorded twice, and every process that the controller had started is gone within 5 s. In the end an undisturbed life
finishes the study; then every trial has ended or is paused, and none is left running in the journal or in its export
for Optuna.

    python -m benchmarks.search.killed_studies           # 100 kills, some minutes; writes results/killed_studies.json
    python -m benchmarks.search.killed_studies --smoke   # 2 kills, writes nothing

``--simulated``: 100 kills of simulated studies instead, right after random records, beside undisturbed ones: are all
trials and results the same, bit for bit? Writes results/killed_simulated.json.

``--alike``: real studies on two workers, killed so often each, beside undisturbed ones (``killed_alike.py``). Writes
results/killed_alike.json; a run that is cut keeps its studies there, and the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
from benchmarks.common.kept import Rows, ended
from benchmarks.common.result_file import write_result
from benchmarks.search import killed_alike, killed_simulated
from benchmarks.search.killed_life import one_life
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from elastune.core.journal.files import read
from elastune.core.journal.records import Record, TrialFinished, TrialPaused, TrialResumed, TrialStarted
from elastune.core.run import Program
from elastune.report.export import to_optuna
from elastune.tuning.study.request import StudyRequest

PROGRAM = Program(Path(__file__).parents[1] / "programs" / "killed_train.py")
RESULT = Path(__file__).parents[1] / "results" / "killed_studies.json"
SIMULATED = RESULT.with_name("killed_simulated.json")
ALIKE = RESULT.with_name("killed_alike.json")


def request(out: Path, trials: int) -> StudyRequest:
    return StudyRequest(PROGRAM, out, sampler="random", stopping="asha:eta=3,min_resource=1", trials=trials, workers=2)


def records(out: Path) -> list[Record]:
    journal = out / "journal.jsonl"
    return [entry.record for entry in read(journal)] if journal.exists() else []


def exported_states(out: Path) -> Counter[str]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    (out / "optuna.log").write_bytes(to_optuna(out))
    storage = JournalStorage(JournalFileBackend(str(out / "optuna.log")))
    (study,) = optuna.get_all_study_summaries(storage)
    loaded = optuna.load_study(study_name=study.study_name, storage=storage)
    return Counter(TrialState(trial.state).name for trial in loaded.get_trials(deepcopy=False))


def ends(found: list[Record]) -> list[TrialFinished]:
    return [record for record in found if isinstance(record, TrialFinished)]


def run(kills: int, trials: int, longest_s: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    out = Path(tempfile.mkdtemp(prefix="killed-")) / "out"
    lost = repeated = left = killed = 0
    kept: list[TrialFinished] = []
    began = time.monotonic()
    try:
        while killed < kills:
            over, remaining = one_life(request(out, trials), rng.uniform(0.0, longest_s))
            now = ends(records(out))
            lost += now[: len(kept)] != kept
            repeated += max(Counter(record.trial for record in now).values(), default=1) > 1
            left += remaining
            kept = now
            killed += not over
            print(f"kill {killed}: {len(now)} finished, {remaining} processes left", flush=True)
            if over:
                trials += 40  # the study had ended: give it more to do
        one_life(request(out, trials), None)
        recorded = records(out)
        states: dict[int, str] = {}
        for record in recorded:
            if isinstance(record, (TrialStarted, TrialResumed)):
                states[record.trial] = "running"
            elif isinstance(record, TrialPaused):
                states[record.trial] = "paused"
            elif isinstance(record, TrialFinished):
                states[record.trial] = record.state
        lost += ends(recorded)[: len(kept)] != kept
        resumed = sum(isinstance(record, TrialResumed) and record.cut_off for record in recorded)
        return {
            "kills": killed,
            "trials": len(states),
            "states_in_the_end": dict(Counter(states.values())),
            "exported_to_optuna": dict(exported_states(out)),
            "kills_after_which_a_finished_trial_was_missing": lost,
            "kills_after_which_a_trial_was_recorded_twice": repeated,
            "processes_left_behind": left,
            "trials_that_went_on_after_a_kill": resumed,
            "seconds": round(time.monotonic() - began, 1),
        }
    finally:
        shutil.rmtree(out.parent, ignore_errors=True)


def simulated(kills: int, seed: int, out: Path | None, *, keep: bool) -> int:
    result = killed_simulated.run(max(1, kills // len(killed_simulated.STUDIES)), seed)
    if keep:
        write_result(out or SIMULATED, {"simulated": True, "result": result})
    return int(result["studies_that_differ"] > 0)


def alike(options: argparse.Namespace) -> int:
    kinds = killed_alike.KINDS[1:2] if options.smoke else killed_alike.KINDS
    kills, trials = (2, 4) if options.smoke else (options.kills or 10, options.trials or 18)
    longest_s: float = options.longest or 20.0
    settings: dict[str, Any] = {"kills": kills, "trials": trials, "longest_s": longest_s, "seed": options.seed}
    rows = Rows(None if options.smoke else options.out or ALIKE, settings)
    rows.told["result"] = result = killed_alike.run(**settings, rows=rows, kinds=kinds)
    rows.write()
    return int(result["studies_that_differ"] + result["processes_left_behind"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="2 kills; writes nothing")
    parser.add_argument("--simulated", action="store_true", help="kill simulated studies: do they go on alike?")
    parser.add_argument("--alike", action="store_true", help="kill real studies: do they go on alike?")
    parser.add_argument("--kills", type=int, help="100; with --alike 10 of each kind of study")
    parser.add_argument("--trials", type=int, help="300; with --alike 18")
    parser.add_argument("--longest", type=float, help="seconds of a life at most: 8; with --alike 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.alike:
        return ended(lambda: alike(options))
    options.kills, options.trials = options.kills or 100, options.trials or 300
    if options.simulated:
        return simulated(2 if options.smoke else options.kills, options.seed, options.out, keep=not options.smoke)
    kills, trials = (2, 6) if options.smoke else (options.kills, options.trials)
    result = run(kills, trials, options.longest or 8.0, options.seed)
    print(json.dumps(result, indent=2))
    if not options.smoke:
        write_result(options.out or RESULT, {"result": result})
    bad = result["kills_after_which_a_finished_trial_was_missing"] + result["processes_left_behind"]
    bad += result["kills_after_which_a_trial_was_recorded_twice"] + result["states_in_the_end"].get("running", 0)
    bad += result["exported_to_optuna"].get("RUNNING", 0)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
