"""What a run measures of itself: from a step's sums to the monitors' states, and the curvature of its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from elastune.adapt.monitors.base import GradientNorms, Monitor, Need, Reading, State, WorkerTimes
from elastune.adapt.monitors.registry import choose
from elastune.core.decisions import Signal
from elastune.core.errors import UserError
from elastune.core.run import derive
from elastune.core.slots import BatchSlice, Mode
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.sync.base import StepStatistics, Sync
from elastune.train.rng import streams_kept

# The top eigenvalue and the trace of a loss's Hessian, by products of the Hessian with vectors.
#
# Sources. Product: Pearlmutter 1994, "Fast exact multiplication by the Hessian", here the gradient of the gradient
# times the vector. Top eigenvalue: power iteration (Yao et al. 2020, "PyHessian"). Trace: Hutchinson 1990, "A
# stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines".
#
# Bias and variance. Power iteration approaches the eigenvalue from the inside: its magnitude is too small by a
# relative error of about (second / first)^(2 iterations), and by more where eigenvalues of opposite sign rival each
# other. On part of a batch, the largest eigenvalue of a noisy matrix is too large on average. Hutchinson's estimate
# is unbiased; one probe has variance 2 (|H|_F^2 - sum H_ii^2).

Vector = list[Tensor]


def top_eigenvalue(
    loss: Tensor, params: Sequence[Tensor], iterations: int = 30, tolerance: float = 0.01, seed: int = 0
) -> float:
    """Return the eigenvalue of largest magnitude, with its sign, of the Hessian of the scalar ``loss`` by
    ``params``.

    ``loss`` can be backpropagated afterwards. No ``grad`` field, no hook of gradient accumulation and no global random
    state changes. Functions marked ``once_differentiable`` count as linear, without a warning: autograd skips its
    error.

    Args:
        loss: A scalar.
        params: The parameters.
        iterations: The most Hessian-vector products.
        tolerance: Stop once the value moves by less than this part of itself.
        seed: Seeds the first vector.

    Returns:
        The eigenvalue; 0 where ``loss`` is linear.

    Raises:
        RuntimeError: From torch, where ``loss`` cannot be differentiated twice.
    """
    used, product = _hessian(loss, params)
    generator = torch.Generator().manual_seed(seed)
    vector = _unit([torch.randn(p.shape, generator=generator).to(p) for p in used])
    eigenvalue = 0.0
    for _ in range(iterations if used else 0):
        image = product(vector)
        before, eigenvalue = eigenvalue, _dot(vector, image)
        if eigenvalue == before or abs(eigenvalue - before) < tolerance * abs(eigenvalue):
            break
        vector = _unit(image)
    return eigenvalue


def hessian_trace(loss: Tensor, params: Sequence[Tensor], probes: int = 1, seed: int = 0) -> float:
    """Return the mean of v'Hv over ``probes`` vectors of random signs, with H the Hessian of the scalar ``loss``.

    It leaves everything as ``top_eigenvalue`` does. With equal seeds, traces of several losses add up as the losses do.
    """
    used, product = _hessian(loss, params)
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for _ in range(probes if used else 0):
        signs = [(torch.randint(0, 2, p.shape, generator=generator) * 2 - 1).to(p) for p in used]
        total += _dot(signs, product(signs))
    return total / probes


def _hessian(loss: Tensor, params: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[Vector], Vector]]:
    """The parameters in which the loss is not linear, and the product of its Hessian with a vector."""
    first = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True, materialize_grads=False)
    pairs = [(p, g) for p, g in zip(params, first, strict=True) if g is not None and g.requires_grad]
    used, gradients = [p for p, _ in pairs], [g for _, g in pairs]

    def product(vector: Vector) -> Vector:
        return list(torch.autograd.grad(gradients, used, vector, retain_graph=True, materialize_grads=True))

    return used, product


def _dot(a: Vector, b: Vector) -> float:
    return float(sum(torch.sum(x * y, dtype=torch.float64) for x, y in zip(a, b, strict=True)))


def _unit(vector: Vector) -> Vector:
    length = _dot(vector, vector) ** 0.5
    return [x / length for x in vector] if length > 0 else vector


# What a run measures of itself: from the sums that a step's reduction brought to the monitors' states.

_NEEDS: tuple[Need, ...] = ("norms", "preconditioned", "times", "sharpness", "trace")


class Monitoring:
    """Runs the monitors of a run, whose states are equal on every worker: it measures what they need in a step.

    Attributes:
        monitors: The monitors, each once.
        times: Whether a monitor needs to know how long the workers' steps take.
        curved: Whether a monitor needs the curvature of the loss.
    """

    def __init__(self, texts: Iterable[str], seed: int) -> None:
        self.monitors = choose(texts)
        self._states: dict[str, State] = {monitor.name: monitor.init() for monitor in self.monitors}
        self._seed = seed
        self._signals: dict[str, Signal] | None = {}
        taking = [monitor.every for monitor in self.monitors if monitor.needs & {"norms", "preconditioned"}]
        self._stride = min(taking, default=1)  # steps from one reading of norms to the next
        self._needed = {need: any(need in monitor.needs for monitor in self.monitors) for need in _NEEDS}
        self.times = self._needed["times"]
        self.curved = self._needed["trace"] or self._needed["sharpness"]

    def takes(self, need: Need, step: int) -> bool:
        """Whether step ``step``, counted from 1, is to measure what ``need`` names."""
        return self._needed[need] and any(need in monitor.needs and _due(monitor, step) for monitor in self.monitors)

    def compares(self, step: int) -> bool:
        """Whether step ``step`` measures norms of parts of its batch."""
        return self.takes("norms", step) or self.takes("preconditioned", step)

    def unmeasured(self, step: int, statistics: StepStatistics, mode: Mode) -> tuple[tuple[str, ...], str]:
        """The monitors that compare parts of a batch, if step ``step`` had one part only; and the reason."""
        if not self.compares(step) or statistics.parts["count"] >= 2:
            return (), ""
        names = tuple(m.name for m in self.monitors if m.needs & {"norms", "preconditioned"})
        if statistics.norms is None:
            return names, "LBFGS evaluates a batch again and again"
        unit, fix = (
            ("a worker", "use two workers, or --mode exact --slots 4")
            if mode == "fast"
            else ("a slot", "use --slots 4")
        )
        return names, f"one pass of {unit} is all of the batch, and to cut it would change what is trained; {fix}"

    def prepare(self, sync: Sync, step: int) -> None:
        """Set what is to be measured in step ``step``, before it."""
        if sync.meets_after_step:  # learners' gradients are never summed, so nothing is measured
            sync.measure(False)
            return
        self._refuse_parts(sync.replica)
        weights = _preconditioner(sync.replica) if self.takes("preconditioned", step) else None
        sync.measure(self.compares(step), weights, (step - 1) // self._stride)

    def _refuse_parts(self, replica: Replica) -> None:
        """Raise ``UserError`` for a monitor that needs whole values, if each worker has only parts of them."""
        if not isinstance(replica, OwnedReplica):
            return
        divided = replica.split.blocks > 1 or len(replica.split.costs) > 1
        refused = {
            "noise_scale needs the whole gradient of a slot": self._needed["norms"] and divided,
            "noise_scale_adam needs an optimizer's whole state": self._needed["preconditioned"],
            "curvature needs whole parameters on each worker": self.curved and (divided or replica.equal_passes),
        }
        for rule, refuses in refused.items():
            if refuses:
                raise UserError(
                    rule, "a mechanism that divides them", "leave the monitor out, or use another mechanism"
                )

    def refuse_cut_losses(self, call: str) -> None:
        """Raise ``UserError`` if a monitor needs the whole loss of a batch, which ``call`` does not give at once."""
        if self.curved:
            fix = "add losses up, session.backward(one + other), or leave the monitor out"
            raise UserError("curvature needs the whole loss of a batch at once", call, fix)

    def bend(self, sync: Sync, loss: torch.Tensor, share: BatchSlice, step: int) -> None:
        """Measure the curvature of a share's loss before its backward pass, if that is due.

        Random streams and buffers are restored afterwards: checkpointed parts of the model run again in the
        measurement, and a backward pass may draw, too.
        """
        if not share.weight or not (self.takes("trace", step) or self.takes("sharpness", step)):
            return
        seed, params = derive(self._seed, "curvature", step), sync.replica.params
        try:
            with streams_kept(), sync.replica.buffers.kept():
                if self.takes("trace", step):
                    sync.record_statistic("trace", share.weight * hessian_trace(loss, params, seed=seed))
                if share.samples.start == 0 and self.takes("sharpness", step):
                    sync.record_statistic("sharpness", top_eigenvalue(loss, params, seed=seed))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            fix = "leave the monitor curvature out"
            raise UserError("curvature needs a loss that can be differentiated twice", error, fix) from error

    def read(self, step: int, batch: int, workers: int, statistics: StepStatistics, times: Sequence[float]) -> None:
        """Update the monitors after a step's reduction. ``times``: the workers' times in the control vector."""
        reading = Reading(
            step=step,
            batch=batch,
            workers=workers,
            loss=statistics.parts["loss"],
            norms=_norms(batch, statistics, "square", 0),
            preconditioned=_norms(batch, statistics, "weighted", 1) if self.takes("preconditioned", step) else None,
            times=tuple(WorkerTimes(*times[i : i + 3]) for i in range(0, 3 * workers if times else 0, 3)),
            sharpness=statistics.parts["sharpness"] if self.takes("sharpness", step) else None,
            trace=statistics.parts["trace"] if self.takes("trace", step) else None,
        )
        self._signals = None
        for monitor in self.monitors:
            if _due(monitor, step):
                self._states[monitor.name] = monitor.update(self._states[monitor.name], reading)

    @property
    def signals(self) -> dict[str, Signal]:
        """The signals that are known now."""
        if self._signals is None:
            self._signals = {}
            for monitor in self.monitors:
                self._signals |= monitor.signals(self._states[monitor.name])
        return self._signals

    @property
    def gives(self) -> frozenset[str]:
        """The names of all signals that the monitors can give."""
        return frozenset().union(*(monitor.gives for monitor in self.monitors))

    def to_json(self) -> dict[str, Any]:
        """The states, by monitor."""
        return self._states

    def load(self, states: dict[str, Any]) -> None:
        """Go on from ``states``. A monitor that is not in them, or in another version, begins anew."""
        alike = [name for name, state in self._states.items() if name in states and set(states[name]) == set(state)]
        self._states |= {name: states[name] for name in alike}
        self._signals = None


def _due(monitor: Monitor, step: int) -> bool:
    return (step - 1) % monitor.every == 0


def _norms(batch: int, statistics: StepStatistics, name: str, which: int) -> GradientNorms | None:
    parts = round(statistics.parts["count"])
    if statistics.norms is None or parts < 2 or (which == 1 and statistics.norms[1] == 0.0):
        return None
    return GradientNorms(batch, parts, statistics.parts[name], statistics.norms[which])


def _preconditioner(replica: Replica) -> list[torch.Tensor] | None:
    """1 / (sqrt(v) + eps) of every parameter; None before the first step. v is Adam's bias-corrected second moment."""
    params, optimizer = replica.params, replica.optimizer
    settings = {p: group for group in optimizer.param_groups for p in group["params"]}
    if any("betas" not in group for group in settings.values()):
        fix = "use Adam or AdamW, or the monitor noise_scale"
        raise UserError("noise_scale_adam needs an optimizer with second moments", type(optimizer).__name__, fix)
    weights = []
    for p in params:
        state = optimizer.state.get(p, {})
        if p not in settings or "exp_avg_sq" not in state:
            return None
        corrected = state["exp_avg_sq"] / (1 - settings[p]["betas"][1] ** float(state["step"]))
        weights.append((corrected.sqrt() + settings[p]["eps"]).reciprocal())
    return weights
