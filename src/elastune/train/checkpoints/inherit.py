"""A run that begins where another one is: with its weights and the state of its optimizer, under settings of its own.

It is what population-based training does with a member that does badly (Jaderberg et al. 2017, "Population Based
Training of Neural Networks", section 3: *exploit* copies weights, *explore* changes hyperparameters).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from elastune.core.errors import UserError
from elastune.train.checkpoints.parts import load_states
from elastune.train.schedules import learning_rates
from elastune.train.training_state import TrainingState, shapes_of

_BUFFERS = {"momentum": "momentum_buffer", "amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
"""Options of torch's optimizers, and what a parameter's state holds because of them."""

_WAITING = ("best", "num_bad_epochs", "cooldown_counter")  # what a plateau has seen


def inherit(trained: TrainingState, state: Mapping[str, Any], source: str) -> None:
    """Take over ``state``, the ``TrainingState.state`` of another run, which came from ``source``.

    Parameters, buffers and what the optimizer keeps for each parameter are the other run's. Learning rates, momentum
    and whatever else parameter groups hold are as this run's program built them; its schedulers are stepped as often as
    the other's were, so that the rate is what this run's own schedule gives there. Raises ``UserError`` where shapes,
    the optimizer's kind or the number of schedulers differ.
    """
    _check(trained, state, source)
    optimizer = trained.optimizer
    taken = {"model": state["model"], "optimizer": {**state["optimizer"], "param_groups": trained.groups}}
    for part in trained.saved_parts:
        if part.name in taken:
            part.load_state_dict(taken[part.name])
    for group in optimizer.param_groups:
        for p in group["params"]:
            _fit_options(group, optimizer.state.get(p), p)
    trained.flags.set(state["built"].get("frozen", ()))
    _move(trained, state)


def take_over(trained: TrainingState, taken: Mapping[str, Mapping[str, Any]], source: str) -> None:
    """Begin with the ``model`` of another program, and with what it has of the ``optimizer`` by parameters' names.

    Options of the optimizer stay this program's. Raises ``UserError`` where names or shapes differ.
    """
    own, found = trained.shapes, shapes_of(taken["model"])
    for name in {**own, **found}:
        if own.get(name) != found.get(name):
            rule, fix = "weights fit a model of the same names and shapes", "build the model that they are of"
            raise UserError(rule, f"{name}: {own.get(name)}, in {source}: {found.get(name)}", fix)
    optimizer = {"state": taken["optimizer"], "param_groups": trained.groups}
    load_states(trained.saved_parts[:2], {"model": taken["model"], "optimizer": optimizer}, source)


def _check(trained: TrainingState, state: Mapping[str, Any], source: str) -> None:
    rule = "a child has the shapes, optimizer and schedulers of its parent"
    own, found = trained.shapes, shapes_of(state["model"])
    for name in {**own, **found}:
        if own.get(name) != found.get(name):
            fix = "keep fixed what decides the shapes of the model"
            raise UserError(rule, f"{name}: {own.get(name)}, in {source}: {found.get(name)}", fix)
    kind, other = type(trained.optimizer).__name__, state["built"]["kinds"][0]
    if kind != other:
        raise UserError(rule, f"{kind}, in {source}: {other}", "keep the optimizer fixed")
    sizes = [len(group["params"]) for group in trained.groups]
    others = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
    if sizes != others:
        raise UserError(rule, f"parameter groups of {sizes}, in {source}: {others}", "keep parameter groups fixed")
    if len(trained.schedulers) != len(state["schedulers"]["states"]):
        counts = f"{len(trained.schedulers)} schedulers, in {source}: {len(state['schedulers'])}"
        raise UserError(rule, counts, "prepare as many of them, constant ones too")


def _fit_options(group: Mapping[str, Any], kept: dict[str, Any] | None, parameter: torch.Tensor) -> None:
    """What an option calls for is there, what none calls for is not: torch makes it with the first step only."""
    if not kept:
        return
    for option, name in _BUFFERS.items():
        if option not in group:
            continue
        if not group[option]:
            kept.pop(name, None)
        elif kept.get(name) is None:
            kept[name] = torch.zeros_like(parameter)


def _move(trained: TrainingState, state: Mapping[str, Any]) -> None:
    """Step the schedulers to where the other run's are.

    Of several, one may step with every batch and one with every epoch: they take turns, evenly.
    """
    turns: list[tuple[float, int]] = []
    for i, (scheduler, other) in enumerate(zip(trained.schedulers, state["schedulers"]["states"], strict=True)):
        steps = _steps(other)
        if isinstance(scheduler, ReduceLROnPlateau):
            _wait_alike(scheduler, other, steps)
            turns += [(math.inf, i)] * _reductions(state, i)
        else:
            turns += [((step + 1) / steps, i) for step in range(steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "before optimizer.step()": those steps were the other run's
        for _, i in sorted(turns):
            scheduler = trained.schedulers[i]
            try:
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler._reduce_lr(scheduler.last_epoch)
                else:
                    scheduler.step()
            except ValueError as error:  # such as OneCycleLR beyond its last step
                rule = "a child's schedule reaches as far as its parent has come"
                raise UserError(rule, f"{type(scheduler).__name__}: {error}", "make the schedule longer") from None
    for scheduler in trained.schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.load_state_dict({"_last_lr": learning_rates(trained.optimizer)})


def _steps(scheduler: Mapping[str, Any]) -> int:
    """How often a scheduler with this state was stepped."""
    if "last_epoch" in scheduler:
        return int(scheduler["last_epoch"])
    if scheduler.get("_schedulers"):  # a chain counts nothing of its own
        return max(_steps(part) for part in scheduler["_schedulers"])
    rule = "a child's schedulers are stepped as often as its parent's were"
    raise UserError(rule, "one whose state has no last_epoch", "derive it from torch's LRScheduler")


def _wait_alike(scheduler: ReduceLROnPlateau, other: Mapping[str, Any], steps: int) -> None:
    seen = {name: other[name] for name in _WAITING if other.get("mode") == scheduler.mode}
    scheduler.load_state_dict({**seen, "last_epoch": steps})


def _reductions(state: Mapping[str, Any], i: int) -> int:
    """How often plateau scheduler ``i`` of the other run has reduced its rates: torch keeps no count."""
    other = state["schedulers"]["states"][i]
    if state["built"]["kinds"][1 + i] != ReduceLROnPlateau.__name__:
        return 0
    for built, group in zip(state["built"]["rates"], state["optimizer"]["param_groups"], strict=True):
        if built > 0 and group["lr"] > 0:
            return max(0, round(math.log(float(group["lr"]) / built) / math.log(other["factor"])))
    return 0
