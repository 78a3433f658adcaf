"""Tune a program: check the request, run the driver on a cluster, hand out what was found."""

from __future__ import annotations

from contextlib import ExitStack

from elastune.cluster.base import Cluster
from elastune.cluster.local import LocalCluster
from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError
from elastune.job.output_dir import open_out
from elastune.job.run import Observe
from elastune.job.signals import Interrupts
from elastune.journal.reader import read
from elastune.journal.records import Record, StudyFinished, TrialFinished, TrialPaused
from elastune.journal.writer import JournalWriter
from elastune.search.space.space import Space
from elastune.study.loop import Driver
from elastune.study.request import StudyRequest
from elastune.study.results.study import Study
from elastune.study.validate import check, check_same_study
from elastune.study.warm_start import earlier_studies, take_over

LASTING = (TrialFinished, TrialPaused, StudyFinished)  # what must be on the disk before anything rests on it


def tune(
    request: StudyRequest,
    *,
    space: Space | None = None,
    cluster: Cluster | None = None,
    observe: Observe | None = None,
    clock: Clock | None = None,
) -> Study:
    """Search until the budget is spent, the space is exhausted or Ctrl-C; returns what was found.

    Killed at any time, a study resumes with ``request.resume``: finished trials count, unfinished ones go on from their
    last checkpoints, or else from their beginnings. ``clock``: another one than the system's, for a simulated cluster.
    """
    plan = check(request, space)
    path = open_out(request.out, request.resume)
    before = read(path) if path.exists() else []
    check_same_study(plan.settings, before, path)
    earlier = earlier_studies(request, before)
    if cluster is not None and cluster.capacity < request.workers:
        rule = "a study's workers must fit into its cluster"
        raise UserError(rule, f"{request.workers} workers, room for {cluster.capacity}", "ask for fewer workers")
    time = clock or SystemClock()
    with JournalWriter(path, wall=time.wall) as journal, Interrupts() as interrupts, ExitStack() as stack:
        place = cluster or stack.enter_context(LocalCluster(capacity=request.workers))

        def keep(record: Record) -> None:
            journal.write(record, durable=clock is None and isinstance(record, LASTING))
            if observe is not None:
                observe(record)

        driver = Driver(plan, place, keep, time, journal.settle)
        stack.callback(driver.abandon)  # whatever happens: a cluster that is not ours lives on, its trials must not
        driver.replay(before)
        for taken in take_over(plan, earlier, place, time, lambda: interrupts.count):
            driver.learn(taken)
        driver.run(lambda: interrupts.count)
    return Study.load(request.out)
