"""Views of thousands of workers are short on the wire, and come out as they went in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.elastic.wire.messages import InstallView, decode, encode
from elastune.elastic.wire.view import MOST_MEMBERS, View

workers = st.lists(st.integers(0, 40), unique=True).map(tuple)


@given(workers, workers, workers, st.lists(st.sampled_from(["a", "b", "[]"])).map(tuple))
def test_a_view_survives_the_wire(
    members: tuple[int, ...], joiners: tuple[int, ...], leavers: tuple[int, ...], hosts: tuple[str, ...]
) -> None:
    view = View(7, members, True, joiners, hosts=hosts, leavers=leavers)
    assert decode(encode(InstallView(view))[:-1]) == InstallView(view)
    assert [view.ranks[worker] for worker in members] == list(range(len(members)))


def test_the_workers_of_a_host_are_said_once() -> None:
    members = tuple(range(8192))
    view = View(1, members, initial=True, hosts=tuple(f"host{worker // 8:04d}" for worker in members))
    line = encode(InstallView(view))
    assert len(line) < 20_000
    assert decode(line[:-1]) == InstallView(view)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("members", [1, 2]),
        ("members", [[1]]),
        ("members", [["1", 2]]),
        ("members", [[1, True]]),
        ("members", [[1, 0]]),
        ("members", [[1, -5]]),
        ("members", [[0, MOST_MEMBERS], [0, 1]]),
        ("members", {"1": 2}),
        ("hosts", [[1, 2]]),
        ("hosts", [["a", 10**12]]),
        ("joiners", "12"),
    ],
)
def test_what_is_no_view_is_refused(field: str, text: object) -> None:
    fields = {"number": 1, "members": [[0, 2]], field: text}
    with pytest.raises(ValueError, match=field):
        decode(json.dumps({"view": fields, "kind": "install_view"}).encode())
