"""Meeting the other workers."""

from __future__ import annotations

import pytest

from elastune.core.errors import UserError
from elastune.core.run import Place
from elastune.parallel.comm.process_groups import join


def test_a_host_that_nobody_knows_is_refused_at_once() -> None:
    place = Place(rank=1, world=2, rendezvous="tcp://no-such-host.invalid:29500")
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        join(place)
