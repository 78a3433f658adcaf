"""What the dashboard costs: first paint, CPU while nothing happens and at 50 records a second, memory.

Beside it stands optuna-dashboard, in the same run, on the same study as ``elastune export --optuna`` writes it. The
studies are made up: each trial has six reports. A browser (Debian's chromium) looks at each server; CPU time and memory
are those of the server's process.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.result_file import write_result

from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import (
    Entry,
    ProposalAsked,
    Record,
    Reported,
    StudyStarted,
    TrialFinished,
    TrialReported,
    TrialStarted,
    encode_entry,
)
from elastune.report.export import to_optuna

CHROMIUM = "/usr/bin/chromium"
REPORTS = 6
RECORDS = REPORTS + 3  # of a trial
PER_S = 50  # records
SETTLED_S = 0.2  # of CPU in two seconds: nothing is read any more
TICKS = os.sysconf("SC_CLK_TCK")
FLOAT = '{"name":"FloatDistribution","attributes":{"step":null,"low":0.0,"high":1.0,"log":false}}'


def trial(number: int, rng: random.Random) -> Iterator[Record]:
    """The records of a trial that nothing trained."""
    params = {name: rng.random() for name in ("lr", "momentum", "decay", "dropout")}
    yield ProposalAsked(number)
    yield TrialStarted(number, params, {"workers": 1}, 0, params=params, distributions=dict.fromkeys(params, FLOAT))
    accuracy = 0.0
    for epoch in range(1, REPORTS + 1):
        accuracy = (1.0 - math.exp(-epoch * params["lr"])) * rng.uniform(0.8, 1.0)
        yield TrialReported(number, Reported(epoch, epoch, epoch, float(epoch), {"accuracy": accuracy}, epochs=REPORTS))
    values = {"accuracy": accuracy, "seconds": REPORTS * rng.uniform(0.5, 2.0)}
    yield TrialFinished(number, "complete", values, values, seconds=values["seconds"], worker_seconds=values["seconds"])


def make_study(out: Path, trials: int) -> None:
    """Write the journal of a study of so many trials."""
    rng, at = random.Random(trials), 1.7e9
    asked = {"kind": "tune", "program": "train.py", "objectives": {"accuracy": "max", "seconds": "min"}, "workers": 8}
    records: list[Record] = [StudyStarted(asked)]
    for number in range(trials):
        records += trial(number, rng)
    out.mkdir(parents=True)
    with (out / "journal.jsonl").open("wb") as file:
        for i, record in enumerate(records):
            file.write(encode_entry(Entry(at + i / PER_S, record)) + b"\n")


# --- servers ---


@contextmanager
def elastune_server(out: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the pid, the address to enter by, and the address of the study."""
    command = [sys.executable, "-m", "elastune", "dashboard", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = process.stderr.readline().partition("dashboard: ")[2].strip()
        yield process.pid, address, f"{address.partition('?')[0]}#/f/{out.name}"
    finally:
        _end(process)


@contextmanager
def optuna_server(storage: Path) -> Iterator[tuple[int, str, str]]:
    """The same for optuna-dashboard."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = ["optuna-dashboard", str(storage), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.1)
        base = f"http://127.0.0.1:{port}"
        yield process.pid, f"{base}/dashboard", f"{base}/dashboard/studies/0"
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    """The CPU time of a process by now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mb(pid: int) -> float:
    """The memory of a process."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


# --- what is measured ---

SHOWN = {
    "elastune": "document.querySelectorAll('#trials tbody tr').length > 0",
    "optuna-dashboard": "document.querySelectorAll('.js-plotly-plot .main-svg').length > 0",
}
DRAWN = "document.querySelectorAll('.js-plotly-plot .point').length > 0"


def watched(name: str, browser: Any, server: tuple[int, str, str], seconds: float, add: Callable[[float], None]) -> Any:
    """Look at a study: when something of it is shown, when points are drawn, and what the server uses."""
    pid, enter, address = server
    page = browser.new_page()
    page.set_default_timeout(180_000)
    page.goto(enter)
    page.goto("about:blank")  # else a page that shows all studies would only change what it shows
    before, begun = cpu_s(pid), time.monotonic()
    page.goto(address)
    _wait(page, SHOWN[name])
    shown = time.monotonic() - begun
    _wait(page, DRAWN)
    drawn = time.monotonic() - begun
    _settle(pid)
    read, begun, idle = cpu_s(pid), time.monotonic(), cpu_s(pid)
    time.sleep(seconds)
    idle_ms = 1e3 * (cpu_s(pid) - idle) / (time.monotonic() - begun)
    begun, busy = time.monotonic(), cpu_s(pid)
    add(seconds)
    busy_ms = 1e3 * (cpu_s(pid) - busy) / (time.monotonic() - begun)
    found = {
        "shown_s": round(shown, 2),
        "points_drawn_s": round(drawn, 2),
        "cpu_to_read_s": round(read - before, 2),
        "idle_ms_per_s": round(idle_ms, 1),
        "busy_ms_per_s": round(busy_ms, 1),
        "memory_mb": round(memory_mb(pid), 1),
    }
    page.close()
    return found


def _settle(pid: int) -> None:
    """Wait until all of a long journal is read: a busy machine takes long."""
    until, before = time.monotonic() + 120.0, -1.0
    time.sleep(10.0)
    while time.monotonic() < until and (now := cpu_s(pid)) - before > SETTLED_S:
        before = now
        time.sleep(2.0)


def _wait(page: Any, holds: str) -> None:
    """Wait until an expression holds in the page. Playwright's own way needs ``eval``, which the page forbids."""
    until = time.monotonic() + 300.0
    while not page.evaluate(holds):
        assert time.monotonic() < until, holds
        time.sleep(0.02)


def adder(out: Path, trials: int) -> Callable[[float], None]:
    """Returns what writes ``PER_S`` records a second into the journal."""

    def add(seconds: float) -> None:
        rng, until, number = random.Random(1), time.monotonic() + seconds, trials
        with JournalWriter(out / "journal.jsonl") as journal:
            while time.monotonic() < until:
                for record in trial(number, rng):
                    journal.write(record)
                    time.sleep(1.0 / PER_S)
                number += 1

    return add


def optuna_adder(storage: Path) -> Callable[[float], None]:
    """Returns what adds as many trials a second to Optuna's file, by another process' worth of Optuna."""
    import optuna
    from optuna.distributions import FloatDistribution
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def add(seconds: float) -> None:
        (name,) = optuna.get_all_study_names(kept)
        study = optuna.load_study(study_name=name, storage=kept)
        rng, until = random.Random(1), time.monotonic() + seconds
        while time.monotonic() < until:
            params = {name: rng.random() for name in ("lr", "momentum", "decay", "dropout")}
            spaces = dict.fromkeys(params, FloatDistribution(0.0, 1.0))
            study.add_trial(optuna.create_trial(params=params, distributions=spaces, values=[rng.random(), 5.0]))
            time.sleep(RECORDS / PER_S)

    kept = JournalStorage(JournalFileBackend(str(storage)))
    return add


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--rounds", type=int, default=3, help="of both servers in turn: medians are given")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--smoke", action="store_true", help="a small study, for a second")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/dashboard.json"))
    options = parser.parse_args()
    if options.smoke:
        options.trials, options.seconds, options.rounds = [30], 1.0, 1
    from playwright.sync_api import sync_playwright

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for trials in options.trials:
            found: dict[str, list[dict[str, float]]] = {"elastune": [], "optuna-dashboard": []}
            for round_ in range(options.rounds):
                out = Path(folder) / f"study-{trials}-{round_}"  # a round adds trials: each has its own study
                make_study(out, trials)
                storage = Path(folder) / f"{trials}-{round_}.log"
                storage.write_bytes(to_optuna(out))
                with elastune_server(out) as server:
                    add = adder(out, trials)
                    found["elastune"].append(watched("elastune", browser, server, options.seconds, add))
                with optuna_server(storage) as server:
                    add = optuna_adder(storage)
                    found["optuna-dashboard"].append(watched("optuna-dashboard", browser, server, options.seconds, add))
                print({name: seen[-1] for name, seen in found.items()}, flush=True)
            for name, seen in found.items():
                middle = {key: round(statistics.median(each[key] for each in seen), 2) for key in seen[0]}
                rows.append({"server": name, "trials": trials, **middle})
                print(rows[-1], flush=True)
        browser.close()
    write_result(options.out, {"records_per_s": PER_S, "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
