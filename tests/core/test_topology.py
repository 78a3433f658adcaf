"""Topologies as users write them, and what is refused."""

from __future__ import annotations

import pytest

from elastune.core.communication import Topology
from elastune.core.errors import UserError


@pytest.mark.parametrize("text", ["auto", "native", "ring", "star", "tree", "binary_tree", "hierarchical"])
@pytest.mark.parametrize("chunk", ["", ":chunk_kib=64"])
def test_a_text_says_what_it_was_read_from(text: str, chunk: str) -> None:
    parsed = Topology.parse(f" {text}{chunk} ")
    assert str(parsed) == text + chunk
    assert Topology.parse(str(parsed)) == parsed
    assert parsed.routed == (text not in ("auto", "native"))


def test_parents_are_read() -> None:
    parsed = Topology.parse("parents=[1, 1,0]:chunk_kib=7")
    assert (parsed.parents, parsed.chunk_kib, str(parsed)) == ((1, 1, 0), 7, "parents=[1,1,0]:chunk_kib=7")
    assert parsed == Topology("parents", (1, 1, 0), 7)
    assert Topology.parse("parents=[0]").fits(1)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "a topology is one of"),
        ("Tree", "a topology is one of"),
        ("tree:", "has the setting chunk_kib"),
        ("tree:chunk=3", "has the setting chunk_kib"),
        ("tree:chunk_kib=0", "a chunk has from 1"),
        ("tree:chunk_kib=99999999", "a chunk has from 1"),
        ("tree:chunk_kib=1,chunk_kib=2", "has the setting chunk_kib"),
        ("parents", "a list of ranks in brackets"),
        ("parents=[]", "a list of ranks in brackets"),
        ("parents=[0,-1]", "a list of ranks in brackets"),
        ("parents=[0,,1]", "a list of ranks in brackets"),
        ("parents=[0,1", "a list of ranks in brackets"),
        ("parents=[0,2]", "from 0 to 1"),
        ("parents=[1,0]", "one root"),
        ("parents=[0,1,0]", "one root"),
        ("parents=[0,2,3,1]", "no circle (got rank 1 to 2 to 3 to 1)"),
        ("parents=[" + ",".join(["0"] * 1025) + "]", "at most 1,024 ranks"),
    ],
)
def test_what_is_none_is_refused(text: str, rule: str) -> None:
    with pytest.raises(UserError) as refused:
        Topology.parse(text)
    assert rule in str(refused.value)
    assert "\n" not in str(refused.value)


def test_values_of_a_program_are_checked_too() -> None:
    for parents in ([0, 0.0], [False, 0], ["0", "0"], [0, 1]):
        with pytest.raises(UserError):
            Topology.of_parents(parents)  # type: ignore[arg-type]
    for parents in (3, None, "0,0"):
        with pytest.raises(UserError, match="parents are a list of ranks"):
            Topology.of_parents(parents)  # type: ignore[arg-type]
    for text in (3, None, ["tree"]):
        with pytest.raises(UserError, match="a topology is a text"):
            Topology.parse(text)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="parents need the shape"):
        Topology("tree", (0, 0))
    with pytest.raises(UserError, match="parents need the shape"):
        Topology("parents")


def test_workers_and_mechanism_have_to_go_with_it() -> None:
    Topology.parse("tree").check(3, "replicated")
    Topology().check(3, "zero")
    with pytest.raises(UserError, match="a parent for every rank"):
        Topology.parse("parents=[0,0]").check(3, "replicated")
    with pytest.raises(UserError, match="whole replicas"):
        Topology.parse("tree").check(3, "zero")
