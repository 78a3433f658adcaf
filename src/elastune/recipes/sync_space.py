"""A ready part of a search space: how workers agree. Only what the chosen strategy can be told is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from elastune.core.sync_choice import SETTING_NAMES
from elastune.core.sync_plan import SETTINGS, Moments, Send
from elastune.recipes.spaces import Bounds, WholeBounds, check_ranges, choose_from, draw_float, draw_int


def suggest_sync(
    trial: Any,
    *,
    strategies: Sequence[str] = ("allreduce", "local"),
    learners: Sequence[int] = (8,),
    every: WholeBounds = (2, 64),
    moments: Sequence[str] = ("mean",),
    send: Sequence[str] = ("whole",),
    mix: WholeBounds = 1,
    pull: Bounds = 0.1,
    outer_lr: Bounds = 0.7,
    outer_momentum: Bounds = 0.9,
    staleness: WholeBounds = 1,
    fragments: WholeBounds = 1,
    cycles: WholeBounds = 1,
) -> dict[str, Any]:
    """Choose a sync strategy (docs/sync.md) and its settings.

    A range is (low, high), or one number that is not searched. A trial with more workers than learners is infeasible.

    Args:
        trial: The argument of ``space(trial)``.
        strategies: Any of "allreduce", "local", "diloco", "averaging", "gossip", "pair_averaging" and
            "parameter_server".
        learners: Numbers of learners that a global batch may be divided into.
        every: Global batches of a round, drawn on a log scale.
        moments: "mean", "fresh" or both: what becomes of the optimizer's state where a round ends.
        send: Any of "whole", "bf16", "int8" and "int4": what ``local`` and ``diloco`` round numbers to that they
            exchange. A trial that rounds and has more than one of ``fragments`` or ``cycles`` is infeasible.
        mix: Global batches between two mixes of ``averaging``, ``gossip`` and ``pair_averaging``, on a log scale. A
            trial with as many as ``every``, or more, is infeasible.
        pull: For ``averaging``.
        outer_lr, outer_momentum: For ``diloco``.
        staleness: For ``parameter_server``, in global batches, from 1 on; a trial with more than ``every`` - 2 is
            infeasible.
        fragments, cycles: For ``diloco``; a trial of fewer than three global batches for each exchange is infeasible.

    Returns:
        The strategy as ``sync``, and a value for every setting of a strategy; None where the chosen one has no use for
        it.

    Raises:
        UserError: For an unknown strategy, and for settings that no strategy can have.

    Example:
        >>> elastune.suggest_sync(trial, strategies=("allreduce", "local"), learners=(4, 8), every=(4, 64))
    """
    check_ranges(every=every, mix=mix, pull=pull, outer_lr=outer_lr, outer_momentum=outer_momentum, staleness=staleness)
    check_ranges(fragments=fragments, cycles=cycles)
    for count in learners:
        check_ranges(learners=count)
    chosen = choose_from(trial, "sync", strategies, SETTINGS)
    own = SETTINGS[chosen]
    found: dict[str, Any] = {"sync": chosen, **dict.fromkeys(SETTING_NAMES)}
    named = (("learners", learners, None), ("moments", moments, get_args(Moments)), ("send", send, get_args(Send)))
    for name, choices, known in named:
        if name in own:
            found[name] = choose_from(trial, name, choices, known)
    counts = {"every": every, "mix": mix, "staleness": staleness, "fragments": fragments, "cycles": cycles}
    for name, whole in counts.items():
        if name in own:
            found[name] = draw_int(trial, name, whole, log=name in ("every", "mix"))
    for name, bounds in (("pull", pull), ("outer_lr", outer_lr), ("outer_momentum", outer_momentum)):
        if name in own:
            found[name] = draw_float(trial, name, bounds)
    return found
