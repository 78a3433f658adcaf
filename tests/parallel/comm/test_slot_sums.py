"""A worker's slots in canonical order: what nobody else uses is added to in place, all else is copied."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from elastune.parallel.comm.exact import SlotSums

SIZES = (3, 4, 2)


def views(flat: torch.Tensor) -> Mapping[int, torch.Tensor]:
    return dict(enumerate(flat[: sum(SIZES)].split(SIZES)))


def slot_sums(run: range, num_slots: int) -> SlotSums:
    sums = SlotSums(lambda: torch.full((sum(SIZES) + 1,), 7.0), views)
    sums.begin(run, num_slots, range(len(SIZES)))
    return sums


def slots(count: int) -> list[list[torch.Tensor | None]]:
    torch.manual_seed(0)
    values: list[list[torch.Tensor | None]] = [[torch.randn(size) for size in SIZES] for _ in range(count)]
    values[1][2] = None  # no pass has used it
    return values


def fill(sums: SlotSums, values: list[list[torch.Tensor | None]], owned: tuple[int, ...]) -> None:
    for slot, members in enumerate(values):
        if slot != 2:  # which has no samples
            for member, value in reversed(list(enumerate(members))):
                complete = sums.put(member, None if value is None else value.clone(), owned=member in owned)
            assert complete
            sums.end_slot(slot)


@pytest.mark.parametrize("owned", [(), (0,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize(("run", "count"), [(range(5), 5), (range(4), 4), (range(3), 8)])
def test_sums_are_those_of_copies(owned: tuple[int, ...], run: range, count: int) -> None:
    copied, sums = slot_sums(run, count), slot_sums(run, count)
    fill(copied, slots(len(run)), ())
    fill(sums, slots(len(run)), owned)
    for ours, theirs in zip(sums.parts(), copied.parts(), strict=True):
        assert torch.equal(ours[: sum(SIZES)], theirs[: sum(SIZES)])
    if len(run) == count:
        a, b, d = (slots(len(run))[i][0] for i in (0, 1, 3))
        assert count == 5 or torch.equal(sums.total()[0], (a + b) + (torch.zeros(3) + d))  # type: ignore[operator]


def test_an_owned_value_is_not_copied_and_another_is() -> None:
    sums, mine, kept = slot_sums(range(2), 2), torch.ones(3), torch.ones(4)
    for slot in range(2):
        sums.put(0, mine if slot == 0 else torch.ones(3), owned=True)
        sums.put(1, kept)
        sums.put(2, None)
        sums.end_slot(slot)
    total = sums.total()
    assert total[0] is mine
    assert mine.tolist() == [2.0] * 3
    assert kept.tolist() == [1.0] * 4, "others use it"
    assert total[1].tolist() == [2.0] * 4
    assert total[2].tolist() == [0.0] * 2


def test_values_that_are_measured_lie_in_one_vector() -> None:
    sums = slot_sums(range(1), 1)
    sums.put(0, torch.full((3,), 5.0), owned=True)
    sums.put(1, torch.full((4,), 1.0))
    assert sums.slot_values[:7].tolist() == [5.0] * 3 + [1.0] * 4, "the rest comes later"
    sums.put(2, torch.full((2,), 2.0), owned=True)
    sums.end_slot(0)
    assert sums.parts()[0][: sum(SIZES)].tolist() == [5.0] * 3 + [1.0] * 4 + [2.0] * 2


def test_memory_is_used_again_in_the_next_step() -> None:
    made: list[torch.Tensor] = []

    def room() -> torch.Tensor:
        made.append(torch.zeros(sum(SIZES)))
        return made[-1]

    sums = SlotSums(room, views)
    for _ in range(3):
        sums.begin(range(4), 4, range(len(SIZES)))
        fill(sums, slots(4), ())
        sums.parts()
    assert len(made) == 3, "as many as the tree is deep, and the slot that fills"
