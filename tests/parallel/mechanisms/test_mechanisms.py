"""The kit, on the mechanism that there is and on a toy whose parameters lie half on each of two workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.parallel.mechanisms.base import Replicated
from elastune.parallel.mechanisms.owned.mechanism import Owned
from elastune.parallel.mechanisms.registry import mechanism_for
from elastune.runtime.job.validation import check_execution
from elastune.testing.kits.mechanism import MechanismKit

if str(Path(__file__).parent) not in sys.path:  # worker processes import the toy by its name
    sys.path.append(str(Path(__file__).parent))

from halves import Halves


class TestReplicated(MechanismKit):
    mechanism: ClassVar[Any] = Replicated()
    meshes = (Mesh(data=2), Mesh(data=3))


class TestZero(MechanismKit):
    mechanism: ClassVar[Any] = Owned("zero", ("shard",))
    meshes = (Mesh(shard=3), Mesh(data=2, shard=2))


class TestSharded(MechanismKit):
    mechanism: ClassVar[Any] = Owned("sharded", ("shard",), frees=True)
    meshes = (Mesh(shard=3), Mesh(data=2, shard=2))


class TestHalves(MechanismKit):
    mechanism: ClassVar[Any] = Halves()
    meshes = (Mesh(tensor=2), Mesh(data=2, tensor=2))


def test_what_a_mechanism_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="use data=4 alone"):
        Replicated().check(ExecutionSettings(), Mesh(data=2, tensor=2))
    with pytest.raises(UserError, match="use tensor=2"):
        Halves().check(ExecutionSettings(), Mesh(data=4))
    staged = Mesh(shard=2, tensor=2, pipeline=2)
    with pytest.raises(UserError, match=r"stages of a pipeline keep .* use --mechanism tensor\+pipeline\+zero"):
        mechanism_for(ExecutionSettings(mesh=staged, mechanism="pipeline+tensor+sharded"))
    assert mechanism_for(ExecutionSettings(mesh=staged)).name == "tensor+pipeline+zero"


def test_mechanisms_by_name() -> None:
    assert isinstance(mechanism_for(ExecutionSettings()), Replicated)
    with pytest.raises(UserError, match="use one of replicated"):  # before a worker starts
        check_execution(RunSpec(Program(Path("mine.py")), Path("out"), execution=ExecutionSettings(mechanism="gossip")))
