"""Whether a worker computes right: which slots are computed twice, by whom, and what differing digests mean. Pure.

In ``exact`` mode a slot's gradient has the same bits on any worker of one kind. So a second worker can compute it, too,
and a single differing bit is proof. ``VerifyPlan`` (``core.slots``) is the setting, ``checks_of`` the rota, ``judge``
the verdict.
``train/proof/verification.py`` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastune.core.slots import CHUNK_BITS, CHUNKS, ROLES, VerifyPlan

# --- the rota ---


@dataclass(frozen=True)
class Check:
    """A slot that several workers compute.

    Attributes:
        slot: The slot.
        ranks: The worker that has it, the second one, and the third one that decides if there is one.
    """

    slot: int
    ranks: tuple[int, ...]


def checks_of(
    plan: VerifyPlan, turn: int, slots_of: Callable[[int], Sequence[int]], kinds: Sequence[object]
) -> list[Check]:
    """Return the slots of a verified step, in turn over workers and their slots.

    Each worker's slots come in turn once in as many turns as there are workers. Only workers of one kind, whose
    processors round alike, judge each other.

    Args:
        plan: How many slots.
        turn: The number of the verified step, from 0.
        slots_of: The slots with samples of the worker of a rank.
        kinds: The kind of each worker's processor, by rank.

    Example:
        >>> checks_of(VerifyPlan(25), 1, lambda rank: [rank], ["x86", "x86", "x86"])
        [Check(slot=1, ranks=(1, 2, 0))]
    """
    size, checks = len(kinds), dict[int, Check]()
    for n in range(turn * plan.slots, (turn + 1) * plan.slots):
        owner, lap = n % size, n // size
        slots = slots_of(owner)
        others = [(owner + i) % size for i in range(1, size) if kinds[(owner + i) % size] == kinds[owner]]
        if not slots or not others:
            continue
        first = lap % len(others)
        slot = slots[lap % len(slots)]
        checks.setdefault(slot, Check(slot, (owner, *(others[first:] + others[:first])[: ROLES - 1])))
    return list(checks.values())


# --- digests in a sum ---


def encoded(digest: int) -> list[float]:
    """Return the numbers of a 64-bit ``digest`` in its places of a sum to which all other workers add zeros."""
    return [1.0, *(float(digest >> (CHUNK_BITS * i) & (1 << CHUNK_BITS) - 1) for i in range(CHUNKS))]


def decoded(numbers: Sequence[float]) -> int | None:
    """Return the digest in the sums of its places; None where no worker, or more than one, has put one there."""
    if numbers[0] != 1.0:
        return None
    return sum(int(number) << (CHUNK_BITS * i) for i, number in enumerate(numbers[1:]))


# --- the verdict ---

Outcome = Literal["wrong", "not deterministic", "undecided"]


@dataclass(frozen=True)
class SlotVerdict:
    """What differing digests of one slot mean.

    Attributes:
        outcome: "wrong": one worker computes wrong. "not deterministic": the program itself gives other bits each time.
            "undecided": each worker repeats its own bits, and no two workers of three agree.
        worker: The worker that is wrong; None: nobody is named.
        always: It was wrong each time, and not once.
    """

    outcome: Outcome
    worker: int | None = None
    always: bool = False

    @property
    def words(self) -> str:
        """The verdict as a clause."""
        match self.outcome:
            case "wrong":
                when = "each time" if self.always else "once, and then right"
                return f"worker {self.worker} computes wrong {when}"
            case "not deterministic":
                return "the same worker computes other bits each time, so the program is not deterministic"
        return "each worker computes its own bits again, and no two of three workers agree"


def judge(computed: Sequence[tuple[int, int]]) -> SlotVerdict:
    """Decide who is wrong, from all digests of one slot.

    A value that two workers have found is right. Where there are only two workers and they never agreed, one that
    repeats its own value is right and one that does not is wrong.

    Args:
        computed: Worker and digest of each computation, in order of time. Not all are equal.

    Example:
        >>> judge([(0, 7), (1, 5), (0, 7), (1, 5), (2, 5)]).words
        'worker 0 computes wrong each time'
    """
    values: dict[int, list[int]] = {}
    for worker, digest in computed:
        values.setdefault(worker, []).append(digest)
    finders: dict[int, set[int]] = {}
    for worker, digest in computed:
        finders.setdefault(digest, set()).add(worker)
    most = max(map(len, finders.values()))
    shared = [digest for digest, workers in finders.items() if len(workers) == most]
    if most >= 2 and len(shared) == 1:
        wrong = [worker for worker, own in values.items() if set(own) != {shared[0]}]
        if len(wrong) == 1:
            return SlotVerdict("wrong", wrong[0], always=shared[0] not in values[wrong[0]])
        return SlotVerdict("not deterministic")
    wavers = [worker for worker, own in values.items() if len(set(own)) > 1]
    if most < 2 and len(wavers) == 1 and len(values) == 2:
        return SlotVerdict("wrong", wavers[0], always=True)
    return SlotVerdict("not deterministic" if wavers else "undecided")


def odd_one_out(digests: Mapping[int, int]) -> int | None:
    """Return the one worker whose state differs from that of all others; None where no majority shows it.

    Example:
        >>> odd_one_out({0: 4, 1: 9, 2: 4})
        1
    """
    for worker, digest in digests.items():
        others = {other for each, other in digests.items() if each != worker}
        if len(digests) > 2 and len(others) == 1 and digest not in others:
            return worker
    return None
