"""The policy ``spot`` of a run, for its controller: it decides where hosts are known, not in workers."""

from __future__ import annotations

from pathlib import Path

from elastune.cluster.spot_watch import SpotWatch
from elastune.cluster.trace_files import read_host_prices
from elastune.core.cost import ON_DEMAND
from elastune.core.errors import UserError
from elastune.core.run import Adapt, RunSpec
from elastune.policies.library.registry import build
from elastune.policies.library.spot import Spot
from elastune.train.program.load import LoadedProgram

CHANGEOVER_S = 10.0  # until a warm worker trains, and the pauses; generous


def spot_of(adapt: Adapt, program: LoadedProgram) -> list[Spot]:
    """The policies ``spot`` among those that are asked for. Raises ``UserError`` for one that is wrong."""
    policies = [build(text, program.policies).policy for text in adapt.policies]
    return [policy for policy in policies if isinstance(policy, Spot)]


def spot_watch(spec: RunSpec, program: LoadedProgram) -> SpotWatch | None:
    """What asks the policy ``spot`` while the run goes on; None where it was not asked for. Raises ``UserError``."""
    found = spot_of(spec.adapt, program)
    if not found:
        return None
    if len(found) > 1:
        raise UserError("a run has one deadline", f"the policy spot {len(found)} times", "leave the others out")
    prices = read_host_prices(Path(found[0].prices), ON_DEMAND, told=True)
    return SpotWatch(found[0].rules(spec.most_workers, CHANGEOVER_S), prices)
