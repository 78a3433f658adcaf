"""The program of ``elastic.py`` under policies that have its sums travel now like this, now like that."""

from __future__ import annotations

import random

from elastic import config, train  # noqa: F401
from elastune import Policy

NAMES = ("ring", "tree", "binary_tree", "star", "hierarchical", "native", "auto", "tree:chunk_kib=1")


class Rerouting(Policy):
    """Another topology after every step: one of the names, or any tree over the workers that there are."""

    monitors = ()

    def after_step(self, run) -> None:
        chance = random.Random(run.step)
        if run.step % 2:
            run.set_topology(chance.choice(NAMES))
            return
        order = list(range(run.size()))
        chance.shuffle(order)
        parents = [order[0]] * run.size()
        for at in range(1, run.size()):
            parents[order[at]] = order[chance.randrange(at)]
        run.set_tree(parents)


class Circling(Policy):
    """Asks for what is no tree."""

    monitors = ()

    def after_step(self, run) -> None:
        run.set_tree([1, 0, 0, 0][: run.size()])
