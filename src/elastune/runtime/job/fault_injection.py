"""Faults on purpose: a pure schedule of faults, and the ``Injector`` that injects them into a running job."""

from __future__ import annotations

import heapq
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, cast

from elastune.core.clock import Clock, SystemClock
from elastune.core.errors import UserError
from elastune.core.journal.records import FaultInjected, Record, Reported
from elastune.core.run import derive
from elastune.parallel.mechanisms.capabilities import meshes_of
from elastune.runtime.clusters.base import ElasticHandle

Kind = Literal[
    "kill",
    "stop",
    "join",
    "leave",
    "notice",
    "reshape",
    "corrupt:gradient",
    "corrupt:gradient-once",
    "corrupt:weights",
    "corrupt:optimizer",
    "corrupt:transfer",
    "corrupt:checkpoint",
]
CORRUPT = "corrupt:"
KINDS: dict[Kind, str] = {
    "kill": "kill -9 of a worker",
    "stop": "a worker is frozen for two heartbeats",
    "join": "one worker more",
    "leave": "one worker fewer",
    "notice": "a worker gets a notice that it will be taken away",
    "reshape": "workers form another mesh, any that the run can have",
    "corrupt:gradient": "from now on a worker computes each slot's gradient with one wrong bit",
    "corrupt:gradient-once": "a worker computes one slot's gradient with one wrong bit",
    "corrupt:weights": "a worker's weights get one wrong bit",
    "corrupt:optimizer": "a worker's optimizer state gets one wrong bit",
    "corrupt:transfer": "the next state that a worker sends to a joiner has one wrong bit",
    "corrupt:checkpoint": "the newest checkpoint's file gets one wrong bit",
}
_NOBODY = "no worker trains yet"
_LAST = "the last healthy worker is spared"
_BOUNDS = "--workers allows no other number"
WHY_NOT: dict[Kind, str] = {
    "kill": _LAST,
    "stop": _LAST,
    "join": _BOUNDS,
    "leave": _BOUNDS,
    "notice": _LAST,
    "reshape": "the run has no other mesh",
    "corrupt:gradient": _NOBODY,
    "corrupt:gradient-once": _NOBODY,
    "corrupt:weights": _NOBODY,
    "corrupt:optimizer": _NOBODY,
    "corrupt:transfer": _NOBODY,
    "corrupt:checkpoint": "there is no checkpoint yet, or it is not on this machine",
}
_WORD = re.compile(r"(corrupt:[a-z-]+|[a-z]+)(?::([0-9.]{1,12})/s|@([0-9.]{1,12})%|@step:([0-9]{1,12}))?")
DEFAULT_RATE_PER_S = 0.05
MOST_PER_S = 1000.0
FROZEN_HEARTBEATS = 2.0
FIX = "such as kill:0.05/s,stop,join,leave or kill@40% or kill@step:120"


@dataclass(frozen=True)
class Planned:
    """One fault, after ``step`` steps or after this ``part`` (0 to 1) of the run."""

    kind: Kind
    step: int | None = None
    part: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}@" + (f"step:{self.step}" if self.part is None else f"{100 * self.part:g}%")


@dataclass(frozen=True)
class Chaos:
    """The faults to inject.

    Attributes:
        rates: The average number of faults in a second, by kind.
        planned: Single faults at a point of the run.

    Example:
        >>> parse_chaos("kill:0.05/s,kill@40%")
        Chaos(rates={'kill': 0.05}, planned=(Planned(kind='kill', step=None, part=0.4),))
    """

    rates: dict[Kind, float] = field(default_factory=dict)
    planned: tuple[Planned, ...] = ()


def parse_chaos(text: str) -> Chaos:
    """Read a text such as "kill:0.05/s,stop,leave,kill@40%,join@step:120". Raises ``UserError`` for another text."""
    rates: dict[Kind, float] = {}
    planned: list[Planned] = []
    for word in (part.strip() for part in text.split(",")):
        match_ = _WORD.fullmatch(word)
        if match_ is None or match_[1] not in KINDS:
            raise UserError(f"--chaos must be a list of {', '.join(KINDS)}", repr(word), FIX)
        kind = cast(Kind, match_[1])
        if match_[4] is not None:
            planned.append(Planned(kind, step=int(match_[4])))
        elif match_[3] is not None:
            planned.append(Planned(kind, part=_number(match_[3], word, 100.0) / 100))
        elif kind in rates:
            raise UserError("--chaos may name the rate of a kind once", repr(word), "remove the others")
        else:
            rates[kind] = DEFAULT_RATE_PER_S if match_[2] is None else _number(match_[2], word, MOST_PER_S)
    return Chaos(rates, tuple(planned))


def _number(text: str, word: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= most:
        raise UserError(f"a number of --chaos must be above 0 and at most {most:g}", repr(word), FIX)
    return value


def arrivals(chaos: Chaos, seed: int) -> Iterator[tuple[float, Kind]]:
    """Yield the second since the start and the kind of each fault by a rate: Poisson processes without end."""

    def of(kind: Kind, rate_per_s: float) -> Iterator[tuple[float, Kind]]:
        dice = random.Random(derive(seed, "chaos", kind))
        at_s = 0.0
        while True:
            at_s += dice.expovariate(rate_per_s)
            yield at_s, kind

    return heapq.merge(*(of(kind, rate) for kind, rate in chaos.rates.items()))


class Injector:
    """Injects faults into a run. Call ``act`` repeatedly, at the latest after ``wait_s``.

    The last healthy member is spared: without it the run would begin again from its checkpoint.

    Args:
        chaos: The faults.
        seed: The seed of the rates and victims.
        epochs: The number of epochs, if it is known: it shows which part of the run is done, as ``max_steps`` does.
        max_steps: The greatest number of steps, if it is known.
        clock: The clock.
        send_signal: Sends a signal to a process.
    """

    def __init__(
        self,
        chaos: Chaos,
        seed: int,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        clock: Clock | None = None,
        send_signal: Callable[[int, int], None] = os.kill,
    ) -> None:
        self._clock = clock or SystemClock()
        self._arrivals = arrivals(chaos, seed)
        self._next = next(self._arrivals, None)
        self._planned = list(chaos.planned)
        self._dice = random.Random(derive(seed, "chaos", "victims"))
        self._epochs = epochs
        self._max_steps = max_steps
        self._send_signal = send_signal
        self._began: float | None = None
        self._frozen: list[tuple[float, int, int]] = []  # when the worker goes on, the worker, its process
        self._struck: set[int] = set()
        self._steps_per_epoch: float | None = None
        self._target: int | None = None
        self._rates = dict(chaos.rates)
        self._done: set[Kind] = set()  # kinds that came by a rate
        self._spared: dict[str, str] = {}  # due faults that were not possible, and why

    @property
    def not_injected(self) -> dict[str, str]:
        """The requested faults that have not happened, by their names on the command line, and why."""
        reasons = {str(fault): "the run ended before its time" for fault in self._planned}
        for kind, rate_per_s in self._rates.items():
            if kind not in self._done and kind not in self._spared:
                reasons[kind] = f"none fell due at {rate_per_s:g} a second"
        return {**reasons, **{name: why for name, why in self._spared.items() if name not in self._done}}

    @property
    def planned_missing(self) -> bool:
        """Whether a fault at a point of the run has not happened. (Faults by a rate need not happen.)"""
        return bool(self._planned) or any("@" in name for name in self._spared)

    def observe(self, record: Record) -> None:
        """Read the length of an epoch from a report."""
        if isinstance(record, Reported) and record.epoch:
            self._steps_per_epoch = record.step / record.epoch

    def wait_s(self) -> float:
        """Seconds until the next call of ``act``: at most 0.1, so that it sees each step."""
        return max(0.0, min(0.1, self._until(), *(at - self._clock.now() for at, _, _ in self._frozen)))

    def act(self, handle: ElasticHandle) -> list[FaultInjected]:
        """Inject the faults that are due, and return them."""
        if self._began is None:
            self._began = self._clock.now()
        self._thaw(handle)
        done: list[FaultInjected | None] = []
        while self._next is not None and self._until() <= 0:
            kind = self._next[1]
            self._next = next(self._arrivals, None)
            done.append(self._do(kind, handle))
            if done[-1] is not None:
                self._done.add(kind)
            else:
                self._spared[kind] = WHY_NOT[kind]
        for planned in [fault for fault in self._planned if self._reached(fault, handle.step)]:
            self._planned.remove(planned)
            done.append(self._do(planned.kind, handle))
            if done[-1] is None:
                self._spared[str(planned)] = WHY_NOT[planned.kind]
        return [fault for fault in done if fault is not None]

    def _until(self) -> float:
        if self._next is None or self._began is None:
            return 0.1
        return self._began + self._next[0] - self._clock.now()

    def _reached(self, fault: Planned, step: int) -> bool:
        if fault.step is not None:
            return step >= fault.step
        total = self._max_steps
        if self._epochs and self._steps_per_epoch:
            whole = self._epochs * self._steps_per_epoch
            total = round(whole) if total is None else min(total, round(whole))
        return total is not None and fault.part is not None and step >= fault.part * total

    def _do(self, kind: Kind, handle: ElasticHandle) -> FaultInjected | None:
        if kind == "reshape":
            return self._reshape(handle)
        if kind == "corrupt:checkpoint":
            return self._corrupt_checkpoint(handle)
        if kind in ("join", "leave"):
            return self._resize(kind, handle)
        if kind.startswith(CORRUPT):
            return self._corrupt(kind, handle)
        pids = handle.pids
        standing = set(pids) - self._struck
        healthy = standing.intersection(handle.members)
        victims = healthy if kind == "notice" else standing
        if len(healthy) < 2:
            victims = victims - healthy
        if not victims:
            return None
        worker = self._dice.choice(sorted(victims))
        self._struck.add(worker)
        if kind == "notice":
            self._signal(pids[worker], signal.SIGTERM)
        elif kind == "kill":
            handle.kill_worker(worker)
        else:
            self._signal(pids[worker], signal.SIGSTOP)
            frozen_s = FROZEN_HEARTBEATS * handle.spec.elastic.heartbeat_s
            self._frozen.append((self._clock.now() + frozen_s, worker, pids[worker]))
        return FaultInjected(kind, worker)

    def _corrupt(self, kind: Kind, handle: ElasticHandle) -> FaultInjected | None:
        members = sorted(set(handle.members) - self._struck)
        if not members:
            return None
        worker, what = self._dice.choice(members), kind.removeprefix(CORRUPT)
        once = what != "gradient"
        handle.corrupt(worker, what.removesuffix("-once"), once=once, seed=self._dice.getrandbits(32))
        return FaultInjected(kind, worker)

    def _corrupt_checkpoint(self, handle: ElasticHandle) -> FaultInjected | None:
        """Flip a bit of the newest checkpoint's file. It may be gone the next moment."""
        with suppress(OSError, ValueError):
            files = handle.spec.out.glob("checkpoints/step-*/*.safetensors")
            newest = max(files, key=lambda path: path.stat().st_mtime)
            with newest.open("r+b") as file:
                at = self._dice.randrange(newest.stat().st_size // 2, newest.stat().st_size)
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << self._dice.randrange(8)]))
            return FaultInjected("corrupt:checkpoint")
        return None

    def _resize(self, kind: Kind, handle: ElasticHandle) -> FaultInjected | None:
        workers, elastic = handle.spec.execution.workers, handle.spec.elastic
        target = (workers if self._target is None else self._target) + (1 if kind == "join" else -1)
        if not min(elastic.low, workers) <= target <= max(workers, elastic.high or workers):
            return None
        self._target = target
        handle.resize(target, f"chaos: {kind}")
        return FaultInjected(kind)

    def _reshape(self, handle: ElasticHandle) -> FaultInjected | None:
        execution, elastic = handle.spec.execution, handle.spec.elastic
        possible = meshes_of(execution).meshes(min(elastic.low, execution.workers), handle.spec.most_workers)
        mesh = self._dice.choice(possible)
        self._target = mesh.workers
        handle.reshape(mesh, "chaos: reshape")
        return FaultInjected("reshape")

    def _thaw(self, handle: ElasticHandle) -> None:
        now = self._clock.now()
        for _, worker, process in [frozen for frozen in self._frozen if frozen[0] <= now]:
            if handle.pids.get(worker) == process:  # else it was ended meanwhile
                self._signal(process, signal.SIGCONT)
        self._frozen = [frozen for frozen in self._frozen if frozen[0] > now]

    def _signal(self, process: int, number: int) -> None:
        with suppress(ProcessLookupError):
            self._send_signal(process, number)
