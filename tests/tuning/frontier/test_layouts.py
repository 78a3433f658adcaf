"""On which layouts a crew's step is timed, and which links are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.frontiers import MODEL

from elastune.core.mesh import Mesh
from elastune.core.plan.links import Hosts, RingLink
from elastune.core.run import ExecutionSettings
from elastune.tuning.frontier.criteria import Times
from elastune.tuning.frontier.short_runs import Timing, layout_timings
from elastune.tuning.frontier.trainings import StepKind
from elastune.tuning.frontier.worker_layouts import layouts_of

ONE, TWO, FOUR = layouts_of(ExecutionSettings(), (1, 2, 4), ())
(DIVIDED,) = layouts_of(ExecutionSettings(), (), (Mesh(data=2, tensor=2),))


@pytest.mark.parametrize(
    ("layout", "workers_per_host", "spreads"),
    [
        (ONE, 2, [False]),
        (TWO, 2, [False, True]),
        (TWO, 4, [False, True]),
        (FOUR, 2, [False]),  # there is no other layout on hosts of two
        (TWO, 1, [False]),
        (TWO, None, [False]),  # one host
        (DIVIDED, 4, [False]),
    ],
)
def test_crews_that_fit_one_of_several_hosts_are_timed_on_all_of_them_too(
    layout: ExecutionSettings, workers_per_host: int | None, spreads: list[bool]
) -> None:
    assert layout_timings(64, layout, workers_per_host) == [Timing(64, layout, spread) for spread in spreads]


def test_links_are_told_where_there_are_several_hosts() -> None:
    assert Times(MODEL, {}).links == {}
    hosts = Hosts(RingLink(0.01, 1e-8), 2)
    result = Times(replace(MODEL, hosts=hosts), {}).links
    assert result == {"within a host": MODEL.link.to_record(), "across hosts": hosts.link.to_record()}
    assert list(Times(replace(MODEL, hosts=replace(hosts, workers_each=1)), {}).links) == ["across hosts"]


def test_a_mesh_takes_as_many_hosts_as_all_of_its_workers_need() -> None:
    hosts = Hosts(RingLink(0.01, 1e-8), 2)
    times = Times(replace(MODEL, hosts=hosts), {})
    across = times.model.reduction_s(2, hosts=2)
    assert times.expected_s(20, StepKind(DIVIDED.first_mesh)) == pytest.approx(0.01 + 0.001 * 10 + across)
    assert times.expected_s(20, StepKind(TWO.first_mesh)) == pytest.approx(
        0.01 + 0.001 * 10 + times.model.reduction_s(2, hosts=1)
    )
