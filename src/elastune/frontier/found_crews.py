"""The crews that a search found beside those asked about: a space may choose who trains. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastune.core.run import Means
from elastune.frontier.criteria import FrontierCriteria
from elastune.frontier.lineup import Standing, standing_of
from elastune.frontier.plan import FrontierPlan
from elastune.frontier.trainings import Training
from elastune.search.analysis.front import nondominated

MOST = 4
"""Of them that get rows of their own, since each may have to be confirmed."""


def found_crews(plan: FrontierPlan, trainings: Sequence[Training], by: FrontierCriteria) -> list[Means]:
    """Those that the space chose where no other training of the search beats theirs, the best in time first.

    By quality in validation, time and cost, each on who it was trained for.
    """
    searched = [t for t in trainings if t.phase == "search" or t.crew is not None]
    good = [t for t in searched if t.run is not None and t.result.state == "complete"]
    if not good:
        return []
    name, sign = plan.quality.name, -1.0 if plan.quality.direction == "max" else 1.0
    table = []
    for training in good:
        kind = plan.kind_for_search(training)
        seconds, _ = by.seconds(training, kind)
        table.append([sign * training.result.metrics[name], seconds, by.cost(kind.workers, seconds)])
    known = set(map(standing_of, plan.lineup.crews))
    best: dict[Standing, Means] = {}
    for place in sorted(np.flatnonzero(nondominated(np.array(table))), key=lambda i: table[i][1]):
        crew = good[place].crew
        if crew is not None and standing_of(crew) not in known:
            best.setdefault(standing_of(crew), crew)
    return list(best.values())[:MOST]
