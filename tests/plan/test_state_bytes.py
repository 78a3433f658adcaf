"""What a worker holds, by mechanism and mesh: arithmetic against the layout that runs use."""

from __future__ import annotations

import pytest

from elastune.core.leaves import Leaf, Split
from elastune.core.mechanism_name import MechanismName
from elastune.core.mesh import Mesh
from elastune.core.ownership import held
from elastune.plan.state_bytes import StateBytes, state_of_worker

SIZE = 1 << 18  # units in it divide by all meshes below
WHOLE = StateBytes(4.0 * SIZE, 4.0 * SIZE, 8.0 * SIZE)


def even(mesh: Mesh) -> Split:
    """A model whose layers are as many equal ones as there are stages, each in as many equal blocks as it takes."""
    share = SIZE // (mesh.tensor * mesh.pipeline)
    leaves = [
        Leaf(f"{layer}#{block}", f"{layer}", ((0, share),), "float32", trained=True, block=block, layer=layer)
        for layer in range(mesh.pipeline)
        for block in range(mesh.tensor)
    ]
    return Split(tuple(leaves), blocks=mesh.tensor, costs=(1.0,) * mesh.pipeline)


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize(
    ("mechanism", "mesh"),
    [
        ("zero", "shard=2"),
        ("zero", "shard=4"),
        ("zero", "data=2,shard=2"),
        ("sharded", "shard=4"),
        ("tensor", "tensor=4"),
        ("tensor", "data=2,tensor=2"),
        ("pipeline", "pipeline=4"),
        ("tensor+pipeline+zero", "shard=2,tensor=2,pipeline=2"),
    ],
)
def test_shares_are_those_of_the_layout(mechanism: str, mesh: str, copies: int) -> None:
    stood = Mesh.parse(mesh)
    split = even(stood)
    by_rank = held(split, stood, copies)
    found = state_of_worker(WHOLE, MechanismName.parse(mechanism), stood, copies)
    sizes = [sum(segment.size for segment in own) for own in by_rank]
    assert found.optimizer == pytest.approx(8.0 * max(sizes), rel=0.02)
    assert found.gradients == pytest.approx(4.0 * max(sizes), rel=0.02)
    assert found.copies == pytest.approx(8.0 * (max(sizes) - SIZE / stood.workers), rel=0.02)
    values = [
        {(s.leaf, s.start, s.stop) for s in own}
        | (set() if "sharded" in mechanism else {(i, 0, split.leaves[i].size) for i in split.computed(stood, rank)})
        for rank, own in enumerate(by_rank)
    ]
    assert found.parameters == pytest.approx(4.0 * max(map(covered, values)), rel=0.02)


def covered(stretches: set[tuple[int, int, int]]) -> int:
    """Elements that are in any of them."""
    total, reached = 0, (-1, 0)
    for leaf, start, stop in sorted(stretches):
        start = max(start, reached[1]) if leaf == reached[0] else start
        total += max(0, stop - start)
        reached = (leaf, max(stop, reached[1]) if leaf == reached[0] else stop)
    return total


def test_whole_on_every_worker() -> None:
    assert state_of_worker(WHOLE, MechanismName(), Mesh(data=4), 2) == WHOLE
