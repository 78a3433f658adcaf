"""Run a study on a simulated cluster: the driver of real ones, with another clock and other workers."""

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
from elastune.tune.simulate.cluster import SimulatedCluster, WorkerFailures
from elastune.tune.simulate.trial_model import TrialModel
from elastune.tune.study.request import StudyRequest
from elastune.tune.study.results import Study
from elastune.tune.study.run import Environment, tune

SAMPLES = 10_000  # of an epoch of a surrogate, which tells of none
BATCH = 100  # where its config has no batch_size
MOST_EPOCHS = 100_000
_CACHED_CURVES = 16_384  # remembered: more than trials run at once


class DescribedTrialModel(TrialModel, Protocol):
    """A model of trials that says what it rests on."""

    @property
    def source(self) -> str:
        """In words, once a study has been simulated."""
        ...


@dataclass(frozen=True)
class Simulation:
    """A simulated ``study``: how long it would have taken on ``workers`` workers, and how long it took to reckon.

    ``used``: the part of the workers' time that trials had, with starting and pauses. ``source``: what the trials'
    courses and times rest on.
    """

    study: Study
    workers: int
    seconds: float
    real_seconds: float
    used: float
    source: str


class SurrogateModel:
    """Trials as the user's ``surrogate(config, workers)`` tells of them: seconds and metrics of each epoch.

    Workers change how long an epoch takes, never what it brings: metrics are those told for one worker.
    """

    def __init__(
        self, surrogate: Surrogate, name: str = "a surrogate", *, start_s: float = 0.0, resize_pause_s: float = 0.0
    ) -> None:
        self.source = name
        self.start_s = start_s
        self.resize_pause_s = resize_pause_s
        self._surrogate = surrogate
        self._course = lru_cache(maxsize=_CACHED_CURVES)(self._ask)

    def epochs(self, config: Config, asked: int | None) -> int:
        told = len(self._course(_key(config), 1))
        if asked is not None and asked > told:
            raise UserError(f"the surrogate tells of {told} epochs", f"{asked} asked", "ask for fewer with --epochs")
        return told if asked is None else asked

    def samples(self, config: Config) -> int:
        return SAMPLES

    def batch(self, config: Config) -> int:
        size = config.get("batch_size")
        return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else BATCH

    def metrics(self, config: Config, seed: int, epoch: int) -> dict[str, float]:
        return dict(self._course(_key(config), 1)[epoch - 1][1])

    def epoch_s(self, config: Config, workers: int, epoch: int) -> float:
        return self._course(_key(config), workers)[epoch - 1][0]

    def _ask(self, key: str, workers: int) -> list[tuple[float, Mapping[str, float]]]:
        told = _told(self._surrogate, json.loads(key), workers)
        fix = "return [(seconds, {'accuracy': ...}), ...], one pair an epoch"
        if not 1 <= len(told) <= MOST_EPOCHS:
            raise UserError(f"surrogate must tell of 1 to {MOST_EPOCHS} epochs", len(told), fix)
        for pair in told:
            if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], Mapping)):
                raise UserError("surrogate must tell seconds and metrics of each epoch", repr(pair), fix)
            if not 0 <= float(pair[0]) < math.inf:
                raise UserError("an epoch's seconds must be 0 or more, and finite", pair[0], fix)
        return [(float(seconds), metrics) for seconds, metrics in told]


def _told(surrogate: Surrogate, config: Config, workers: int) -> list[tuple[float, Mapping[str, float]]]:
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
    """What ``tune`` would find with trials that go as ``model`` says, on ``request.workers`` simulated workers.

    The study's folder is that of a real one, with simulated times: seconds since its beginning, as if that had been
    at the start of 1970. The same request gives the same journal; one that is killed and resumed tries the same trials,
    as its runs go on where they were (not those that are resized, or lose workers: they go on from their last
    checkpoints). Raises ``UserError`` as ``tune`` does, and for a
    folder whose trials were trained.
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
    begun = time.monotonic()
    around = Environment(clock, background=False, durable=False)
    cluster = SimulatedCluster(request.workers, model, clock, losses)
    with cluster:
        study = tune(request, space=space, cluster=cluster, environment=around, observe=observe)
        seconds = clock.now() - started_s
        offered_s = request.workers * seconds
        return Simulation(
            study=study,
            workers=request.workers,
            seconds=seconds,
            real_seconds=time.monotonic() - begun,
            used=cluster.busy_s / offered_s if offered_s > 0 else 0.0,
            source=model.source,
        )


def _key(config: Config) -> str:
    return json.dumps(config, sort_keys=True)
