"""Who writes what of a checkpoint: each unit one worker, and one that holds it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.leaves import UNIT, Leaf, Split
from elastune.core.mesh import Mesh
from elastune.core.ownership import held, written

sizes = st.one_of(st.integers(1, 40), st.integers(UNIT - 1, 3 * UNIT + 1))


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """A model of some layers, of which some leaves are blocks of the tensor axis, and some are not trained."""
    blocks, layers = draw(st.sampled_from([1, 4])), draw(st.integers(4, 6))
    leaves: list[Leaf] = []
    for layer in range(layers):
        for kind in range(draw(st.integers(1, 3))):
            size, trained = draw(sizes), draw(st.booleans())
            cut = blocks > 1 and draw(st.booleans())
            for block in range(blocks) if cut else [None]:
                at = 0 if block is None else block * size
                name, of = f"{layer}.{kind}#{block}", f"{layer}.{kind}"
                leaves.append(Leaf(name, of, ((at, at + size),), layer=layer, block=block, trained=trained))
    return Split(tuple(leaves), blocks, (1.0,) * layers)


@settings(max_examples=40, deadline=None)
@given(
    splits(),
    st.builds(Mesh, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4])),
    st.integers(1, 3),
)
def test_each_element_has_one_writer_who_holds_it(split: Split, mesh: Mesh, copies: int) -> None:
    if split.blocks < mesh.tensor:
        mesh = Mesh(mesh.data, mesh.shard, 1, mesh.pipeline)
    spans: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(split.leaves))}
    for rank in range(mesh.workers):
        own = held(split, mesh, rank, copies)
        for segment in written(split, mesh, rank):
            spans[segment.leaf].append((segment.start, segment.stop))
            assert any(h.leaf == segment.leaf and h.start <= segment.start and segment.stop <= h.stop for h in own), (
                "a writer holds what it writes"
            )
    for leaf, found in spans.items():
        edges = sorted(found)
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])], split.leaves[leaf].name
        assert edges[-1][1] == split.leaves[leaf].size
