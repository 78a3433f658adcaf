"""Entry points of tiny workers, for the tests of clusters. ``spec.config`` holds their parameters."""

from __future__ import annotations

import os
import sys
import time

from elastune.core.journal.records import Reported, RunFinished
from elastune.core.run import Place, RunSpec
from elastune.elastic.worker.client import CoordinatorClient

FINISHED = RunFinished(sha256="", workers=1, steps=0, samples=0, seconds=0.0, metrics={})
"""The last record of a worker that ends well."""


def report_of(step: int, by: int = 0, **metrics: float) -> Reported:
    """A record to send, unlike those of other workers."""
    return Reported(epoch=0, step=step, samples=0, seconds=0.0, metrics=metrics, nth=by)


def speak(spec: RunSpec, place: Place, client: CoordinatorClient) -> int:
    """Send ``config["count"]`` records, print, end with ``config["code"]``."""
    for step in range(int(str(spec.config.get("count", 1)))):
        client.report(report_of(step, place.rank, rank=place.rank, world=place.world, pid=os.getpid()))
    print(f"worker {place.rank} has spoken")
    code = int(str(spec.config.get("code", 0)))
    if code == 0:
        client.report(FINISHED)
    return code


def fail(spec: RunSpec, _place: Place, client: CoordinatorClient) -> int:
    """Send one record and raise."""
    client.report(report_of(0))
    raise ArithmeticError(f"seed {spec.seed} was unlucky")


def leave(_spec: RunSpec, _place: Place, _client: CoordinatorClient) -> int:
    """Leave with a message, as a command line tool does."""
    sys.exit("no more")


def work_until_stopped(spec: RunSpec, place: Place, client: CoordinatorClient) -> int:
    """Say that it runs, wait to be stopped, say so, end with code 3 (or 4 after a minute)."""
    client.report(report_of(0, place.rank, rank=place.rank, pid=os.getpid()))
    deadline = time.monotonic() + 60
    while not client.stop_requested():
        if time.monotonic() > deadline:
            return 4
        time.sleep(0.002)
    client.report(report_of(1, place.rank, seed=spec.seed))
    return 3
