"""Replicas that lose their group: the survivors' weights are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.soaked import soaked


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    for folder in (here, here.parent / "comm"):
        monkeypatch.syspath_prepend(str(folder))


def check(mode: str, digest: str, state: list[Any]) -> None:
    """Bit for bit in exact mode, up to rounding in fast mode."""
    import regrouping_workers

    wanted = regrouping_workers.alone(mode)
    if mode == "exact":
        assert digest == regrouping_workers.digest(wanted)
    for result, tensor in zip(state, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(result, dtype=tensor.dtype), tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "stage"),
    [
        *(("exact", "between shares"), ("fast", "launch"), ("exact", "all_gather")),
        *soaked(("fast", "between shares"), ("exact", "launch"), ("exact", "all_to_all")),
    ],
)
def test_survivors_of_a_death_do_the_step_again(mode: str, stage: str) -> None:
    import regrouping_workers

    from elastune.testing.worker_processes import processes

    with processes(3, regrouping_workers.disturbed, mode, stage) as them:
        for rank in (0, 1):
            said, redone, digest, state = them.receive(rank)
            assert said == "ended"
            assert redone >= 1
            check(mode, digest, state)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_result_that_another_holds_is_as_good_as_ones_own(mode: str) -> None:
    import regrouping_workers

    from elastune.testing.worker_processes import processes

    with processes(3, regrouping_workers.one_breaks, mode) as them:
        ends = [them.receive(rank) for rank in range(3)]
    assert {end[1] for end in ends} == {ends[0][1]}
    for _, _, state in ends:
        check("fast", "", state) if mode == "fast" else check("exact", exact_digest(state), state)
    assert ends[0][2] == ends[1][2] == ends[2][2]


def exact_digest(state: list[Any]) -> str:
    import regrouping_workers

    like = regrouping_workers.alone("exact")
    return regrouping_workers.digest([torch.tensor(s, dtype=t.dtype) for s, t in zip(state, like, strict=True)])


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_group_that_breaks_inside_of_a_backward_pass_leaves_the_replica_sound(mode: str) -> None:
    import regrouping_workers

    from elastune.testing.worker_processes import processes

    with processes(2, regrouping_workers.bad_hook, mode) as them:
        for rank in range(2):
            _, _, digest, state = them.receive(rank)
            check(mode, digest, state)
