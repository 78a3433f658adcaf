"""Two links, found again in figures made with them, and what they say of worker counts that nobody timed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastune.core.journal.records import LinkMeasured
from elastune.core.plan.data_parallel import DataParallelStep, Observation, fit_parts
from elastune.core.plan.links import Hosts, RingLink, fit_link, fit_links, ring_allreduce_s

WITHIN, ACROSS = RingLink(2e-5, 3e-10), RingLink(4e-4, 9e-9)
TRUTH = DataParallelStep(2e-3, 1e-4, *WITHIN, 4_000_000, hosts=Hosts(ACROSS, 4))
GRADIENTS = [(batch, TRUTH.gradient_s(batch, 1)) for batch in (16, 64, 256)]


def measured(link: RingLink, workers: int, hosts: int = 1) -> LinkMeasured:
    """What an all-reduce tells whose slowest link is this one."""
    latency_s = float(ring_allreduce_s(link, 0, workers))
    return LinkMeasured(workers, latency_s, float(ring_allreduce_s(link, 1, workers)) - latency_s, hosts)


def test_both_links_are_found_again() -> None:
    links = [measured(WITHIN, 2), measured(WITHIN, 4), measured(ACROSS, 2, 2), measured(ACROSS, 8, 2)]
    timed = [
        Observation(4, 64, TRUTH.step_s(64, 4)),
        Observation(2, 64, TRUTH.step_s(64, 2, 2), hosts=2),
        Observation(8, 256, TRUTH.step_s(256, 8), hosts=2),
    ]
    result = fit_parts(GRADIENTS, TRUTH.grad_bytes, links, timed, workers_per_host=4)
    assert result.model.hosts is not None
    for link, truth in ((result.model.link, WITHIN), (result.model.hosts.link, ACROSS)):
        assert (link.latency_s, link.seconds_per_byte) == pytest.approx((truth.latency_s, truth.seconds_per_byte))
    assert result.errors == {
        "batch 64 on 2 workers of 2 hosts": pytest.approx(1.0),
        "batch 64 on 4 workers": pytest.approx(1.0),
        "batch 256 on 8 workers of 2 hosts": pytest.approx(1.0),
    }
    # 16 workers were never timed: they stand on four hosts.
    assert result.model.step_s(256, 16) == pytest.approx(TRUTH.gradient_s(256, 16) + 3 * 2 * (2e-5 + 1e6 * 3e-10)
                                                        + 3 * 2 * (4e-4 + 1e6 * 9e-9))  # fmt: skip


def test_as_few_hosts_as_it_takes() -> None:
    assert [TRUTH.hosts_for(workers) for workers in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert TRUTH.reduction_s(4) == ring_allreduce_s(WITHIN, 4_000_000, 4)
    assert TRUTH.reduction_s(4, hosts=4) == ring_allreduce_s(ACROSS, 4_000_000, 4)
    assert TRUTH.reduction_s(4, hosts=2) == ring_allreduce_s(WITHIN, 4_000_000, 2) + ring_allreduce_s(
        ACROSS, 4_000_000, 2
    )
    assert replace(TRUTH, hosts=None).reduction_s(8) == ring_allreduce_s(WITHIN, 4_000_000, 8)
    with pytest.raises(ValueError, match="room for at least one"):
        Hosts(ACROSS, 0)


def test_links_are_divided_by_the_rings_share() -> None:
    result = fit_link([measured(WITHIN, workers) for workers in (1, 2, 4)])
    assert result is not None
    assert (result.latency_s, result.seconds_per_byte) == pytest.approx((WITHIN.latency_s, WITHIN.seconds_per_byte))
    assert fit_link([measured(WITHIN, 1)]) is None


def test_a_link_that_nobody_measured_is_as_the_other() -> None:
    within, hosts = fit_links([measured(ACROSS, 2, 2)], 4)
    assert hosts is not None
    assert within == hosts.link
    assert fit_links([measured(WITHIN, 2)], 4)[1] is None
    assert fit_links([]) == (RingLink(), None)
