"""What a run measures of itself: from the sums that a step's reduction brought to the monitors' states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elastune.adapt.monitors.base import GradientNorms, Monitor, Need, Reading, State, WorkerTimes
from elastune.adapt.monitors.hessian import hessian_trace, top_eigenvalue
from elastune.adapt.monitors.registry import choose
from elastune.core.batch_slices import BatchSlice
from elastune.core.decisions import Signal
from elastune.core.errors import UserError
from elastune.core.run import Mode, derive
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.sync.base import StepStatistics, Sync
from elastune.train.rng import streams_kept


class Monitoring:
    """The monitors of a run and their states, equal on every worker."""

    def __init__(self, texts: Iterable[str], seed: int) -> None:
        self._monitors = choose(texts)
        self._states: dict[str, State] = {monitor.name: monitor.init() for monitor in self._monitors}
        self._seed = seed
        self._signals: dict[str, Signal] | None = {}
        taking = [monitor.every for monitor in self._monitors if monitor.needs & {"norms", "preconditioned"}]
        self._stride = min(taking, default=1)  # steps from one reading of norms to the next
        self._known = {need: any(need in monitor.needs for monitor in self._monitors) for need in _NEEDS}

    def takes(self, need: Need, step: int) -> bool:
        """Whether step ``step``, counted from 1, is to bring what some monitor needs."""
        return self._known[need] and any(need in monitor.needs and _due(monitor, step) for monitor in self._monitors)

    def compares(self, step: int) -> bool:
        """Whether step ``step`` takes norms of parts of its batch."""
        return self.takes("norms", step) or self.takes("preconditioned", step)

    def unmeasured(self, step: int, found: StepStatistics, mode: Mode) -> tuple[tuple[str, ...], str]:
        """The monitors that compare parts of step ``step``'s batch, where it had one part; and why it had."""
        if not self.compares(step) or found.parts["count"] >= 2:
            return (), ""
        names = tuple(m.name for m in self._monitors if m.needs & {"norms", "preconditioned"})
        if found.norms is None:
            return names, "LBFGS evaluates a batch again and again"
        one, cut = ("a worker", "use --mode exact or two workers") if mode == "fast" else ("a slot", "use two slots")
        return names, f"one pass of {one} is all of the batch, and to cut it would change what is trained; {cut}"

    def prepare(self, sync: Sync, step: int) -> None:
        """Before a step: what is to be measured of it."""
        if sync.meets_after_step:  # learners' gradients are never summed up: of them nothing is measured
            sync.measure(False)
            return
        self._refuse_parts(sync.replica)
        weights = _preconditioner(sync.replica) if self.takes("preconditioned", step) else None
        sync.measure(self.compares(step), weights, (step - 1) // self._stride)

    def _refuse_parts(self, replica: Replica) -> None:
        """Raise ``UserError`` for what cannot be measured where no worker has the whole of it."""
        if not isinstance(replica, OwnedReplica):
            return
        divided = replica.split.blocks > 1 or len(replica.split.costs) > 1
        curved = self._known["trace"] or self._known["sharpness"]
        refused = {
            "noise_scale needs the whole gradient of a slot": self._known["norms"] and divided,
            "noise_scale_adam needs an optimizer's whole state": self._known["preconditioned"],
            "curvature needs whole parameters on each worker": curved and (divided or replica.equal_passes),
        }
        for rule, refuses in refused.items():
            if refuses:
                raise UserError(
                    rule, "a mechanism that divides them", "leave the monitor out, or use another mechanism"
                )

    def refuse_more(self) -> None:
        """Raise ``UserError`` where a batch's losses come one after another, and are needed at once."""
        if self._known["trace"] or self._known["sharpness"]:
            fix = "add losses up, session.backward(one + other), or leave the monitor out"
            raise UserError("curvature needs the whole loss of a batch at once", "more=True", fix)

    def bend(self, sync: Sync, loss: torch.Tensor, share: BatchSlice, step: int) -> None:
        """Before a share's backward pass: measure the curvature of its loss, where that is due.

        What the measurement draws, and what it moves in buffers, is taken back: parts of the model that are
        checkpointed run again in it, and a backward pass may draw, too.
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

    def read(self, step: int, batch: int, workers: int, found: StepStatistics, times: Sequence[float]) -> None:
        """After a step's reduction: ``times`` as the control vector brought them."""
        reading = Reading(
            step=step,
            batch=batch,
            workers=workers,
            loss=found.parts["loss"],
            norms=_norms(batch, found, "square", 0),
            preconditioned=_norms(batch, found, "weighted", 1) if self.takes("preconditioned", step) else None,
            times=tuple(WorkerTimes(*times[i : i + 3]) for i in range(0, 3 * workers if times else 0, 3)),
            sharpness=found.parts["sharpness"] if self.takes("sharpness", step) else None,
            trace=found.parts["trace"] if self.takes("trace", step) else None,
        )
        self._signals = None
        for monitor in self._monitors:
            if _due(monitor, step):
                self._states[monitor.name] = monitor.update(self._states[monitor.name], reading)

    @property
    def signals(self) -> dict[str, Signal]:
        """What can be said by now."""
        if self._signals is None:
            self._signals = {}
            for monitor in self._monitors:
                self._signals |= monitor.signals(self._states[monitor.name])
        return self._signals

    @property
    def gives(self) -> frozenset[str]:
        """The names of all signals that there may be."""
        return frozenset().union(*(monitor.gives for monitor in self._monitors))

    def __bool__(self) -> bool:
        return bool(self._monitors)

    @property
    def times(self) -> bool:
        """Whether workers tell each other how long their steps take."""
        return self._known["times"]

    def to_json(self) -> dict[str, Any]:
        """The states, by monitor."""
        return self._states

    def load(self, states: dict[str, Any]) -> None:
        """Go on from ``states``; a monitor that they do not have, or of another version, begins."""
        alike = [name for name, own in self._states.items() if name in states and set(states[name]) == set(own)]
        self._states |= {name: states[name] for name in alike}
        self._signals = None


_NEEDS: tuple[Need, ...] = ("norms", "preconditioned", "times", "sharpness", "trace")


def _due(monitor: Monitor, step: int) -> bool:
    return (step - 1) % monitor.every == 0


def _norms(batch: int, found: StepStatistics, name: str, which: int) -> GradientNorms | None:
    parts = round(found.parts["count"])
    if found.norms is None or parts < 2 or (which == 1 and found.norms[1] == 0.0):
        return None
    return GradientNorms(batch, parts, found.parts[name], found.norms[which])


def _preconditioner(replica: Replica) -> list[torch.Tensor] | None:
    """1 / (sqrt(v) + eps) of every parameter, v Adam's bias-corrected second moment; None before there is one."""
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
