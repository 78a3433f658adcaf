"""What the kit is tried on."""

from __future__ import annotations

from collections.abc import Callable

from elastune.core.communication import BFloat16, Int8, PowerSgd, TopK
from elastune.core.slots import Mode
from elastune.core.sync_plan import SyncPlan
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.sync.allreduce import CompressedAllReduce, ExactAllReduce, FastAllReduce
from elastune.parallel.sync.base import Sync
from elastune.parallel.sync.rounds import RoundSync
from elastune.testing.kits.mechanism import SLOTS
from elastune.testing.kits.sync import CONTROL


def make_exact(replica: Replica, comms: Comms) -> Sync:
    return ExactAllReduce(replica, comms, SLOTS, CONTROL, elastic=True)


def make_fast(replica: Replica, comms: Comms) -> Sync:
    return FastAllReduce(replica, comms, CONTROL, elastic=True)


def make_bf16(replica: Replica, comms: Comms) -> Sync:
    return CompressedAllReduce(replica, comms, BFloat16(), CONTROL, elastic=True)


def make_int8(replica: Replica, comms: Comms) -> Sync:
    return CompressedAllReduce(replica, comms, Int8(), CONTROL, elastic=True)


def make_power_sgd(replica: Replica, comms: Comms) -> Sync:
    return CompressedAllReduce(replica, comms, PowerSgd(1), CONTROL, elastic=True)


def make_top_k(replica: Replica, comms: Comms) -> Sync:
    return CompressedAllReduce(replica, comms, TopK(0.2), CONTROL, elastic=True)


def _rounds(text: str, mode: Mode = "exact", name: str = "") -> Callable[[Replica, Comms], Sync]:
    def make(replica: Replica, comms: Comms) -> Sync:
        return RoundSync(replica, comms, SyncPlan.parse(text), SLOTS, CONTROL, mode=mode, elastic=True)

    make.__qualname__ = make.__name__ = f"make_{name or text.partition(':')[0]}_{mode}"
    return make


make_local_exact = _rounds("local:learners=4,every=3")
make_local_fast = _rounds("local:learners=4,every=3", "fast")
make_diloco_exact = _rounds("diloco:learners=4,every=3,moments=fresh")
make_streaming_exact = _rounds("diloco:learners=4,every=7,fragments=2", name="streaming")
make_diloco_fast = _rounds("diloco:learners=4,every=3,quorum=2", "fast")
make_local_int8_exact = _rounds("local:learners=4,every=3,send=int8", name="local_int8")
make_diloco_bf16_fast = _rounds("diloco:learners=4,every=3,send=bf16", "fast", "diloco_bf16")
make_averaging_exact = _rounds("averaging:learners=4,every=3,pull=0.3")
make_gossip_exact = _rounds("gossip:learners=4,every=3")
make_parameter_server_exact = _rounds("parameter_server:learners=4,every=4,staleness=1")
make_pair_averaging_exact = _rounds("pair_averaging:learners=4,every=4,mix=2")
make_pair_averaging_fast = _rounds("pair_averaging:learners=4,every=8,mix=2", "fast")
