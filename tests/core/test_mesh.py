"""Workers as a grid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.core.mesh import AXES, Mesh

sizes = st.integers(1, 4)
meshes = st.builds(Mesh, sizes, sizes, sizes, sizes)


@given(meshes)
def test_every_worker_has_a_place_of_its_own(mesh: Mesh) -> None:
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.workers)]
    assert len(set(places)) == mesh.workers == mesh.data * mesh.replica
    for rank in range(mesh.workers):
        assert all(0 <= at < mesh.size(axis) for axis, at in mesh.coordinates(rank).items())


@given(meshes)
def test_a_group_differs_in_its_axis_alone(mesh: Mesh) -> None:
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.workers))
        for group in groups:
            places = [mesh.coordinates(rank) for rank in group]
            assert [place[axis] for place in places] == list(range(mesh.size(axis)))
            for other in AXES:
                assert other == axis or len({place[other] for place in places}) == 1
            assert all(mesh.group(axis, rank) == group for rank in group)


@given(meshes)
def test_samples_are_cut_over_replicas_and_shards(mesh: Mesh) -> None:
    """In rank order, so that a replica's parts of the samples are consecutive."""
    parts = [mesh.batch_rank(rank) for rank in range(mesh.workers)]
    assert parts == sorted(parts)
    assert set(parts) == set(range(mesh.batch))
    for rank, part in enumerate(parts):
        place = mesh.coordinates(rank)
        assert part == place["data"] * mesh.shard + place["shard"]


@given(meshes, st.integers(0, 100))
def test_a_mesh_is_fitted_by_whole_replicas(mesh: Mesh, workers: int) -> None:
    fitted = mesh.fitted(workers)
    if fitted is None:
        assert workers < mesh.replica
        return
    assert fitted.workers <= workers < fitted.workers + mesh.replica
    assert (fitted.shard, fitted.tensor, fitted.pipeline) == (mesh.shard, mesh.tensor, mesh.pipeline)
    assert mesh.fitted(mesh.workers) == mesh


def test_neighbours_share_a_replica() -> None:
    assert Mesh(data=2, tensor=2).groups("tensor") == ((0, 1), (2, 3))
    assert Mesh(data=2, tensor=2).groups("data") == ((0, 2), (1, 3))


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0])
def test_an_axis_without_workers_is_refused(wrong: int) -> None:
    with pytest.raises(UserError, match="use tensor=1"):
        Mesh(tensor=wrong)


@given(meshes)
def test_a_mesh_reads_what_it_writes(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "axes of a mesh are"),
        ("wide=2", "axes of a mesh are"),
        ("data=2,", "axes of a mesh are"),
        ("Data=2", "axes of a mesh are"),
        ("data=2,data=2", "leave out the second data"),
        ("data", "from 1 to 65,536"),
        ("data=", "from 1 to 65,536"),
        ("data=-1", "from 1 to 65,536"),
        ("data=1.5", "from 1 to 65,536"),
        ("data=٣", "from 1 to 65,536"),
        ("data=" + "9" * 5000, "from 1 to 65,536"),
        ("data=2=3", "from 1 to 65,536"),
        ("data=0", "at least one worker"),
        ("data=65537", "at most 65,536"),
        ("data=999,shard=999", "at most 65,536"),
    ],
)
def test_a_text_that_is_no_mesh_is_refused(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as error:
        Mesh.parse(text)
    assert len(str(error.value)) < 400


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        Mesh(data=2).coordinates(2)
