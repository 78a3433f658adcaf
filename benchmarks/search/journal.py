"""What does it cost to record a trial so that no crash loses it?

One trial: its start, three reports, its end, which is to be on the disk. Measured per trial, in one run and on one
disk: elastune's journal, and Optuna's own storages (journal file, SQLite), where a report is a user attribute, since
Optuna refuses reports with several objectives.

    python -m benchmarks.search.journal            # 10,000 trials; 1,000 in Optuna's; writes results/journal.json
    python -m benchmarks.search.journal --smoke    # 200 and 20, writes nothing
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from benchmarks.common.result_file import write_result
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.records import Reported, RunFinished, TrialFinished, TrialReported, TrialStarted
from elastune.train.program import space
from elastune.train.program.space import Sample

RESULT = Path(__file__).parents[1] / "results" / "journal.json"
DISTRIBUTIONS: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(1e-4, 1.0, log=True),
    "momentum": FloatDistribution(0.0, 0.99),
    "layers": IntDistribution(1, 8),
}
REPORTS = 3


def sample(number: int) -> Sample:
    params = {"lr": 1e-3 + number * 1e-6, "momentum": 0.9, "layers": 1 + number % 8}
    return Sample(params, dict(DISTRIBUTIONS), dict(params))


def times_s(one: Callable[[int], None], count: int) -> list[float]:
    results = []
    for number in range(count):
        begun = time.perf_counter()
        one(number)
        results.append(time.perf_counter() - begun)
    return results


def ours(folder: Path, count: int) -> tuple[list[float], float]:
    """Seconds of each trial, and those of reading all of it back."""
    path = folder / "journal.jsonl"
    texts = space.to_json(DISTRIBUTIONS)
    with JournalWriter(path) as journal:

        def one(number: int) -> None:
            chosen = sample(number)
            journal.write(TrialStarted(number, chosen.values, {"workers": 1}, 0, "search", chosen.params, texts))
            for epoch in range(1, REPORTS + 1):
                report = Reported(epoch, epoch * 10, epoch * 1000, epoch * 1.0, {"accuracy": 0.9}, epochs=REPORTS)
                journal.write(TrialReported(number, report, 1.0))
            values = {"accuracy": 0.9, "seconds": 3.0 + number}
            run = RunFinished("0" * 64, 1, 30, 3000, 3.0, {"accuracy": 0.9})
            journal.write(TrialFinished(number, "complete", values, values, {}, 3.0, run=run), durable=True)

        result = times_s(one, count)
    begun = time.perf_counter()
    assert len(read(path)) == count * (REPORTS + 2)
    return result, time.perf_counter() - begun


def optunas(storage: BaseStorage, count: int) -> list[float]:
    study = optuna.create_study(
        storage=storage, directions=["maximize", "minimize"], sampler=RandomSampler(seed=0), study_name="one"
    )

    def one(number: int) -> None:
        trial = study.ask(DISTRIBUTIONS)
        for epoch in range(REPORTS):
            trial.set_user_attr(f"accuracy at {epoch}", 0.9)
        study.tell(trial, [0.9, 3.0 + number])

    return times_s(one, count)


def told(found: list[float]) -> dict[str, Any]:
    tail = found[-max(1, len(found) // 10) :]
    quartiles = statistics.quantiles(found, n=4)
    return {
        "trials": len(found),
        "median_ms": round(1e3 * statistics.median(found), 3),
        "quartiles_ms": [round(1e3 * quartiles[0], 3), round(1e3 * quartiles[2], 3)],
        "median_of_the_last_tenth_ms": round(1e3 * statistics.median(tail), 3),
    }


def run(count: int, others: int) -> dict[str, Any]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="journal-") as name:
        folder = Path(name)
        alone, reading_s = ours(folder, count)
        results["elastune's journal"] = {**told(alone), "read_back_s": round(reading_s, 2)}
        file = JournalStorage(JournalFileBackend(str(folder / "theirs.log")))
        results["Optuna's journal file"] = told(optunas(file, others))
        results["Optuna's SQLite"] = told(optunas(RDBStorage(f"sqlite:///{folder / 'theirs.db'}"), others))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="few trials; writes nothing")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result = run(200, 20) if options.smoke else run(10_000, 1_000)
    for name, row in result.items():
        print(f"{name:32} {row['median_ms']:8.3f} ms a trial, {row['quartiles_ms']}, {row['trials']} trials")
    if not options.smoke:
        write_result(options.out, {"results": result})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
