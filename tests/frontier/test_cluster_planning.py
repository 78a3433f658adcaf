"""What of a request becomes the model of a search: what is told, what was fitted, and what a sampler's kind says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from elastune.core.mesh import Mesh
from elastune.core.run import Program
from elastune.frontier.cluster_planning import PlanRequest, search_of
from elastune.frontier.machine_probes import NodeLink
from elastune.frontier.plan_record import search_command_of
from elastune.plan.cluster_plan import ClusterPlan, PlanBounds
from elastune.plan.divisions import Nodes
from elastune.plan.search_time import BLIND, CROWDING, SearchModel
from elastune.train.rehearsal import ProgramSize

SIZE = ProgramSize(100, 16, 3, 1e6, 100.0, 100.0, 0.0, 1000, 1000, 2000, 3, 1.0, fake=True)


def searched(**more: Any) -> SearchModel:
    request = PlanRequest(Program(Path("p.py")), Nodes(4, 1), PlanBounds(), 20, NodeLink(1e-9), 0.0, {}, **more)
    return search_of(request, SIZE, 0.0, beside_s=2.5)


def test_a_sampler_that_learns_nothing_loses_nothing() -> None:
    for name in ("random", "grid"):
        told = searched(sampler=name)
        assert (told.crowding, told.crowding_within, told.generation, told.blind) == (0.0, None, 0, math.inf)
    assert told.beside_s == 2.5


def test_a_genetic_search_that_waits_has_its_generations() -> None:
    told = searched(sampler="genetic:demes=2,population=4,steady=0")
    assert (told.generation, told.crowding, told.crowding_within) == (8, 0.0, None)


@pytest.mark.parametrize("name", ["auto", "tpe", "genetic"])
def test_what_learns_all_the_time_is_taken_for_tpe(name: str) -> None:
    told = searched(sampler=name)
    assert (told.crowding, told.crowding_within) == CROWDING[False]
    assert (told.generation, told.blind) == (0, BLIND)


def test_the_search_s_command_names_the_sampler_that_was_asked_for() -> None:
    plan = ClusterPlan(2, Mesh(), False, 16, 16, 1.0, (0.5, 2.0), 10.0, (5.0, 20.0), 1.0, 100.0, 1.0, ("compute", 1.0))
    told = (plan, Program(Path("p.py")), {}, 0, 16)
    assert "--sampler" not in search_command_of(*told, searched())
    assert "--trials 20 --sampler random" in search_command_of(*told, searched(sampler="random"), "random")
