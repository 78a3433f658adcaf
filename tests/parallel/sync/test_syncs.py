"""The kit, on every strategy, and on all-reduce compressed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

if str(Path(__file__).parent) not in sys.path:  # worker processes import it by its name
    sys.path.append(str(Path(__file__).parent))

from syncs_made import (
    make_averaging_exact,
    make_bf16,
    make_diloco_bf16_fast,
    make_diloco_exact,
    make_diloco_fast,
    make_exact,
    make_fast,
    make_gossip_exact,
    make_int8,
    make_local_exact,
    make_local_fast,
    make_local_int8_exact,
    make_pair_averaging_exact,
    make_pair_averaging_fast,
    make_parameter_server_exact,
    make_power_sgd,
    make_streaming_exact,
    make_top_k,
)

from elastune.testing.kits.sync import Event, SyncKit, same, trained


class TestExactAllReduce(SyncKit):
    make: ClassVar[Any] = staticmethod(make_exact)


class TestFastAllReduce(SyncKit):
    make: ClassVar[Any] = staticmethod(make_fast)


class TestBFloat16(SyncKit):
    make: ClassVar[Any] = staticmethod(make_bf16)


class TestInt8(SyncKit):
    make: ClassVar[Any] = staticmethod(make_int8)


class OwingKit(SyncKit):
    """What another object goes on from is equal on all workers; what a worker owes is not."""

    @pytest.mark.parametrize("event", ["abandon"])
    def test_nothing_shows_of(self, event: Event) -> None:
        super().test_nothing_shows_of(event)


class TestPowerSgd(OwingKit):
    make: ClassVar[Any] = staticmethod(make_power_sgd)


class TestTopK(OwingKit):
    make: ClassVar[Any] = staticmethod(make_top_k)


class TestLocal(SyncKit):
    make: ClassVar[Any] = staticmethod(make_local_exact)


class TestFastLocal(SyncKit):
    make: ClassVar[Any] = staticmethod(make_local_fast)


class TestDiLoCo(SyncKit):
    make: ClassVar[Any] = staticmethod(make_diloco_exact)


class TestRoundedLocal(SyncKit):
    make: ClassVar[Any] = staticmethod(make_local_int8_exact)


class TestRoundedDiLoCo(SyncKit):
    make: ClassVar[Any] = staticmethod(make_diloco_bf16_fast)


class TestStreaming(SyncKit):
    make: ClassVar[Any] = staticmethod(make_streaming_exact)


class TestQuorum(SyncKit):
    make: ClassVar[Any] = staticmethod(make_diloco_fast)


class TestAveraging(SyncKit):
    make: ClassVar[Any] = staticmethod(make_averaging_exact)


class TestGossip(SyncKit):
    make: ClassVar[Any] = staticmethod(make_gossip_exact)


class TestPairAveraging(SyncKit):
    make: ClassVar[Any] = staticmethod(make_pair_averaging_exact)


class TestParameterServer(SyncKit):
    make: ClassVar[Any] = staticmethod(make_parameter_server_exact)


class TestAsyncPairAveraging(SyncKit):
    """What a learner takes depends on who was quick, so nothing is compared with another run: workers are, as a round
    ends, whatever has become of it."""

    make: ClassVar[Any] = staticmethod(make_pair_averaging_fast)

    @pytest.mark.parametrize("event", ["abandon", "reload"])
    def test_nothing_shows_of(self, event: Event) -> None:
        one, other = trained(self.make, 2, event)
        same(one[0], other[0])

    def test_a_result_of_another_worker_is_as_good_as_ones_own(self) -> None:
        one, *others = trained(self.make, 3, "break")
        for state, totals in others:
            same(state, one[0])
            assert totals[0] == 3
