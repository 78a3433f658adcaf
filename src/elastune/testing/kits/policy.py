"""For tests of policies: a hook called by hand, many workers in one process, a simulated world, and what must hold.

class TestMine(PolicyKit):
    def make(self) -> Policy: ...
"""

from __future__ import annotations

import itertools
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import pytest

from elastune.adapt.monitors.base import Reading, WorkerTimes
from elastune.adapt.monitors.performance import Performance
from elastune.adapt.policies.base import Hook, Limits, Policy, Run, hooks_of
from elastune.adapt.policies.collectives import Future, Op, Submission, Value, pack, resolve
from elastune.adapt.policies.host import Failure, PolicyEntry, PolicyHost, Proposal, begin, from_json, run_hook, to_json
from elastune.core.decisions import Decision, Signal, Snapshot

LIMITS = Limits(low=1, high=8, longest_batch=10_000)
EPOCH_STEPS = 50
Measured = float | tuple[float, float] | Signal  # a value; with its standard error


# --- one hook ---
def make_snapshot(signals: Mapping[str, Measured] | None = None, **changed: Any) -> Snapshot:
    """Return a snapshot in the middle of a training; ``changed`` holds fields of ``Snapshot``."""
    values = {name: _signal(value) for name, value in (signals or {}).items()}
    fields = {"step": 100, "epoch": 2, "samples": 6400, "seconds": 10.0, "workers": 2, "batch_size": 64, "lr": 0.1}
    fields |= {"lr_at_start": 0.1, "batch_at_start": 64}
    return Snapshot(**{**fields, **changed}, signals=values)


def _signal(value: Measured) -> Signal:
    if isinstance(value, Signal):
        return value
    return Signal(*value) if isinstance(value, tuple) else Signal(value)


class Echo:
    """Answers collectives as if every worker had given the same value."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def submit(self, op: Op, value: Value, root: int, name: str | None) -> Future[Any]:
        submission = Submission("", name or "", op, value, root)
        return Future(resolve([pack([submission])] * self.workers).done[submission.name])


def fake_run(
    signals: Mapping[str, Measured] | None = None,
    *,
    limits: Limits = LIMITS,
    rank: int = 0,
    known: Sequence[str] | None = None,
    **changed: Any,
) -> Run:
    """Return a run to call a hook with. Collectives answer as if all workers gave the same value.

    Args:
        signals: Measured signals, by name.
        limits: The bounds of the run.
        rank: This worker's rank.
        known: The signals that monitors give; None: any.
        changed: As for ``make_snapshot``.
    """
    snapshot = make_snapshot(signals, **changed)
    return Run(snapshot, limits, rank, Echo(snapshot.workers), known)


class PolicyDriver:
    """A policy whose hooks are called by hand, one after another, under ``guards``."""

    def __init__(self, policy: Policy | PolicyEntry) -> None:
        self.named = policy if isinstance(policy, PolicyEntry) else PolicyEntry("it", policy)
        self.policy_state = begin(self.named)

    @property
    def state(self) -> Any:
        """The state that the policy keeps."""
        return self.policy_state.state

    def decide(self, hook: Hook = "after_step", **run: Any) -> Decision:
        """Return what ``hook`` asks for with ``fake_run(**run)``, as far as guards let it through."""
        self.policy_state, decision = run_hook(self.named, self.policy_state, hook, fake_run(**run))
        return decision

    def travel_to(self, other: PolicyDriver) -> None:
        """Let ``other`` go on from here, by JSON."""
        other.policy_state = from_json(other.named, json.loads(json.dumps(to_json(self.policy_state))))


def decide(policy: Policy | PolicyEntry, hook: Hook = "after_step", **run: Any) -> Decision:
    """Return what ``hook`` asks for at its first call, with ``fake_run(**run)``."""
    return PolicyDriver(policy).decide(hook, **run)


# --- several workers ---
def moved(snapshot: Snapshot, decision: Decision) -> Snapshot:
    """Return ``snapshot`` after ``decision`` was applied, without a ramp."""
    lr = (snapshot.lr if decision.lr is None else decision.lr) * (decision.lr_factor or 1.0)
    return replace(
        snapshot,
        lr=lr,
        workers=decision.workers or snapshot.workers,
        batch_size=decision.batch_size or snapshot.batch_size,
        micro_batch=decision.micro_batch or snapshot.micro_batch,
        sync=decision.sync or snapshot.sync,
    )


@dataclass(frozen=True)
class VoteOutcome:
    """The outcome of what workers asked for, at the boundary after ``step`` steps."""

    step: int
    proposals: tuple[Proposal, ...]  # rank 0's
    outcome: Literal["applied", "disagreed"]


class SimulatedWorkers:
    """Workers in one process that run the policies of ``make(rank)``. They train nothing.

    Decisions travel through a step as in training: what a hook asks for after step s takes effect after step s + 1, if
    all workers ask for the same. When workers change, waiting hooks begin again, and a joiner takes over rank 0's
    state, as JSON.
    """

    def __init__(
        self,
        workers: int,
        make: Callable[[int], Sequence[PolicyEntry]],
        *,
        limits: Limits = LIMITS,
        snapshot: Snapshot | None = None,
    ) -> None:
        self._make = make
        self.limits = limits
        self.snapshot = replace(snapshot or make_snapshot(step=0, epoch=0, samples=0, seconds=0.0), workers=workers)
        self.hosts = [PolicyHost(make(rank)) for rank in range(workers)]
        self.verdicts: list[VoteOutcome] = []
        self.exchanges = 0

    @property
    def decisions(self) -> list[tuple[int, Decision]]:
        """The decisions that were applied, each with its step."""
        return [(v.step, p.decision) for v in self.verdicts if v.outcome == "applied" for p in v.proposals]

    @property
    def waiting(self) -> bool:
        return any(host.waiting for host in self.hosts)

    def failures(self) -> list[tuple[int, Failure]]:
        """Return the failures since the last call, each with its rank."""
        return [(rank, failure) for rank, host in enumerate(self.hosts) for failure in host.drain_failures()]

    def call(self, hook: Hook) -> None:
        """Call one hook on every worker."""
        for rank, host in enumerate(self.hosts):
            host.call(hook, self.snapshot, self.limits, rank)

    def exchange(self) -> None:
        """Make one exchange, where a worker waits for it."""
        if self.waiting:
            self.exchanges += 1
            rows = [host.offer() for host in self.hosts]
            for rank, host in enumerate(self.hosts):
                host.deliver(rows, rank)

    def step(self, signals: Mapping[str, Measured] | None = None) -> None:
        """Make a training step that measures ``signals``, with the hooks around it."""
        self.call("before_step")
        votes = [host.drain_proposals() for host in self.hosts]
        now = self.snapshot
        values = dict(now.signals) if signals is None else {name: _signal(value) for name, value in signals.items()}
        samples = now.samples + now.batch_size
        self.snapshot = replace(now, step=now.step + 1, samples=samples, seconds=now.seconds + 0.1, signals=values)
        self._settle(votes)
        self.exchange()
        self.call("after_step")

    def train(self, steps: Iterable[Mapping[str, Measured]]) -> None:
        """Make a whole training whose steps measure ``steps``, to the end of all hooks.

        Its epochs have ``EPOCH_STEPS`` steps.
        """
        self.call("before_train")
        for number, signals in enumerate(steps):
            if number % EPOCH_STEPS == 0:
                self.call("before_epoch")
            self.step(signals)
            if number % EPOCH_STEPS == EPOCH_STEPS - 1:
                self.snapshot = replace(self.snapshot, epoch=self.snapshot.epoch + 1)
                self.call("after_epoch")
        self.call("after_train")
        while self.waiting:
            self.exchange()

    def _settle(self, votes: list[list[Proposal]]) -> None:
        if not any(votes):
            return
        agreed = all(vote == votes[0] for vote in votes)
        self.verdicts.append(VoteOutcome(self.snapshot.step, tuple(votes[0]), "applied" if agreed else "disagreed"))
        for proposal in votes[0] if agreed else ():
            self.snapshot = moved(self.snapshot, proposal.decision)
        self._become(self.snapshot.workers)

    def _become(self, workers: int) -> None:
        if workers == len(self.hosts):
            return
        state = json.dumps(self.hosts[0].to_json())
        del self.hosts[workers:]
        for rank in range(len(self.hosts), workers):
            self.hosts.append(PolicyHost(self._make(rank)))
            self.hosts[-1].load(json.loads(state))
        for rank, host in enumerate(self.hosts):
            host.restart_waiting_hooks(workers, self.limits, rank)


# --- what every policy has to do ---
_NAMES = ("noise_scale", "noise_scale_adam", "gradient_variance", "gradient_square", "throughput", "loss")
_TIMES = ("step_s", "data_s", "compute_s", "wait_s")
CALM: dict[str, Measured] = {
    "noise_scale": (16.0, 1.0),
    "noise_scale_adam": (16.0, 1.0),
    "gradient_variance": 16.0,
    "gradient_square": 1.0,
    "step_s": 0.1,
    "data_s": 0.01,
    "compute_s": 0.08,
    "wait_s": 0.01,
    "throughput": 640.0,
    "loss": 1.0,
    "busy_share": 0.9,
}
"""A batch of 64 is beyond the noise scale, the workers are busy, and the loss stays."""


def random_signals(seed: int, steps: int, workers: int = 8) -> list[dict[str, Measured]]:
    """Return signals of many sizes, now and then missing, drawn by ``seed``."""
    rng = random.Random(seed)
    draws: list[dict[str, Measured]] = []
    for _ in range(steps):
        signals: dict[str, Measured] = {}
        for name in (*_NAMES, *_TIMES):
            value = math.exp(rng.uniform(-8.0, 8.0))
            signals[name] = (value, value * rng.random())
        signals["busy_share"] = rng.random()
        if rng.random() < 0.3:
            signals["straggler"] = float(rng.randrange(workers))
        draws.append({name: value for name, value in signals.items() if rng.random() < 0.9})
    return draws


class PolicyKit(ABC):
    """Tests for a policy: inherit from this class, and return a new policy from ``make``.

    Attributes:
        calm: Signals at which the policy changes nothing, from step 0 on with 2 workers and a batch of 64. None for a
            policy that changes something whatever is measured (a schedule): it must then do so within ``steps`` steps.
    """

    calm: ClassVar[Mapping[str, Measured] | None] = CALM
    steps: ClassVar[int] = 120
    limits: ClassVar[Limits] = LIMITS

    @abstractmethod
    def make(self) -> Policy | PolicyEntry:
        """Return a new policy, each time; a ``PolicyEntry`` one with guards."""

    def crowd(self, workers: int = 2, limits: Limits | None = None) -> SimulatedWorkers:
        return SimulatedWorkers(workers, lambda rank: [PolicyDriver(self.make()).named], limits=limits or self.limits)

    def test_it_has_a_hook(self) -> None:
        assert hooks_of(PolicyDriver(self.make()).named.policy)

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("limits", [None, Limits(2, 2, 100), Limits(1, 3, 64)], ids=("its own", "none", "narrow"))
    def test_it_asks_for_nothing_that_cannot_be(self, seed: int, limits: Limits | None) -> None:
        crowd = self.crowd(limits=limits)
        crowd.train(random_signals(seed, self.steps))
        assert crowd.failures() == []
        assert {verdict.outcome for verdict in crowd.verdicts} <= {"applied"}, "workers that see the same do the same"

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300])
    def test_it_survives_signals_that_are_no_use(self, value: float) -> None:
        crowd = self.crowd()
        usual = random_signals(0, self.steps)
        crowd.train({**dict.fromkeys(signals, (value, math.nan))} if i % 3 else {} for i, signals in enumerate(usual))
        assert crowd.failures() == []
        assert all(math.isfinite(d.lr_factor or 1.0) and math.isfinite(d.lr or 0.0) for _, d in crowd.decisions)

    def test_nothing_measured_is_survived(self) -> None:
        crowd = self.crowd()
        crowd.train(itertools.repeat({}, self.steps))
        assert crowd.failures() == []

    @pytest.mark.parametrize("seed", range(5))
    def test_it_goes_on_from_its_state(self, seed: int) -> None:
        before, after = random_signals(seed, self.steps), random_signals(seed + 100, self.steps)
        crowd = self.crowd()
        crowd.train(before)
        other = self.crowd(len(crowd.hosts))
        other.snapshot = crowd.snapshot
        for mine, theirs in zip(crowd.hosts, other.hosts, strict=True):
            theirs.load(json.loads(json.dumps(mine.to_json())))
            assert json.loads(json.dumps(theirs.to_json())) == json.loads(json.dumps(mine.to_json()))
            mine.drain_proposals()  # those are no part of a policy's state
        crowd.verdicts.clear()
        for signals in after:
            crowd.step(signals)
            other.step(signals)
        assert other.verdicts == crowd.verdicts

    def test_it_leaves_a_calm_run_alone(self) -> None:
        crowd = self.crowd()
        crowd.train(itertools.repeat(CALM if self.calm is None else self.calm, self.steps))
        changes = [decision for _, decision in crowd.decisions if not _only_remembers(decision)]
        assert bool(changes) == (self.calm is None)


def _only_remembers(decision: Decision) -> bool:
    return decision == Decision(remember=True)


# A simulated world for policies: steps take the time that a formula gives, and workers join when they are warm.

StepTime = Callable[[int, int], tuple[float, float]]
"""(workers, global batch) -> seconds of a step, and how many of them are computing."""


@dataclass
class PolicyWorld:
    """A simulated run of one policy.

    A decision takes effect after the next step. The policy's state goes through JSON again and again. Times reach the
    policy through the performance monitor, as in a run.

    Attributes:
        variance, square: tr(Sigma) of one sample's gradient, and ``|G|^2``.
        jitter: The relative standard deviation of times and noise. About every 40th step also pauses.
        free: The most workers that there are.
        warm_steps: Steps until a new worker has joined.
    """

    step_time: StepTime
    limits: Limits
    workers: int
    batch: int
    lr: float = 0.1
    variance: float = 100.0
    square: float = 1.0
    jitter: float = 0.0
    free: int = 1 << 20
    warm_steps: int = 30
    seed: int = 0
    step: int = 0
    seconds: float = 0.0
    stopped: bool = False
    decisions: list[tuple[int, Decision]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch_at_start, self.target, self._coming = self.batch, self.workers, 0
        self._random = random.Random(self.seed)
        self._pending = Decision()
        self._monitor = Performance()
        self._measured = self._monitor.init()
        self._times: tuple[int, WorkerTimes] = (0, WorkerTimes())  # of the last step, and how many workers made it

    def lose(self, count: int = 1) -> None:
        """Let ``count`` workers die; others are started for them, as far as there are any."""
        self.workers -= count

    def train(self, policy: PolicyDriver, steps: int) -> None:
        """Take ``steps`` steps, or fewer if the policy stops."""
        for _ in range(steps):
            if self.stopped:
                return
            signals = self._make_step()
            decision = policy.decide(
                signals=signals,
                limits=self.limits,
                step=self.step,
                seconds=self.seconds,
                workers=self.workers,
                batch_size=self.batch,
                lr=self.lr,
                batch_at_start=self.batch_at_start,
            )
            if not decision.empty:
                self.decisions.append((self.step, decision))
            self._apply(self._pending)
            self._pending = decision
            if self.step % 7 == 0:
                policy.travel_to(policy)

    def _make_step(self) -> dict[str, Signal]:
        """One more step, and what is measured in it: the times of the step before, as they ride in the reduction."""
        self.step += 1
        before, times = self._times
        step_times = (times,) * self.workers if before == self.workers else ()
        reading = Reading(self.step, self.batch, self.workers, 1.0, times=step_times)
        self._measured = self._monitor.update(self._measured, reading)
        whole_s, compute_s = (self._shaken(s) for s in self.step_time(self.workers, self.batch))
        wait_s = max(whole_s - compute_s, 0.0) + (20 * whole_s if self._random.random() < 1 / 40 else 0.0)
        self._times = self.workers, WorkerTimes(0.0, compute_s, wait_s)
        self.seconds += compute_s + wait_s
        noise = {"gradient_variance": self.variance, "gradient_square": self.square}
        return {
            **{name: Signal(self._shaken(value)) for name, value in noise.items()},
            **self._monitor.signals(self._measured),
        }

    def _shaken(self, value: float) -> float:
        return value * max(1 + self._random.gauss(0, self.jitter), 0.1)

    def _apply(self, decision: Decision) -> None:
        self.batch = decision.batch_size or self.batch
        self.lr *= decision.lr_factor or 1.0
        self.target = decision.workers or self.target
        self.stopped = decision.stop
        wanted = min(self.target, self.free)
        if wanted <= self.workers:
            self.workers, self._coming = min(self.workers, self.target), 0
            return
        self._coming += 1
        if self._coming >= self.warm_steps:
            self.workers, self._coming = wanted, 0
