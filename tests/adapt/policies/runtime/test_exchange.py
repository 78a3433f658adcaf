"""Named collectives: any order on any worker gives equal results on all, and nothing waits for ever."""

from __future__ import annotations

import json
import math
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.adapt.policies.collectives import Name, Op, Result, Submission, Value, pack, resolve, unpack

numbers = st.floats(allow_nan=True, allow_infinity=True, width=64)
values = st.one_of(numbers, st.lists(numbers, max_size=4).map(tuple))
ops = st.sampled_from(["avg", "sum", "min", "max", "broadcast", "allgather"])
submissions = st.builds(Submission, st.text(), st.text(), ops, values, st.integers(0, 9))


def bits(value: object) -> object:
    """NaN equals itself here, and -0.0 is not 0.0."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(bits, value)]
    return value


def of(op: Op, value: Value, key: int | str = 1, **rest: int) -> Submission:
    return Submission("hook", str(key), op, value, **rest)


def one(*given: Submission) -> Result:
    """The result of one collective."""
    exchange = resolve([pack([submission]) for submission in given])
    assert exchange.failed == {}
    return exchange.done[given[0].name]


@given(st.lists(submissions, max_size=5, unique_by=lambda s: s.name))
def test_rows_bring_back_what_was_packed(given: list[Submission]) -> None:
    back = list(unpack(pack(given)).values())
    assert [(s.name, s.op, s.root) for s in back] == [(s.name, s.op, s.root) for s in given]
    assert [bits(s.value) for s in back] == [bits(s.value) for s in given]


@pytest.mark.parametrize(
    ("given", "result"),
    [
        ([of("avg", 1.0), of("avg", 2.0)], 1.5),
        ([of("sum", 0.1), of("sum", 0.2), of("sum", 0.3)], 0.1 + 0.2 + 0.3),
        ([of("sum", 1e308), of("sum", 1e308)], math.inf),
        ([of("min", 2.0), of("min", 1.0)], 1.0),
        ([of("max", (2.0, 1.0)), of("max", (0.0, 3.0))], [2.0, 3.0]),
        ([of("max", 1.0), of("max", math.nan)], math.nan),
        ([of("min", math.nan), of("min", 1.0)], math.nan),
        ([of("avg", ()), of("avg", ())], []),
        ([of("broadcast", 1.0, root=1), of("broadcast", (2.0, 3.0), root=1)], [2.0, 3.0]),
        ([of("allgather", 1.0), of("allgather", (2.0,)), of("allgather", ())], [1.0, [2.0], []]),
        ([of("avg", 3.0)], 3.0),
    ],
)
def test_results(given: list[Submission], result: Result) -> None:
    assert bits(one(*given)) == bits(result)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([of("avg", 1.0), of("sum", 1.0)], "rank 0 called it as avg, rank 1 as sum"),
        ([of("avg", 1.0), of("avg", 1.0), of("avg", (1.0,))], "rank 0 gave one number, rank 2 a list of 1"),
        ([of("min", (1.0, 2.0)), of("min", (1.0,))], "rank 0 gave a list of 2, rank 1 a list of 1"),
        ([of("broadcast", 1.0), of("broadcast", 1.0, root=1)], "rank 0 called it with root 0, rank 1 with root 1"),
    ],
)
def test_what_differs_fails_on_all_at_once(given: list[Submission], why: str) -> None:
    exchange = resolve([pack([submission]) for submission in given])
    assert exchange.failed == {("hook", "1"): why}
    assert exchange.done == {}


def test_what_is_missing_fails_with_the_ranks_when_nothing_else_moves() -> None:
    exchange = resolve([pack([of("avg", 1.0)]), b"", b""])
    assert exchange.done == {}
    assert exchange.failed == {
        ("hook", "1"): "not called on rank 1, 2, or only after another one: begin both, then take results"
    }


def test_a_hook_that_goes_on_elsewhere_is_waited_for() -> None:
    """One worker began five at once, the other takes them one by one."""
    early = [of("sum", float(key), key) for key in range(5)]
    for key in range(5):
        exchange = resolve([pack(early), pack([of("sum", 1.0, key)])])
        assert exchange.done == {("hook", str(key)): key + 1.0}
        assert exchange.failed == {}
        early = [submission for submission in early if submission.name not in exchange.done]
    assert early == []


def test_another_hook_that_goes_on_is_no_reason_to_wait() -> None:
    stuck, busy = of("avg", 1.0), Submission("other", "1", "avg", 1.0)
    exchange = resolve([pack([stuck, busy]), pack([busy])])
    assert exchange.done == {busy.name: 1.0}
    assert set(exchange.failed) == {stuck.name}


@given(
    workers=st.integers(1, 4),
    calls=st.lists(st.tuples(ops, st.integers(0, 3)), min_size=1, max_size=6),
    lacks=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_order_gives_the_same_on_every_worker(
    workers: int, calls: list[tuple[Op, int]], lacks: bool, seed: int
) -> None:
    """Each worker begins collectives in an order of its own, waits for one of them, begins more; one may lack one."""
    rng = random.Random(seed)
    usual = {key: (op, tuple(rng.uniform(-1, 1) for _ in range(length))) for key, (op, length) in enumerate(calls)}
    to_come = [rng.sample(sorted(usual), len(usual)) for _ in range(workers)]
    if lacks:
        to_come[-1].pop()
    waits: list[str | None] = [None] * workers
    pending: list[dict[Name, Submission]] = [{} for _ in range(workers)]
    results: dict[Name, object] = {}
    rounds = 0
    while any(to_come) or any(pending):
        rounds += 1
        assert rounds <= len(usual), "every exchange brings something"
        for worker in range(workers):
            if waits[worker] is None:
                for _ in range(rng.randint(1, len(usual))):
                    if to_come[worker]:
                        key = to_come[worker].pop(0)
                        op, value = usual[key]
                        pending[worker]["hook", str(key)] = of(op, value, key)
                waits[worker] = rng.choice([key for _, key in pending[worker]] or [None])
        rows = [pack(rng.sample(list(mine.values()), len(mine))) for mine in pending]
        exchange = resolve(rows)
        for name in (*exchange.done, *exchange.failed):
            results.setdefault(name, exchange.done.get(name, "failed"))
        for worker, mine in enumerate(pending):
            for name in mine.keys() & {*exchange.done, *exchange.failed}:
                del mine[name]
                if waits[worker] == name[1]:
                    waits[worker] = None
    at_once = resolve([pack(of(op, value, key) for key, (op, value) in usual.items())] * workers).done
    assert all(result == "failed" or bits(result) == bits(at_once[name]) for name, result in results.items())
    if workers == 1:
        assert "failed" not in results.values()


@given(st.lists(st.tuples(ops, values), min_size=1, max_size=6), st.integers(1, 4), st.randoms())
def test_what_all_have_begun_is_there_at_once(calls: list[tuple[Op, Value]], workers: int, rng: random.Random) -> None:
    given = [of(op, value, key) for key, (op, value) in enumerate(calls)]
    usual = resolve([pack(given)] * workers)
    mixed = resolve([pack(rng.sample(given, len(given))) for _ in range(workers)])
    assert set(usual.done) == {submission.name for submission in given}
    assert usual.failed == mixed.failed == {}
    assert [bits(mixed.done[name]) for name in usual.done] == [bits(value) for value in usual.done.values()]


GOOD = {"scope": "hook", "key": "1", "op": "avg", "value": 1.0, "root": 0}


@pytest.mark.parametrize(
    "row",
    [
        b"[",
        b"\xff",
        b"1",
        b"[1]",
        json.dumps([GOOD, GOOD]).encode(),
        *(
            json.dumps([{**GOOD, **wrong}]).encode()
            for wrong in (
                {"scope": 1},
                {"key": None},
                {"op": "mean"},
                {"value": "many"},
                {"value": [[1.0]]},
                {"value": None},
                {"root": -1},
                {"root": 0.5},
            )
        ),
    ],
)
def test_rubbish_is_refused(row: bytes) -> None:
    with pytest.raises(ValueError, match=r"collectives|validation error|JSON|decode|Expecting"):
        unpack(row)


def test_a_root_that_is_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="root 2 of 2"):
        resolve([pack([of("broadcast", 1.0, root=2)])] * 2)
