"""How programs of these tests wait for what was asked for: slower and slower, and no longer than it takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastune.core.mesh import Mesh
from elastune.testing.faults import LONGEST_S, Rests, parse_wishes, rest_s


@pytest.mark.parametrize(("steps", "last"), [(20, 10), (100, 16)])
def test_rests_grow_in_the_last_steps(steps: int, last: int) -> None:
    rests = [rest_s(step, 0, steps, 0.1) for step in range(steps)]
    first = steps - last + 1
    assert rests[:first] == [0.1] * first
    assert rests[first : first + 3] == pytest.approx([0.4, 1.6, LONGEST_S])
    assert set(rests[first + 2 :]) == {LONGEST_S}


def test_rests_have_bounds() -> None:
    assert rest_s(10**6, 0, 20, 0.1) == LONGEST_S
    assert rest_s(15, 0, 20, 3.0) == 3.0, "never shorter than asked for"


def paced(mesh: Mesh, step: int, wishes: list[str], **config: Any) -> float:
    """The rest after ``step`` of 20, of workers that stand as ``mesh``."""
    workers = SimpleNamespace(comms=SimpleNamespace(mesh=mesh))
    session = SimpleNamespace(config={"pause_s": 0.0, **config}, step=step, state=SimpleNamespace(workers=workers))
    return Rests(session, 20, parse_wishes(wishes))._seconds(step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mesh", "step", "rests"),
    [
        (Mesh(), 2, False),  # nothing was asked for yet
        (Mesh(), 5, True),
        (Mesh(data=3), 5, False),
        (Mesh(data=3), 12, True),  # the next wish
        (Mesh(shard=2), 12, False),
    ],
)
def test_a_program_rests_while_a_wish_is_open(mesh: Mesh, step: int, rests: bool) -> None:
    assert (paced(mesh, step, ["3 3", "10 shard=2"]) > 0) is rests


def test_a_program_rests_until_a_file_is_there(tmp_path: Path) -> None:
    file = tmp_path / "go"
    assert paced(Mesh(), 3, [], until=str(file), pause_s=0.2) == 0.2
    file.touch()
    assert paced(Mesh(), 3, [], until=str(file), pause_s=0.2) == 0.0


def test_without_a_reason_to_wait_a_program_rests_as_it_is_told() -> None:
    assert [paced(Mesh(), step, [], pause_s=0.3) for step in (0, 19)] == [0.3, 0.3]
    assert paced(Mesh(), 5, []) == 0.0
