"""Gossip: each learner takes the mean with one neighbour, another one each time."""

from __future__ import annotations

from elastune.sync.peers import Peers


class Gossip(Peers):
    """At its t-th mix learner i takes the values of learner i - 2^t: an exponential graph with one neighbour at a time.

    What all have thus goes to all within log2 of their number of mixes. Everyone gives one half and takes one, so that
    the weights of push-sum stay 1 and their mean stays what it was. (Source: Assran et al., "Stochastic Gradient Push",
    ICML 2019, arXiv 1811.10792, appendix A; the mean at a round's end is that of Chen et al., arXiv 2105.09080.)
    """

    def sources(self, turn: int) -> list[int]:
        learners = self.plan.learners
        hop = 1 << turn % max(1, (learners - 1).bit_length())
        return [(learner - hop) % learners for learner in range(learners)]
