from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from elastune.parallel.comm.process_groups import _serve_store
from elastune.parallel.comm.sockets import listeners


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_store_of_a_default_group_is_bound_to_one_interface(address: str) -> None:
    before = set(listeners())
    store = _serve_store(address)
    assert [where for it, where in listeners().items() if it not in before] == [(address, store.port)]
    other = TCPStore(address, store.port, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
