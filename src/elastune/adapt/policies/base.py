"""What a policy is, and what it works with: ``Policy`` is its contract, ``Run`` is what its hooks read and request."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, overload

from elastune.adapt.policies.collectives import Collectives, Future, NotJson, Op, copied
from elastune.core.communication import Topology
from elastune.core.decisions import Decision, Snapshot, topology_for_vote
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.plan.batch_size import LrChange, lr_change
from elastune.core.sync_plan import SyncPlan

if TYPE_CHECKING:
    pass
Hook = Literal["before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train"]
HOOKS: tuple[Hook, ...] = get_args(Hook)


class Policy:
    """Changes batch size, learning rate or workers while a run trains. Inherit from this class to write a policy.

    Every worker runs the same policies. The journal records each request to ``run``. All workers apply a request at one
    step boundary, if all of them made the same request. A policy has one of two forms:

    - With methods: override methods that are named like the hooks. The attributes of the instance are its state, and
      must be JSON values (numbers, strings, lists, dicts). Joiners and checkpoints take over the attributes that differ
      from those that the constructor made.
    - Pure: name the ``hooks``, and override ``init`` and ``decide``, with a frozen dataclass (or one plain value) as
      state.

    If a hook raises, or its decision has no effect, nothing changes: the policy keeps the state it had.

    Attributes:
        monitors: The monitors whose signals the policy reads (docs/policies.md lists them).
        survives_divergence: Whether the policy handles a loss that is not finite.
        hooks: For a pure policy, the hooks at which ``decide`` is called.

    Example:
        >>> class Careful(elastune.Policy):
        ...     monitors = ("noise_scale",)
        ...     def after_step(self, run):
        ...         if run.grad_noise_scale() > 4 * run.batch_size():
        ...             run.set_batch_size(2 * run.batch_size(), lr="sqrt")
    """

    monitors: ClassVar[tuple[str, ...]] = ("noise_scale", "performance")
    survives_divergence: ClassVar[bool] = False
    hooks: ClassVar[tuple[Hook, ...]] = ()

    # -- pure ---------------------------------------------------------------------------------------------------------

    def init(self) -> Any:
        """Return the state before training."""
        self._copied(vars(self))
        return {}

    def decide(self, hook: Hook, state: Any, run: Run) -> Any:
        """Request changes from ``run``, and return the new state. Change neither ``state`` nor ``self``.

        By default, for a policy with methods: call the method named ``hook`` on a copy that has the attributes in
        ``state``.

        Args:
            hook: The name of the hook.
            state: The policy's state.
            run: The run; usable inside this call only.
        """
        shared = vars(self)
        copy = object.__new__(type(self))
        attributes = vars(copy)
        attributes |= self._copied({**shared, **state})
        for name in state:  # a tuple that has travelled as JSON is a list
            if isinstance(shared.get(name), tuple) and isinstance(attributes[name], list):
                attributes[name] = tuple(attributes[name])
        getattr(copy, hook)(run)
        return {name: x for name, x in self._copied(attributes).items() if name not in shared or x != shared[name]}

    def strategies(self, num_slots: int, most_workers: int) -> Sequence[str]:
        """Return the sync strategies that the policy may ask ``run.set_sync`` for, as far as they are known early.

        They are checked before the run starts. A strategy that is not named here is checked when the policy asks for
        it.

        Args:
            num_slots: Number of equal shares of every global batch.
            most_workers: The most workers that the run may have at once.

        Returns:
            Texts as for ``--sync``.
        """
        return ()

    def _copied(self, attributes: dict[str, Any]) -> dict[str, Any]:
        try:
            return {name: copied(value, name) for name, value in attributes.items()}
        except NotJson as error:
            raise error.of(f"policy {type(self).__name__}") from error

    # -- by methods ---------------------------------------------------------------------------------------------------

    def before_train(self, run: Run) -> None:
        """Called once, before the first step; in a resumed run, too."""

    def before_epoch(self, run: Run) -> None:
        """Called before the first step of an epoch."""

    def before_step(self, run: Run) -> None:
        """Called before a step. A decision travels in this step's reduction and takes effect after this step."""

    def after_step(self, run: Run) -> None:
        """Called after a step. A decision travels in the next step's reduction and takes effect after that step."""

    def after_epoch(self, run: Run) -> None:
        """Called after the last step of an epoch."""

    def after_train(self, run: Run) -> None:
        """Called once, after the last step, for final output: nothing can be changed any more."""


def hooks_of(policy: Policy) -> tuple[Hook, ...]:
    """Return the hooks at which ``policy`` wants to be called."""
    kind = type(policy)
    return policy.hooks or tuple(hook for hook in HOOKS if getattr(kind, hook) is not getattr(Policy, hook))


# ``Run``: what a policy's hook can read of its run, and the changes that it can request.
#
# Almost everything here is equal on every worker, so that all workers make the same decision. ``rank()`` is not.

# Checks of a policy's arguments.
MOST = 2**31  # of anything that is counted: votes carry two digits of 16 bits


def whole(what: str, value: object, least: int) -> int:
    """Return ``value`` as a whole number of at least ``least``; ``what`` names it in the error."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= MOST:
        rule = f"{what} must be a whole number from {least} to {MOST}"
        raise UserError(rule, repr(value), "round it, and mind its bounds")
    return number


def number_of(what: str, value: object, least: float) -> float:
    """Return ``value`` as a finite number of at least ``least``; ``what`` names it in the error."""
    number = numbers_of(value)
    if isinstance(value, bool) or isinstance(number, tuple) or not least <= number < math.inf:
        raise UserError(
            f"{what} must be a finite number, at least {least:g}", repr(value), "mind NaN before the first measurement"
        )
    return number


def numbers_of(x: object) -> float | tuple[float, ...]:
    """Return ``x`` as a number or a flat tuple of numbers; arrays and tensors give their values."""
    x = x.tolist() if hasattr(x, "tolist") else x
    try:
        if isinstance(x, Sequence) and not isinstance(x, (str, bytes)):
            return tuple(map(_float, x))
        return _float(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError("a number or a flat list of numbers is needed", repr(x), "convert it with float()") from error


def _float(x: Any) -> float:
    if isinstance(x, (str, bytes)):
        raise TypeError("a text is no number")
    return float(x)


# The readable part of a run.
class RunView:
    """The state of a run and the signals of its monitors. Everything but ``rank()`` is equal on every worker.

    Attributes:
        snapshot: All of it as one value.
    """

    __slots__ = ("_known", "_rank", "snapshot")

    def __init__(self, snapshot: Snapshot, rank: int, known: Collection[str] | None) -> None:
        self.snapshot = snapshot
        self._rank = rank
        self._known = known

    # -- the state of training ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self.snapshot.step

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self.snapshot.epoch

    @property
    def samples(self) -> int:
        """The number of samples that all workers used so far."""
        return self.snapshot.samples

    @property
    def seconds(self) -> float:
        """Training time so far, in seconds."""
        return self.snapshot.seconds

    def rank(self) -> int:
        """Return this worker's rank, from 0.

        A value that depends on the rank must go through a collective before it decides anything.
        """
        return self._rank

    def size(self) -> int:
        """Return the number of workers."""
        return self.snapshot.workers

    def batch_size(self) -> int:
        """Return the global batch size, in samples."""
        return self.snapshot.batch_size

    def micro_batch(self) -> int | None:
        """Return the most samples of one forward pass; None: no bound."""
        return self.snapshot.micro_batch

    def sync(self) -> str:
        """Return the sync strategy, as ``--sync`` has it."""
        return self.snapshot.sync

    def left_out(self) -> int:
        """Return the number of learners without which the newest round ended: a quorum waits for no more
        than it needs.
        """
        return self.snapshot.left_out

    def lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        return self.snapshot.lr

    # -- signals ------------------------------------------------------------------------------------------------------

    def signal(self, name: str) -> float:
        """Return the newest value of a monitor's signal; NaN until it is measured."""
        signal = self.snapshot.signals.get(name)
        if signal is not None:
            return signal.value
        self._check_known(name)
        return math.nan

    def error(self, name: str) -> float:
        """Return the standard error of a signal; NaN where none is known."""
        signal = self.snapshot.signals.get(name)
        if signal is None:
            self._check_known(name)
        return math.nan if signal is None or signal.error is None else signal.error

    def grad_noise_scale(self) -> float:
        """Return the simple noise scale tr(Sigma) / |G|^2, in samples (McCandlish et al. 2018, section 2.2)."""
        return self.signal("noise_scale")

    def grad_variance(self) -> float:
        """Return tr(Sigma), the variance of one sample's gradient."""
        return self.signal("gradient_variance")

    def grad_square(self) -> float:
        """Return |G|^2, the square of the true gradient's norm."""
        return self.signal("gradient_square")

    def step_time(self) -> float:
        """Return the time of a step, in seconds."""
        return self.signal("step_s")

    def throughput(self) -> float:
        """Return the samples a second of all workers together."""
        return self.signal("throughput")

    def loss(self) -> float:
        """Return the smoothed training loss."""
        return self.signal("loss")

    def _check_known(self, name: str) -> None:
        if self._known is not None and name not in self._known:
            known = ", ".join(sorted({*self._known, *self.snapshot.signals})) or "none"
            fix = f"name its monitor in the policy's `monitors` or with --monitor; signals of this run: {known}"
            raise UserError("no monitor of this run gives this signal", name, fix)


# The requests of a policy's hook.
REDUCTIONS: tuple[Op, ...] = ("avg", "sum", "min", "max")
NOTHING = Decision()
_NO_CHANGE = LrChange()


@dataclass(frozen=True)
class Limits:
    """The bounds within which a run can change.

    Attributes:
        low: The fewest workers.
        high: The most workers; equal to ``low`` where workers cannot change.
        longest_batch: Samples of an epoch; None: not known.
        ended: Training is over; nothing can be changed any more.
        num_slots: Number of equal shares of every global batch; None: not known.
    """

    low: int = 1
    high: int = 1
    longest_batch: int | None = None
    ended: bool = False
    num_slots: int | None = None


class Run(RunView):
    """A run, as a policy's hook sees it. It is usable inside its hook only.

    All workers apply a hook's requests at one step boundary, if all of them made the same ones. An impossible request
    raises ``UserError``: the hook is reported, and nothing changes.

    Args:
        snapshot: The state of the run.
        limits: The bounds within which it can change.
        rank: This worker's rank.
        collectives: Carries values to the other workers.
        known: The signals of the run's monitors; None: any name is possible.

    Attributes:
        note: The parts of the hook's requests that were cut, and why.
        refused: The request for other workers, where the bounds of the run leave none of it.

    Example:
        >>> def after_step(self, run):  # of a policy
        ...     if run.grad_noise_scale() - run.error("noise_scale") > 4 * run.batch_size():
        ...         run.set_batch_size(2 * run.batch_size(), lr="sqrt")
        ...         run.resize(run.size() + 1)
    """

    __slots__ = ("_collectives", "_decision", "_followed", "_scaled", "limits", "note", "refused")

    def __init__(
        self,
        snapshot: Snapshot,
        limits: Limits,
        rank: int,
        collectives: Collectives,
        known: Collection[str] | None = None,
    ) -> None:
        super().__init__(snapshot, rank, known)
        self.limits = limits
        self.note = ""
        self.refused = NOTHING
        self._collectives: Collectives | None = collectives
        self._decision = NOTHING
        self._scaled = self._followed = _NO_CHANGE  # by scale_lr, and by what follows from a batch

    # -- collectives --------------------------------------------------------------------------------------------------

    @overload
    def allreduce(self, x: float, op: str = "avg", name: str | None = None) -> float: ...
    @overload
    def allreduce(self, x: Sequence[float], op: str = "avg", name: str | None = None) -> list[float]: ...
    def allreduce(self, x: Any, op: str = "avg", name: str | None = None) -> Any:
        """Reduce ``x`` over the same hook on all workers.

        Training does not wait: the hook ends here, and runs again from its start once the values of the other workers
        are there. Where the order of collectives differs between workers, start all of them with ``allreduce_async``
        before you ask for a result.

        Args:
            x: A number, or a flat list of the same length on all workers.
            op: "avg", "sum", "min" or "max".
            name: The name by which workers match their calls; None: they match the n-th call of this kind in the hook.

        Returns:
            The result, in the shape of ``x``.

        Raises:
            CollectiveFailed: Where workers called it differently, or some did not call it.
        """
        return self.allreduce_async(x, op, name).result()

    @overload
    def broadcast(self, x: float, root: int = 0, name: str | None = None) -> float: ...
    @overload
    def broadcast(self, x: Sequence[float], root: int = 0, name: str | None = None) -> list[float]: ...
    def broadcast(self, x: Any, root: int = 0, name: str | None = None) -> Any:
        """Return the ``x`` of rank ``root``; ``name`` and errors as for ``allreduce``."""
        return self.broadcast_async(x, root, name).result()

    @overload
    def allgather(self, x: float, name: str | None = None) -> list[float]: ...
    @overload
    def allgather(self, x: Sequence[float], name: str | None = None) -> list[list[float]]: ...
    def allgather(self, x: Any, name: str | None = None) -> Any:
        """Return every worker's ``x``, by rank; lists may differ in length.

        ``name`` and errors as for ``allreduce``.
        """
        return self.allgather_async(x, name).result()

    def allreduce_async(self, x: float | Sequence[float], op: str = "avg", name: str | None = None) -> Future[Any]:
        """Start an ``allreduce`` and return its future.

        Any number of them may run at once; the hook ends when all have ended.
        """
        if op not in REDUCTIONS:
            raise UserError("unknown reduction", op, f"use one of {', '.join(REDUCTIONS)}")
        return self._submit(op, x, 0, name)

    def broadcast_async(self, x: float | Sequence[float], root: int = 0, name: str | None = None) -> Future[Any]:
        """Start a ``broadcast`` and return its future."""
        return self._submit("broadcast", x, self._existing_rank(root), name)

    def allgather_async(self, x: float | Sequence[float], name: str | None = None) -> Future[Any]:
        """Start an ``allgather`` and return its future."""
        return self._submit("allgather", x, 0, name)

    def _submit(self, op: Op, x: object, root: int, name: str | None) -> Future[Any]:
        collectives = self._check_open()
        if name is not None and not (isinstance(name, str) and name):
            raise UserError("a collective's name must be a text", repr(name), "name it, or leave the name out")
        return collectives.submit(op, numbers_of(x), root, name)

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def decision(self) -> Decision:
        """The requests of this hook so far."""
        factor = self._scaled.factor * self._followed.factor
        if factor == 1.0 and not self._decision.correct_momentum:
            return self._decision
        if factor == 1.0:
            return replace(self._decision, correct_momentum=False)
        steps = max(self._scaled.ramp_steps, self._followed.ramp_steps)
        return replace(self._decision, lr_factor=factor, ramp_steps=steps)

    def resize(self, n: int) -> None:
        """Ask for ``n`` workers. New workers join when they are warm; training goes on meanwhile.

        Args:
            n: The wanted number. It is cut to the workers that the run may have (``limits``), which the journal notes.
                Where that leaves nothing to change, this is noted once and nothing is done.
        """
        n, low, high = whole("workers", n, 1), self.limits.low, self.limits.high
        bound = n if n == self.size() else max(low, min(high, n))
        if bound != n:
            self.note = f"asked for {n} workers; {bounds_text(self.limits)}"
            self.refused = Decision(workers=n) if bound == self.size() else NOTHING
        self._ask(workers=None if bound == self.size() else bound)

    def reshape(self, mesh: str) -> None:
        """Ask for another mesh, and for as many workers as it has.

        Args:
            mesh: Workers along each axis, such as "data=2,shard=2". A mesh that the run's mechanism does not divide
                along is refused, which the journal says. A mesh of more or fewer workers than the run may have
                (``limits``) is refused here.
        """
        wanted = Mesh.parse(mesh)
        if not self.limits.low <= wanted.workers <= self.limits.high:
            self.note = f"asked for {wanted}: {wanted.workers} workers; {bounds_text(self.limits)}"
            self.refused = Decision(mesh=str(wanted))
            return
        self._ask(mesh=str(wanted))

    def replace(self, rank: int) -> None:
        """Ask for another worker in place of the worker of ``rank``, which leaves when the new one has joined.

        In a run whose workers cannot change, this is noted once and nothing is done.
        """
        rank = self._existing_rank(rank)
        if self.limits.low == self.limits.high:
            self.note = f"asked for another worker for rank {rank}; {_throughout(self.limits.low)}"
            self.refused = Decision(replace_rank=rank)
        self._ask(replace_rank=None if self.refused.replace_rank == rank else rank)

    def set_batch_size(self, b: int, lr: str = "none", ramp_steps: int = 0, correct_momentum: bool = False) -> None:
        """Ask for a global batch of ``b`` samples.

        Args:
            b: Samples; at most those of an epoch.
            lr: The rule by which the learning rate follows: "none", "linear", "sqrt", "adascale" or "legw".
            ramp_steps: Steps over which it follows; 0: at once.
            correct_momentum: Divide SGD's momentum by the learning rate's factor, so that velocities do not jump.

        Raises:
            UserError: For a batch that is longer than an epoch, and for an unknown rule.
        """
        b, longest = whole("the batch size", b, 1), self.limits.longest_batch
        if longest is not None and b > longest and b != self.batch_size():
            raise UserError(f"a batch must not be longer than an epoch of {longest} samples", b, "ask for less")
        change = lr_change(lr, self.batch_size(), b, self.snapshot, epoch_samples=longest)
        steps = max(whole("ramp_steps", ramp_steps, 0), change.ramp_steps)
        same = b == self.batch_size()
        self._ask(batch_size=None if same else b, correct_momentum=self._decision.correct_momentum or correct_momentum)
        self._followed = _NO_CHANGE if same else LrChange(change.factor, steps)

    def set_micro_batch(self, m: int) -> None:
        """Ask for forward passes of at most ``m`` samples."""
        m = whole("the micro-batch", m, 1)
        self._ask(micro_batch=None if m == self.micro_batch() else m)

    def set_topology(self, topology: str) -> None:
        """Ask for other routes of the workers' sums.

        Args:
            topology: A text as for ``--topology``.

        Raises:
            UserError: For a text that is no topology.
        """
        self._route(Topology.parse(topology))

    def set_tree(self, parents: Sequence[int]) -> None:
        """Ask for the tree in which rank r sends its sums to ``parents[r]``; the root names itself.

        Raises:
            UserError: For a circle, a gap, or any number of parents other than one for each present worker.
        """
        self._route(Topology.of_parents(parents))

    def _route(self, topology: Topology) -> None:
        topology.check(self.size(), "replicated")  # what the run's mechanism cannot have is refused when it is due
        self._ask(topology=topology_for_vote(topology))

    def set_lr(self, x: float) -> None:
        """Ask for the learning rate ``x`` in every parameter group. It replaces earlier factors of this hook."""
        self._ask(lr=number_of("the learning rate", x, 0.0), correct_momentum=False)
        self._scaled = self._followed = _NO_CHANGE

    def scale_lr(self, f: float, ramp_steps: int = 0, correct_momentum: bool = False) -> None:
        """Ask for every learning rate times ``f``; the factors of several calls multiply.

        Args:
            f: The factor, above 0.
            ramp_steps, correct_momentum: As for ``set_batch_size``.
        """
        rule = "the factor of a learning rate"
        if (f := number_of(rule, f, 0.0)) == 0.0:
            raise UserError(f"{rule} must be positive", f, "use run.set_lr(0.0) to stand still")
        steps = max(whole("ramp_steps", ramp_steps, 0), self._scaled.ramp_steps)
        self._ask(correct_momentum=self._decision.correct_momentum or correct_momentum)
        self._scaled = LrChange(number_of(rule, self._scaled.factor * f, 0.0), steps)

    def set_sync(self, strategy: str) -> None:
        """Ask for another sync strategy from the next step on (docs/sync.md).

        Args:
            strategy: A text as for ``--sync``, such as "local:learners=8,every=16". A strategy that the run cannot have
                is refused, which the journal says.

        Raises:
            UserError: For a text that is no strategy.
        """
        plan = str(SyncPlan.parse(strategy))
        self._ask(sync=None if plan == self.sync() else plan)

    def remember(self) -> None:
        """Ask to keep a copy of model and optimizer in memory."""
        self._ask(remember=True)

    def restore(self) -> None:
        """Ask to go back to the kept copy; the position in the data stays."""
        self._ask(restore=True)

    def stop(self) -> None:
        """Ask for a checkpoint and the end of training."""
        self._ask(stop=True)

    def _ask(self, **changes: Any) -> None:
        self._check_open()
        if self.limits.ended:
            raise UserError("after training nothing can be changed", ", ".join(changes), "ask in an earlier hook")
        self._decision = replace(self._decision, **changes)

    def close(self) -> None:
        """End the hook: from here on the run refuses requests."""
        self._collectives = None

    def _check_open(self) -> Collectives:
        if self._collectives is None:
            raise UserError(
                "a run is of use inside its hook only", "a later call", "use the run that each hook is given"
            )
        return self._collectives

    def _existing_rank(self, rank: int) -> int:
        if (rank := whole("a rank", rank, 0)) >= self.size():
            raise UserError(f"there are ranks 0 to {self.size() - 1}", rank, "ask run.size()")
        return rank


def bounds_text(limits: Limits) -> str:
    """How many workers the run may have, and which option allows more."""
    if limits.low == limits.high:
        return _throughout(limits.low)
    return f"this run may have from {limits.low} to {limits.high}: start it with other --workers LOW:HIGH"


def _throughout(workers: int) -> str:
    return f"this run has {workers} throughout: start it with --workers LOW:HIGH"
