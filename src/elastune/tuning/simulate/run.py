"""Run a study on a simulated cluster: the same study loop, with a virtual clock and simulated workers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Protocol

from elastune.core.clock import VirtualClock
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.run import Config
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.run import Observe
from elastune.train.program.errors import cause_of
from elastune.train.program.load import Surrogate
from elastune.train.program.space import Space
from elastune.tuning.simulate.cluster import SimulatedCluster, WorkerFailures
from elastune.tuning.simulate.trial_model import TrialModel
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.run import Environment, tune

SAMPLES = 10_000  # of an epoch of a surrogate, which has no samples
BATCH = 100  # of a config without batch_size
MOST_EPOCHS = 100_000
_CACHED_CURVES = 16_384  # more than trials run at once


class DescribedTrialModel(TrialModel, Protocol):
    """A model of trials that describes its source."""

    @property
    def source(self) -> str:
        """The source in words; complete once a study has been simulated."""
        ...


@dataclass(frozen=True)
class Simulation:
    """The result of ``simulate``.

    Attributes:
        study: The simulated study.
        workers: Workers of the simulated cluster.
        seconds: How long the study would have taken.
        real_seconds: How long the simulation took.
        used: The share of the workers' time that trials held, including starts and pauses.
        source: The source of the trials' metrics and times, in words.
    """

    study: Study
    workers: int
    seconds: float
    real_seconds: float
    used: float
    source: str


class SurrogateModel:
    """A model of trials by the user's ``surrogate(config, workers)``, which returns seconds and metrics of each epoch.

    The number of workers changes the seconds of an epoch, never its metrics: these are the metrics for one worker.
    """

    def __init__(
        self, surrogate: Surrogate, name: str = "a surrogate", *, start_s: float = 0.0, resize_pause_s: float = 0.0
    ) -> None:
        self.source = name
        self.start_s = start_s
        self.resize_pause_s = resize_pause_s
        self._surrogate = surrogate
        self._curve = lru_cache(maxsize=_CACHED_CURVES)(self._call_checked)

    def epochs(self, config: Config, requested: int | None) -> int:
        available = len(self._curve(_key(config), 1))
        if requested is not None and requested > available:
            raise UserError(
                f"the surrogate tells of {available} epochs", f"{requested} asked", "ask for fewer with --epochs"
            )
        return available if requested is None else requested

    def samples(self, config: Config) -> int:
        return SAMPLES

    def batch(self, config: Config) -> int:
        size = config.get("batch_size")
        return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else BATCH

    def metrics(self, config: Config, seed: int, epoch: int) -> dict[str, float]:
        return dict(self._curve(_key(config), 1)[epoch - 1][1])

    def epoch_s(self, config: Config, workers: int, epoch: int) -> float:
        return self._curve(_key(config), workers)[epoch - 1][0]

    def _call_checked(self, key: str, workers: int) -> list[tuple[float, Mapping[str, float]]]:
        curve = _call(self._surrogate, json.loads(key), workers)
        fix = "return [(seconds, {'accuracy': ...}), ...], one pair an epoch"
        if not 1 <= len(curve) <= MOST_EPOCHS:
            raise UserError(f"surrogate must tell of 1 to {MOST_EPOCHS} epochs", len(curve), fix)
        for pair in curve:
            if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], Mapping)):
                raise UserError("surrogate must tell seconds and metrics of each epoch", repr(pair), fix)
            if not 0 <= float(pair[0]) < math.inf:
                raise UserError("an epoch's seconds must be 0 or more, and finite", pair[0], fix)
        return [(float(seconds), metrics) for seconds, metrics in curve]


def _call(surrogate: Surrogate, config: Config, workers: int) -> list[tuple[float, Mapping[str, float]]]:
    try:
        return list(islice(surrogate(config, workers), MOST_EPOCHS + 1))
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the user's function raises is the user's to see
        value = cause_of(error, getattr(getattr(surrogate, "__code__", None), "co_filename", ""))
        raise UserError("surrogate(config, workers) must not raise", value, "fix that line") from None


def simulate(
    request: StudyRequest,
    model: DescribedTrialModel,
    *,
    space: Space | None = None,
    losses: WorkerFailures | None = None,
    observe: Observe | None = None,
) -> Simulation:
    """Run ``tune`` with trials of ``model``, on ``request.workers`` simulated workers.

    The folder of the study is like that of a real one, with simulated times: seconds since its beginning, as if it
    began with 1970. The same request gives the same journal. A study that is killed and resumed tries the same trials,
    and its runs go on where they were. Runs that were resized or lose workers go on from their last checkpoints.

    Args:
        request: The study.
        model: How fast trials run, and what they report.
        space: The search space; None: the program's.
        losses: Failures of workers; None: no failures.
        observe: Receives each record of the journal.

    Raises:
        UserError: As ``tune`` does, and for a folder whose trials were trained.
    """
    path = request.out / JOURNAL
    before = read(path) if request.resume and path.exists() else []
    if request.stopping.partition(":")[0] == "pbt":
        rule = "a simulation needs trials whose courses their own settings decide"
        value = f"{request.stopping}: children begin with their parents' weights"
        raise UserError(rule, value, "use asha or hyperband")
    request = replace(request, simulated=True)
    started_s = before[-1].at if before else 0.0
    clock = VirtualClock(now_s=started_s)
    start_s = time.monotonic()
    environment = Environment(clock, background=False, durable=False)
    cluster = SimulatedCluster(request.workers, model, clock, losses)
    with cluster:
        study = tune(request, space=space, cluster=cluster, environment=environment, observe=observe)
        seconds = clock.now() - started_s
        offered_s = request.workers * seconds
        return Simulation(
            study=study,
            workers=request.workers,
            seconds=seconds,
            real_seconds=time.monotonic() - start_s,
            used=cluster.busy_s / offered_s if offered_s > 0 else 0.0,
            source=model.source,
        )


def _key(config: Config) -> str:
    return json.dumps(config, sort_keys=True)
