"""What a policy sees of the run inside of a hook, and what it may ask for there."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from elastune.core.errors import UserError
from elastune.core.signals import Decision, Snapshot
from elastune.policies.arguments import number_of, numbers_of, whole
from elastune.policies.lr_rules import LrChange, lr_change
from elastune.policies.runtime.collectives import Collectives, Future
from elastune.policies.runtime.exchange import Op

REDUCTIONS: tuple[Op, ...] = ("avg", "sum", "min", "max")
NOTHING = Decision()
_NO_CHANGE = LrChange()


@dataclass(frozen=True)
class Limits:
    """What a run can bear: from ``low`` to ``high`` workers (equal: they cannot change); ``longest_batch``: samples of
    an epoch, where that is known. ``ended``: training is over, nothing can be changed any more."""

    low: int = 1
    high: int = 1
    longest_batch: int | None = None
    ended: bool = False


class Run:
    """A run as a policy's hook sees it, equal on every worker but for ``rank()``. It is of use inside its hook only.

    What a hook asks for becomes its ``decision``, which all workers apply at one step boundary if all have decided
    alike. What cannot be raises ``UserError``: the hook is reported, and nothing changes. ``known``: the signals that
    the run's monitors give (None: not known, any name may come).
    """

    __slots__ = ("_asked", "_collectives", "_followed", "_known", "_rank", "_scaled", "limits", "note", "snapshot")

    def __init__(
        self,
        snapshot: Snapshot,
        limits: Limits,
        rank: int,
        collectives: Collectives,
        known: Collection[str] | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.limits = limits
        self.note = ""  # what was cut from what it was asked for
        self._rank = rank
        self._collectives: Collectives | None = collectives
        self._known = known
        self._asked = NOTHING
        self._scaled = self._followed = _NO_CHANGE  # by scale_lr, and by what follows from a batch

    # -- where training stands ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.snapshot.step

    @property
    def epoch(self) -> int:
        """Completed epochs."""
        return self.snapshot.epoch

    @property
    def samples(self) -> int:
        """Samples used so far, by all workers."""
        return self.snapshot.samples

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self.snapshot.seconds

    def rank(self) -> int:
        """This worker's number, from 0. What depends on it must go through a collective before it decides anything."""
        return self._rank

    def size(self) -> int:
        """How many workers there are."""
        return self.snapshot.workers

    def batch_size(self) -> int:
        """Samples in the global batch."""
        return self.snapshot.batch_size

    def micro_batch(self) -> int | None:
        """The most samples of one forward pass; None: no bound."""
        return self.snapshot.micro_batch

    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        return self.snapshot.lr

    # -- what was measured --------------------------------------------------------------------------------------------

    def signal(self, name: str) -> float:
        """The newest value of a monitor's signal; NaN until it is measured."""
        found = self.snapshot.signals.get(name)
        if found is not None:
            return found.value
        self._check_known(name)
        return math.nan

    def error(self, name: str) -> float:
        """The standard error of a signal; NaN where none is known."""
        found = self.snapshot.signals.get(name)
        if found is None:
            self._check_known(name)
        return math.nan if found is None or found.error is None else found.error

    def grad_noise_scale(self) -> float:
        """The simple noise scale tr(Sigma) / |G|^2, in samples (McCandlish et al. 2018, section 2.2)."""
        return self.signal("noise_scale")

    def grad_variance(self) -> float:
        """tr(Sigma): the variance of one sample's gradient."""
        return self.signal("gradient_variance")

    def grad_square(self) -> float:
        """|G|^2: the square of the true gradient's norm."""
        return self.signal("gradient_square")

    def step_time(self) -> float:
        """Seconds a step."""
        return self.signal("step_s")

    def throughput(self) -> float:
        """Samples a second, of all workers."""
        return self.signal("throughput")

    def loss(self) -> float:
        """The smoothed training loss."""
        return self.signal("loss")

    def _check_known(self, name: str) -> None:
        if self._known is not None and name not in self._known:
            known = ", ".join(sorted({*self._known, *self.snapshot.signals})) or "none"
            fix = f"name its monitor in the policy's `monitors` or with --monitor; signals of this run: {known}"
            raise UserError("no monitor of this run gives this signal", name, fix)

    # -- talking to the same hook on the other workers ----------------------------------------------------------------

    @overload
    def allreduce(self, x: float, op: str = "avg", name: str | None = None) -> float: ...
    @overload
    def allreduce(self, x: Sequence[float], op: str = "avg", name: str | None = None) -> list[float]: ...
    def allreduce(self, x: Any, op: str = "avg", name: str | None = None) -> Any:
        """``x`` of all workers, a number or a flat list of equal length, as its "avg", "sum", "min" or "max".

        Workers find each other by ``name``, or by how many collectives of this kind the hook had before. Where their
        order differs from worker to worker, start them with ``allreduce_async``, and only then ask for results.
        """
        return self.allreduce_async(x, op, name).result()

    @overload
    def broadcast(self, x: float, root: int = 0, name: str | None = None) -> float: ...
    @overload
    def broadcast(self, x: Sequence[float], root: int = 0, name: str | None = None) -> list[float]: ...
    def broadcast(self, x: Any, root: int = 0, name: str | None = None) -> Any:
        """The ``x`` of rank ``root``."""
        return self.broadcast_async(x, root, name).result()

    @overload
    def allgather(self, x: float, name: str | None = None) -> list[float]: ...
    @overload
    def allgather(self, x: Sequence[float], name: str | None = None) -> list[list[float]]: ...
    def allgather(self, x: Any, name: str | None = None) -> Any:
        """Every worker's ``x``, by rank; lists may differ in length."""
        return self.allgather_async(x, name).result()

    def allreduce_async(self, x: float | Sequence[float], op: str = "avg", name: str | None = None) -> Future[Any]:
        """Begin an ``allreduce``; any number may be under way. The hook ends when all its collectives have."""
        if op not in REDUCTIONS:
            raise UserError("unknown reduction", op, f"use one of {', '.join(REDUCTIONS)}")
        return self._submit(op, x, 0, name)

    def broadcast_async(self, x: float | Sequence[float], root: int = 0, name: str | None = None) -> Future[Any]:
        """Begin a ``broadcast``."""
        return self._submit("broadcast", x, self._existing_rank(root), name)

    def allgather_async(self, x: float | Sequence[float], name: str | None = None) -> Future[Any]:
        """Begin an ``allgather``."""
        return self._submit("allgather", x, 0, name)

    def _submit(self, op: Op, x: object, root: int, name: str | None) -> Future[Any]:
        collectives = self._check_open()
        if name is not None and not (isinstance(name, str) and name):
            raise UserError("a collective's name must be a text", repr(name), "name it, or leave the name out")
        return collectives.submit(op, numbers_of(x), root, name)

    # -- what may be asked for ----------------------------------------------------------------------------------------

    @property
    def decision(self) -> Decision:
        """What was asked for so far in this hook."""
        factor = self._scaled.factor * self._followed.factor
        if factor == 1.0 and not self._asked.correct_momentum:
            return self._asked
        if factor == 1.0:
            return replace(self._asked, correct_momentum=False)
        steps = max(self._scaled.ramp_steps, self._followed.ramp_steps)
        return replace(self._asked, lr_factor=factor, ramp_steps=steps)

    def resize(self, n: int) -> None:
        """Ask for ``n`` workers: they come when they are warm, training goes on meanwhile.

        What goes beyond the workers that the run may have (``limits``) is cut to them, which is noted in the journal.
        """
        n, low, high = whole("workers", n, 1), self.limits.low, self.limits.high
        if n != self.size():
            self._check_workers_change(n)
        if n != self.size() and not low <= n <= high:
            self.note = f"asked for {n} workers; this run may have from {low} to {high}"
            n = max(low, min(high, n))
        self._ask(workers=None if n == self.size() else n)

    def replace(self, rank: int) -> None:
        """Ask for another worker in place of that of ``rank``, which leaves when the new one has joined."""
        rank = self._existing_rank(rank)
        self._check_workers_change(f"another worker for rank {rank}")
        self._ask(replace_rank=rank)

    def set_batch_size(self, b: int, lr: str = "none", ramp_steps: int = 0, correct_momentum: bool = False) -> None:
        """Ask for a global batch of ``b`` samples. ``lr``: the rule by which the learning rate follows, one of
        ``policies.lr_rules``, over ``ramp_steps`` steps; ``correct_momentum``: see ``Decision``."""
        b, longest = whole("the batch size", b, 1), self.limits.longest_batch
        if longest is not None and b > longest and b != self.batch_size():
            raise UserError(f"a batch must not be longer than an epoch of {longest} samples", b, "ask for less")
        change = lr_change(lr, self.batch_size(), b, self.snapshot, epoch_samples=longest)
        steps = max(whole("ramp_steps", ramp_steps, 0), change.ramp_steps)
        same = b == self.batch_size()
        self._ask(batch_size=None if same else b, correct_momentum=self._asked.correct_momentum or correct_momentum)
        self._followed = _NO_CHANGE if same else LrChange(change.factor, steps)

    def set_micro_batch(self, m: int) -> None:
        """Ask for forward passes of at most ``m`` samples."""
        m = whole("the micro-batch", m, 1)
        self._ask(micro_batch=None if m == self.micro_batch() else m)

    def set_lr(self, x: float) -> None:
        """Ask for the learning rate ``x`` in every parameter group; forgets earlier factors of this hook."""
        self._ask(lr=number_of("the learning rate", x, 0.0), correct_momentum=False)
        self._scaled = self._followed = _NO_CHANGE

    def scale_lr(self, f: float, ramp_steps: int = 0, correct_momentum: bool = False) -> None:
        """Ask for every learning rate times ``f`` > 0, over ``ramp_steps`` steps; ``correct_momentum``: see
        ``Decision``. Of several, the factors multiply."""
        rule = "the factor of a learning rate"
        if (f := number_of(rule, f, 0.0)) == 0.0:
            raise UserError(f"{rule} must be positive", f, "use run.set_lr(0.0) to stand still")
        steps = max(whole("ramp_steps", ramp_steps, 0), self._scaled.ramp_steps)
        self._ask(correct_momentum=self._asked.correct_momentum or correct_momentum)
        self._scaled = LrChange(number_of(rule, self._scaled.factor * f, 0.0), steps)

    def remember(self) -> None:
        """Ask for a copy of model and optimizer to be kept in memory."""
        self._ask(remember=True)

    def restore(self) -> None:
        """Ask for the way back to that copy; the place in the data stays."""
        self._ask(restore=True)

    def stop(self) -> None:
        """Ask for a checkpoint and the end of training."""
        self._ask(stop=True)

    def _ask(self, **changes: Any) -> None:
        self._check_open()
        if self.limits.ended:
            raise UserError("after training nothing can be changed", ", ".join(changes), "ask in an earlier hook")
        self._asked = replace(self._asked, **changes)

    def close(self) -> None:
        """The hook is over."""
        self._collectives = None

    def _check_open(self) -> Collectives:
        if self._collectives is None:
            raise UserError(
                "a run is of use inside its hook only", "a later call", "use the run that each hook is given"
            )
        return self._collectives

    def _check_workers_change(self, asked: object) -> None:
        if self.limits.low == self.limits.high:
            rule = f"this run has {self.limits.low} workers throughout"
            raise UserError(rule, asked, "start it with --workers LOW:HIGH")

    def _existing_rank(self, rank: int) -> int:
        if (rank := whole("a rank", rank, 0)) >= self.size():
            raise UserError(f"there are ranks 0 to {self.size() - 1}", rank, "ask run.size()")
        return rank
