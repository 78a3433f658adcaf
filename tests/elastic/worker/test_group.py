"""What every group of workers offers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastune.comm.group import Group
from elastune.elastic.worker.group import Rows, WorkerGroup


class Echoing(WorkerGroup):
    """As if every one of three workers had given the same."""

    def gather(self, values: list[float]) -> Rows:  # type: ignore[override]
        assert all(x == float(int(x)) and 0 <= x < 2**48 for x in values), "exact in double precision"
        return [list(values)] * 3


@given(st.binary(max_size=100))
def test_bytes_travel_as_whole_numbers(data: bytes) -> None:
    assert WorkerGroup(Group()).gather_bytes(data) == [data]
    assert Echoing(Group()).gather_bytes(data) == [data] * 3
