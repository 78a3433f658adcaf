"""Which mesh so many workers make, who has which place in it, and who may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import UNBOUNDED, MeshChoice, assign_ranks, by_host, fitting_workers
from elastune.core.run import ExecutionSettings
from elastune.parallel.mechanisms.capabilities import meshes_of

SHARDS = MeshChoice(Mesh(shard=4), shard=UNBOUNDED)
LAYERS = MeshChoice(Mesh(data=2, tensor=2), tensor=4)
ALL_CAPABILITIES = MeshChoice(Mesh(shard=2, tensor=2, pipeline=2), shard=UNBOUNDED, tensor=4, pipeline=3)


@pytest.mark.parametrize(
    ("choice", "workers", "mesh"),
    [
        (MeshChoice(), 5, "data=5"),
        (SHARDS, 4, "shard=4"),
        (SHARDS, 3, "shard=3"),
        (SHARDS, 1, "data=1"),
        (SHARDS, 8, "data=2,shard=4"),
        (SHARDS, 5, "shard=5"),
        (MeshChoice(Mesh(data=2, shard=2), shard=UNBOUNDED), 3, "shard=3"),
        (MeshChoice(Mesh(data=2, shard=2), shard=UNBOUNDED), 6, "data=3,shard=2"),
        (LAYERS, 4, "data=2,tensor=2"),
        (LAYERS, 6, "data=3,tensor=2"),
        (LAYERS, 3, "tensor=3"),
        (LAYERS, 1, "data=1"),
        (MeshChoice(Mesh(data=2, tensor=2), tensor=2), 3, "tensor=2"),
        (MeshChoice(Mesh(data=2, tensor=2), tensor=2), 5, "data=2,tensor=2"),
        (MeshChoice(Mesh(pipeline=4), pipeline=4), 3, "pipeline=3"),
        (ALL_CAPABILITIES, 8, "shard=2,tensor=2,pipeline=2"),
        (ALL_CAPABILITIES, 4, "tensor=2,pipeline=2"),
        (ALL_CAPABILITIES, 2, "tensor=2"),
    ],
)
def test_the_mesh_of_so_many_workers(choice: MeshChoice, workers: int, mesh: str) -> None:
    assert str(choice.for_workers(workers)) == mesh


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.sampled_from([3, UNBOUNDED]), st.integers(3, 4), st.integers(3, 5)),
    st.integers(1, 20),
)
def test_a_mesh_always_fits_and_leaves_out_nobody_without_need(
    wanted: tuple[int, int, int, int], most: tuple[int, int, int], workers: int
) -> None:
    choice = MeshChoice(Mesh(*wanted), *most)
    mesh = choice.for_workers(workers)
    choice.refuse(mesh)
    assert mesh.workers <= workers
    if workers == choice.wanted.workers:
        assert mesh == choice.wanted
    if workers >= choice.wanted.replica:
        assert mesh.replica >= choice.wanted.replica


def test_what_the_mechanism_does_not_divide_along_is_refused() -> None:
    with pytest.raises(UserError, match="divide along the axes of its mesh: not along tensor"):
        SHARDS.refuse(Mesh(tensor=2))
    with pytest.raises(UserError, match="at most 4 workers along tensor"):
        LAYERS.refuse(Mesh(tensor=5))
    few = MeshChoice.of(ExecutionSettings(mesh=Mesh(tensor=2), num_slots=2))
    few.refuse(Mesh(data=2))
    with pytest.raises(UserError, match="cuts a batch into 2 slots"):
        few.refuse(Mesh(data=3))
    assert Mesh(data=3) not in few.meshes(1, 4)


@pytest.mark.parametrize(("choice", "workers"), [(SHARDS, 9), (LAYERS, 9), (ALL_CAPABILITIES, 17), (MeshChoice(), 5)])
def test_no_mesh_has_more_parts_than_are_told(choice: MeshChoice, workers: int) -> None:
    for n in range(1, workers + 1):
        assert choice.most_parts(n) == max(choice.for_workers(m).batch for m in range(1, n + 1))


def test_a_mechanism_that_cannot_reshape_keeps_its_mesh() -> None:
    fixed = meshes_of(ExecutionSettings(workers=2, mechanism="fsdp2", mode="fast"))
    fixed.refuse(Mesh(shard=2))
    with pytest.raises(UserError, match=r"keeps the mesh that it began with, shard=2 \(got data=2\)"):
        fixed.refuse(Mesh(data=2))


def test_who_carries_a_part_of_the_model_goes_on_with_it() -> None:
    mesh = Mesh(data=2, tensor=2)  # workers 10 to 13; 11, of part 1, has gone
    ranks = {10: 0, 12: 2, 13: 3}
    assert assign_ranks((10, 12, 13), (14,), mesh, ranks, mesh) == (10, 13, 12, 14)
    # The first of all is no joiner: part 0 has lost both that carried it.
    assert assign_ranks((11, 13), (14, 15), mesh, {11: 1, 13: 3}, mesh) == (13, 11, 14, 15)
    assert assign_ranks((11,), (14, 15, 16), mesh, {11: 1}, mesh) == (11, 14, 15, 16)
    assert assign_ranks((0, 1), (2,), Mesh(data=2), {0: 0, 1: 1}, Mesh(data=3)) == (0, 1, 2)


def test_ranks_go_host_by_host_whoever_joins_or_goes() -> None:
    ranks, mesh = {1: 0, 2: 1, 3: 2}, Mesh(data=5)  # worker 0, of host a, has gone
    hosts = {1: "a", 2: "b", 3: "b", 4: "a", 5: "c"}
    assert assign_ranks((1, 2, 3), (5, 4), Mesh(data=3), ranks, mesh, hosts) == (1, 4, 2, 3, 5)
    assert by_host((2, 1, 3), {}) == (2, 1, 3)
    # Joiners come on the first member's host too, and none of them is the first.
    assert assign_ranks((2, 1), (4,), Mesh(data=2), ranks, Mesh(data=3), hosts) == (2, 1, 4)


def test_those_who_carry_a_replica_together_are_on_one_host_where_that_can_be() -> None:
    mesh = Mesh(data=2, tensor=2)
    hosts = {10: "a", 11: "a", 12: "b", 13: "b", 14: "a", 15: "b"}
    ranks = {11: 1, 12: 2, 13: 3}  # worker 10 of part 0 has gone
    assert assign_ranks((11, 12, 13), (14,), mesh, ranks, mesh, hosts) == (12, 13, 14, 11)
    ranks = {10: 0, 13: 3}
    assert assign_ranks((10, 13), (15, 14), mesh, ranks, mesh, hosts) == (10, 14, 15, 13)


def test_of_several_that_carry_the_same_one_may_go() -> None:
    mesh = Mesh(data=2, tensor=2)
    assert fitting_workers((10, 12, 13), mesh, {10: 0, 12: 2, 13: 3}, 2) == (10, 13)
    assert fitting_workers((10, 11, 13), mesh, {10: 0, 11: 1, 13: 3}, 2) == (10, 11)
    assert fitting_workers((5, 6, 7), None, {}, 2) == (5, 6)
