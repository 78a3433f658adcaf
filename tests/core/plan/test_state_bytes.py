"""What a worker holds, by mechanism and mesh: arithmetic against the layout that runs use."""

from __future__ import annotations

import pytest

from elastune.core.layout import ParamBlock, Split, held
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.plan.memory import StateBytes, state_of_worker

SIZE = 1 << 18  # units in it divide by all meshes below
WHOLE = StateBytes(4.0 * SIZE, 4.0 * SIZE, 8.0 * SIZE)


def even(mesh: Mesh, undivided: float = 0.0) -> Split:
    """A model whose layers are as many equal ones as there are stages, each in as many equal blocks as it takes, but
    for the part that is ``undivided``.
    """
    layer_size = SIZE // mesh.pipeline
    left = int(layer_size * undivided)
    share = (layer_size - left) // mesh.tensor
    param_blocks = [
        ParamBlock(f"{layer}#{block}", f"{layer}", ((0, share),), "float32", trained=True, block=block, layer=layer)
        for layer in range(mesh.pipeline)
        for block in range(mesh.tensor)
    ]
    param_blocks += [
        ParamBlock(f"rest {layer}", f"rest {layer}", ((0, left),), layer=layer) for layer in range(mesh.pipeline)
    ]
    return Split(tuple(param_blocks), blocks=mesh.tensor, costs=(1.0,) * mesh.pipeline)


@pytest.mark.parametrize(("copies", "undivided"), [(1, 0.0), (2, 0.0), (3, 0.0), (1, 0.25), (2, 0.25)])
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
def test_shares_are_those_of_the_layout(mechanism: str, mesh: str, copies: int, undivided: float) -> None:
    stood, name = Mesh.parse(mesh), MechanismName.parse(mechanism)
    split = even(stood, undivided if name.tensor else 0.0)
    by_rank = held(split, stood, copies)
    result = state_of_worker(WHOLE, name, stood, copies, undivided)
    sizes = [sum(segment.size for segment in own) for own in by_rank]
    assert result.optimizer == pytest.approx(8.0 * max(sizes), rel=0.02)
    assert result.gradients == pytest.approx(4.0 * max(sizes), rel=0.02)
    added = (1 - undivided * name.tensor) / stood.workers + undivided * name.tensor / (stood.batch * stood.pipeline)
    assert result.copies == pytest.approx(8.0 * (max(sizes) - SIZE * added), rel=0.02)
    values = [
        {(s.param_block, s.start, s.stop) for s in own}
        | (
            set()
            if "sharded" in mechanism
            else {(i, 0, split.param_blocks[i].size) for i in split.computed(stood, rank)}
        )
        for rank, own in enumerate(by_rank)
    ]
    assert result.parameters == pytest.approx(4.0 * max(map(covered, values)), rel=0.02)


def covered(stretches: set[tuple[int, int, int]]) -> int:
    """Elements that are in any of them."""
    total, reached = 0, (-1, 0)
    for param_block, start, stop in sorted(stretches):
        start = max(start, reached[1]) if param_block == reached[0] else start
        total += max(0, stop - start)
        reached = (param_block, max(stop, reached[1]) if param_block == reached[0] else stop)
    return total


def test_whole_on_every_worker() -> None:
    assert state_of_worker(WHOLE, MechanismName(), Mesh(data=4), 2) == WHOLE
