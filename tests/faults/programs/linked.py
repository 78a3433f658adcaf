"""The program of ``elastic.py`` on links between hosts that are told instead of measured, and as told turn slow. A
trial of routes confirms what the model of these links has proposed.

All else is as it is: who notices that reductions take longer, what is chosen by the links, how the routes are changed.
"""

from __future__ import annotations

import elastic
import elastune.train.adaptation.routing as routing
from elastic import config  # noqa: F401
from elastune.train.adaptation.routing import LinkWatch

SLOW_HOST, SLOW_FROM, SLOW_UNTIL = 3, 12, 30  # steps
FAST_BYTES_S, SLOW_BYTES_S, LATENCY_S = 125e6, 5e6, 2e-4


def train(session) -> None:
    def slow() -> bool:
        return SLOW_FROM <= session.step < SLOW_UNTIL

    def told(group, hosts) -> list[float]:
        names = list(dict.fromkeys(hosts))
        own = names.index(hosts[group.rank])
        rates = [SLOW_BYTES_S if slow() and SLOW_HOST in (own, to) else FAST_BYTES_S for to in range(len(names))]
        return [value for to, rate in enumerate(rates) for value in ((LATENCY_S, rate) if to != own else (0.0, 0.0))]

    class Watch(LinkWatch):
        def observe(self, waits_s) -> None:
            super().observe([0.4 if slow() else 0.02] * len(waits_s))

    routing.probe_links = told
    routing.time_routes = lambda group, ways, numel, num_slots: [0.2, 0.1]
    session._parts.adapter.routing._watch = Watch()
    elastic.train(session)
