"""System parameters: what follows from what, their JSON, and what contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.core.mesh import FOREIGN, WORDS, MechanismName, Mesh
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.runtime.job.validation import check_execution

STATES = ["replicated", "zero", "sharded"]
names = st.one_of(
    st.builds(MechanismName, st.sampled_from(STATES), st.booleans(), st.booleans()),
    st.sampled_from(sorted(FOREIGN)).map(lambda word: MechanismName(foreign=word)),
)
sizes = st.integers(1, 4)


@given(names, st.randoms())
def test_a_name_reads_what_it_writes_in_any_order(name: MechanismName, random: Any) -> None:
    assert MechanismName.parse(str(name)) == name
    words = list(name.words)
    random.shuffle(words)
    assert MechanismName.parse(" + ".join(words)) == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "must be known"),
        ("ddp", "must be known"),
        ("zero+", "must be known"),
        ("Zero", "must be known"),
        ("x" * 5000, "must be known"),
        ("tensor+tensor", "leave out the second tensor"),
        ("zero+sharded", "all but one of zero, sharded"),
        ("replicated+zero", "all but one of replicated, zero"),
        ("tensor+fsdp2", "use fsdp2 alone"),
    ],
)
def test_a_text_that_is_no_mechanism_is_refused(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as error:
        MechanismName.parse(text)
    assert len(str(error.value)) < 400


@given(st.builds(Mesh, sizes, sizes, sizes, sizes))
def test_the_least_mechanism_divides_along_the_axes_of_its_mesh(mesh: Mesh) -> None:
    execution = ExecutionSettings(mesh=mesh)
    assert execution.workers == mesh.workers
    assert execution.first_mesh == mesh
    assert set(execution.parts.dividing) == {axis for axis in ("shard", "tensor", "pipeline") if mesh.size(axis) > 1}  # type: ignore[arg-type]


def test_workers_go_along_the_axis_of_their_mechanism() -> None:
    results = {word: str(ExecutionSettings(workers=3, mechanism=word).first_mesh) for word in WORDS}
    assert results == {
        "replicated": "data=3",
        "zero": "shard=3",
        "sharded": "shard=3",
        "tensor": "tensor=3",
        "pipeline": "pipeline=3",
        "fsdp2": "shard=3",
        "deepspeed": "shard=3",
        "fairscale": "shard=3",
        "horovod": "data=3",
    }
    assert ExecutionSettings(mechanism="tensor+zero").first_mesh == Mesh()
    with pytest.raises(UserError, match="shard=2,tensor=2"):
        _ = ExecutionSettings(workers=2, mechanism="tensor+zero").first_mesh


def test_blocks_are_of_what_tensor_divides_and_enough_for_its_workers() -> None:
    assert ExecutionSettings(workers=8).virtual_tensor == 1
    assert [ExecutionSettings(workers=n, mechanism="tensor").virtual_tensor for n in (1, 4, 6)] == [4, 4, 6]
    assert ExecutionSettings(mesh=Mesh(data=8, tensor=2)).virtual_tensor == 4
    assert ExecutionSettings(virtual_tensor=2).mechanism == "tensor"
    assert ExecutionSettings(workers=8, mesh=Mesh(data=8), virtual_tensor=2).first_mesh == Mesh(data=8)


@given(
    names,
    st.none() | st.builds(Mesh, sizes, sizes, sizes, sizes),
    st.none() | st.integers(1, 9),
    st.none() | st.integers(1, 9),
    st.sampled_from(["1f1b", "gpipe"]),
    st.booleans(),
)
def test_means_survive_json(name: Any, mesh: Any, copies: Any, blocks: Any, schedule: Any, offload: bool) -> None:
    mechanism = str(name)
    execution = ExecutionSettings(
        mechanism=mechanism, mesh=mesh, copies=copies, virtual_tensor=blocks, schedule=schedule, offload=offload
    )
    assert ExecutionSettings.from_json(json.loads(json.dumps(execution.to_json()))) == execution


def test_what_says_nothing_is_not_journaled_and_need_not_be() -> None:
    result = ExecutionSettings(workers=2).to_json()
    assert list(result) == [
        "workers", "mode", "mechanism", "num_slots", "threads", "device", "precision", "micro_batch"
    ]  # fmt: skip
    assert ExecutionSettings.from_json({"workers": 2, "mechanism": "replicated"}) == ExecutionSettings(workers=2)
    assert ExecutionSettings(workers=2, compress="none") == ExecutionSettings(workers=2)
    assert ExecutionSettings(compress="powersgd").to_json()["compress"] == "powersgd:rank=4"
    assert ExecutionSettings(mesh=Mesh(data=2, tensor=2)).to_json()["mesh"] == "data=2,tensor=2"


def test_a_journal_that_tells_nonsense_is_refused() -> None:
    for result in (
        {"mesh": 5},
        {"mesh": "wide=2"},
        {"mechanism": "ddp"},
        {"mechanism": 3},
        {"copies": "2"},
        {"compress": 8},
    ):
        with pytest.raises(UserError):
            ExecutionSettings.from_json(result)
    with pytest.raises(TypeError):
        ExecutionSettings.from_json({"colour": "blue"})


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"workers": 3, "mesh": Mesh(data=4)}, {}, "workers and mesh must agree"),
    ({"mesh": Mesh(shard=2), "mechanism": "replicated"}, {}, "workers along shard need"),
    ({"mesh": Mesh(tensor=2), "mechanism": "zero"}, {}, "workers along tensor need"),
    ({"mesh": Mesh(pipeline=2), "mechanism": "tensor+zero"}, {}, "workers along pipeline need"),
    ({"mesh": Mesh(tensor=2), "mechanism": "fsdp2"}, {}, "fsdp2\\): leave tensor out"),
    ({"mesh": Mesh(shard=2, pipeline=2), "mechanism": "sharded"}, {}, "use --mechanism pipeline\\+zero"),
    ({"mesh": Mesh(shard=2, pipeline=2), "mechanism": "pipeline"}, {}, "use --mechanism pipeline\\+zero"),
    ({"mesh": Mesh(shard=2), "mechanism": "horovod"}, {}, "workers along shard need"),
    ({"mesh": Mesh(tensor=3), "virtual_tensor": 2}, {}, "at most as many workers as there are virtual blocks"),
    ({"virtual_tensor": 0}, {}, "virtual blocks must be"),
    ({"virtual_tensor": 2, "mechanism": "zero"}, {}, "use --mechanism tensor"),
    ({"workers": 2, "copies": 2}, {}, "every worker holds all of it"),
    ({"mesh": Mesh(shard=2), "copies": 3}, {}, "fewer --copies"),
    ({"mesh": Mesh(tensor=2), "copies": 3}, {}, "fewer --copies"),
    ({"mesh": Mesh(shard=2), "copies": 0}, {}, "fewer --copies"),
    ({"mesh": Mesh(shard=2), "copies": -1}, {}, "fewer --copies"),
    ({"schedule": "gpipe"}, {}, "a schedule is that of a pipeline"),
    ({"mechanism": "pipeline", "schedule": "waves"}, {}, "schedule must be known"),
    *(
        ({"mechanism": name, "mode": "fast", "offload": True}, {}, "use --mechanism zero or sharded, or leave")
        for name in ("replicated", "tensor", "pipeline", *FOREIGN)
    ),
    *(({"mechanism": name, "mode": "fast", "copies": 1}, {}, "leave --copies out: its engine") for name in FOREIGN),
    ({"mode": "fast", "mechanism": "zero", "compress": "int8"}, {}, "use --mechanism replicated"),
    ({"mechanism": "zero", "zero_stage": 2}, {}, "deepspeed and fairscale"),
    ({"mechanism": "deepspeed", "zero_stage": 4}, {}, "1, 2 or 3"),
    ({"mesh": Mesh(data=2, shard=2), "num_slots": 3}, {}, "3 slots, 4 workers"),
    ({"mesh": Mesh(shard=4)}, {"low": 1, "high": 3}, "within its bounds"),
    ({"mesh": Mesh(shard=2)}, {"low": 3, "high": 8}, "within its bounds"),
    ({"mesh": Mesh(data=2, tensor=2), "num_slots": 3}, {"low": 1, "high": 8}, "3 slots, 4 workers"),
]


@pytest.mark.parametrize(("data", "elastic", "expected"), WRONG)
def test_what_contradicts_itself_is_refused(data: dict[str, Any], elastic: dict[str, Any], expected: str) -> None:
    spec = RunSpec(
        Program(Path("mine.py")), Path("out"), execution=ExecutionSettings(**data), elastic=Elastic(**elastic)
    )
    with pytest.raises(UserError, match=expected):
        check_execution(spec)
