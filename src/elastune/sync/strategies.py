"""What learners do within a round and at its end, by what a plan asks for."""

from __future__ import annotations

from elastune.comm.group import Group
from elastune.core.fragments import fragments_of
from elastune.core.run import Mode
from elastune.core.sync_plan import Strategy, SyncPlan
from elastune.sync.async_pairs import AsyncPairAveraging
from elastune.sync.averaging import Averaging
from elastune.sync.diloco import DiLoCo
from elastune.sync.gossip import Gossip
from elastune.sync.local import Local, Values
from elastune.sync.pair_averaging import PairAveraging
from elastune.sync.parameter_server import ParameterServer
from elastune.sync.streaming import StreamingDiLoCo

_STRATEGIES: dict[Strategy, type[Local]] = {
    "local": Local,
    "diloco": DiLoCo,
    "averaging": Averaging,
    "gossip": Gossip,
    "pair_averaging": PairAveraging,
    "parameter_server": ParameterServer,
}


def strategy_of(plan: SyncPlan, like: Values, group: Group, mode: Mode) -> Local:
    """The strategy of ``plan`` for learners whose parameters are ``like``. Raises as ``check_model``."""
    kind = _STRATEGIES[plan.strategy]
    if plan.streams:
        kind = StreamingDiLoCo
    elif mode == "fast" and kind is PairAveraging:
        kind = AsyncPairAveraging
    return kind(plan, like, group)


def check_model(plan: SyncPlan, like: Values) -> None:
    """Raise ``UserError`` where a model with the parameters ``like`` cannot be trained so."""
    fragments_of([value.nbytes for value in like], plan.fragments)
