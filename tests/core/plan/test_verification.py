"""Who computes a slot twice, how digests travel in sums, and what differing digests mean."""

from __future__ import annotations

import pytest

from elastune.core.errors import UserError
from elastune.core.plan.verification import (
    Check,
    SlotVerdict,
    checks_of,
    decoded,
    encoded,
    judge,
    odd_one_out,
)
from elastune.core.slots import VerifyPlan

RIGHT, WRONG, OTHER = 5, 7, 9


@pytest.mark.parametrize(
    ("computed", "verdict"),
    [
        ([(0, WRONG), (1, RIGHT), (0, WRONG), (1, RIGHT), (2, RIGHT)], SlotVerdict("wrong", 0, always=True)),
        ([(0, WRONG), (1, RIGHT), (0, OTHER), (1, RIGHT), (2, RIGHT)], SlotVerdict("wrong", 0, always=True)),
        ([(0, RIGHT), (1, WRONG), (0, RIGHT), (1, OTHER), (2, RIGHT)], SlotVerdict("wrong", 1, always=True)),
        ([(0, WRONG), (1, RIGHT), (0, RIGHT), (1, RIGHT), (2, RIGHT)], SlotVerdict("wrong", 0)),
        ([(0, RIGHT), (1, WRONG), (0, RIGHT), (1, RIGHT)], SlotVerdict("wrong", 1)),
        ([(0, WRONG), (1, RIGHT), (0, OTHER), (1, RIGHT)], SlotVerdict("wrong", 0, always=True)),
        ([(0, 1), (1, 2), (0, 1), (1, 2)], SlotVerdict("undecided")),
        ([(0, 1), (1, 2), (0, 1), (1, 2), (2, 3)], SlotVerdict("undecided")),
        ([(0, 1), (1, 2), (0, 3), (1, 4)], SlotVerdict("not deterministic")),
        ([(0, 1), (1, 2), (0, 3), (1, 4), (2, 5)], SlotVerdict("not deterministic")),
        ([(0, WRONG), (1, OTHER), (0, RIGHT), (1, RIGHT), (2, RIGHT)], SlotVerdict("not deterministic")),
    ],
)
def test_the_verdict_of_digests(computed: list[tuple[int, int]], verdict: SlotVerdict) -> None:
    assert judge(computed) == verdict


def test_each_verdict_has_words_of_its_own() -> None:
    wrong = SlotVerdict("wrong", 0), SlotVerdict("wrong", 0, always=True)
    verdicts = *wrong, SlotVerdict("undecided"), SlotVerdict("not deterministic")
    assert len({verdict.words for verdict in verdicts}) == 4


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("slots", [1, 2])
def test_each_worker_is_verified_within_as_many_turns_as_workers(workers: int, slots: int) -> None:
    for start in range(5):
        checks = [
            check
            for turn in range(start, start + workers)
            for check in checks_of(VerifyPlan(25, slots), turn, lambda rank: [2 * rank, 2 * rank + 1], ["x"] * workers)
        ]
        assert {check.ranks[0] for check in checks} == set(range(workers))
        assert all(check.slot // 2 == check.ranks[0] for check in checks)
        assert all(len(set(check.ranks)) == min(3, workers) for check in checks)


def test_all_slots_have_their_turn() -> None:
    checks = [checks_of(VerifyPlan(25), turn, lambda rank: [2 * rank, 2 * rank + 1], "ab") for turn in range(4)]
    assert not any(checks), "workers of two kinds have nobody who judges them"
    checks = [checks_of(VerifyPlan(25), turn, lambda rank: [2 * rank, 2 * rank + 1], "aa") for turn in range(4)]
    assert {check.slot for each in checks for check in each} == {0, 1, 2, 3}


def test_only_workers_of_one_kind_judge_each_other() -> None:
    assert checks_of(VerifyPlan(25), 0, lambda rank: [rank], ["a", "b", "a"]) == [Check(0, (0, 2))]


@pytest.mark.parametrize("digest", [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
def test_a_digest_survives_a_sum_in_single_precision(digest: int) -> None:
    torch = pytest.importorskip("torch")
    zeros = torch.zeros(5, dtype=torch.float32)
    assert decoded((zeros + torch.tensor(encoded(digest)) + zeros).tolist()) == digest
    assert decoded(zeros.tolist()) is None
    assert decoded([2.0, *encoded(digest)[1:]]) is None, "two workers in one place"


@pytest.mark.parametrize(
    ("digests", "worker"),
    [({0: 1, 1: 1, 2: 2}, 2), ({0: 1, 1: 2}, None), ({0: 1, 1: 2, 2: 3}, None), ({0: 1, 1: 1, 2: 2, 3: 2}, None)],
)
def test_a_majority_names_the_odd_one_out(digests: dict[int, int], worker: int | None) -> None:
    assert odd_one_out(digests) == worker


@pytest.mark.parametrize(("text", "plan"), [("every=25", VerifyPlan(25)), ("slots=2,every=3", VerifyPlan(3, 2))])
def test_a_plan_is_read_and_written(text: str, plan: VerifyPlan) -> None:
    assert VerifyPlan.parse(text) == plan == VerifyPlan.parse(str(plan))


@pytest.mark.parametrize(
    "text", ["", "25", "every=0", "every=25,slots=0", "every=1,every=2", "every=-1", "slots=2", "x"]
)
def test_rubbish_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="--verify"):
        VerifyPlan.parse(text)
