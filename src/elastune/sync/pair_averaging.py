"""Pair averaging: learners become the mean of pairs that are drawn anew each time."""

from __future__ import annotations

import random

from elastune.core.seeds import derive
from elastune.sync.peers import Peers


class PairAveraging(Peers):
    """In each mix learners are paired at random, by the run's seed, the same way on every worker; of an odd number one
    stays alone.

    (After Lian et al., "Asynchronous Decentralized Parallel SGD", ICML 2018, arXiv 1710.06952, whose learners ask each
    other whenever they are ready; here all meet at once, so that the result does not depend on who was quick. For
    ``fast`` mode see ``sync.async_pairs``.)
    """

    def sources(self, turn: int) -> list[int]:
        learners = list(range(self.plan.learners))
        random.Random(derive(self.seed, "pairs", self.rounds, turn)).shuffle(learners)
        found = list(range(self.plan.learners))
        for one, other in zip(learners[::2], learners[1::2], strict=False):
            found[one], found[other] = other, one
        return found
