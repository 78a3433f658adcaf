"""Loops that act by a count of slots: each is found with its line, and loops of good programs are left alone."""

from __future__ import annotations

import ast
import textwrap

import pytest

from elastune.train.program.loops import findings

HEAD = "def train(session):\n    for epoch in session.epochs(3):\n"


def found(loop: str, after: str = "") -> list[tuple[str, str]]:
    """Text and fix of each finding, in order of lines."""
    source = HEAD + textwrap.indent(textwrap.dedent(loop).strip(), " " * 8) + "\n"
    source += textwrap.indent(textwrap.dedent(after).strip(), " " * 8) + "\n"
    line = next(i for i, text in enumerate(source.splitlines(), 1) if "session.batches" in text)
    return [(each.text, each.fix) for each in sorted(findings(ast.parse(source), line), key=lambda each: each.line)]


EACH = "for x in session.batches(d):\n    "
COUNTED = "for i, x in enumerate(session.batches(d)):\n    session.backward(f(x))\n    "


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (COUNTED + "if (i + 1) % 4 == 0:\n        optimizer.step()", "(i + 1) % 4 == 0"),
        (COUNTED + "if not (i + 1) % 4:\n        optimizer.step()", "not (i + 1) % 4"),
        (COUNTED + "if i == 3 and session.ends_step:\n        break", "i == 3 and session.ends_step"),
        (COUNTED + "last = i == 9\n    if last:\n        scheduler.step()", "last"),
        (COUNTED + "scheduler.step(epoch + i / 100)", "scheduler.step(epoch + i / 100)"),
        (COUNTED + "if i % 10 == 0:\n        session.save()", "i % 10 == 0"),
        (COUNTED + "if i < 5:\n        continue\n    optimizer.step()", "i < 5"),
        ("for i, x in tqdm(enumerate(session.batches(d), 1)):\n    if i % 2 == 0:\n        opt.step()", "i % 2 == 0"),
        (EACH + "break", "break"),
        (EACH + "if f(x) < 1:\n        break", "break"),
        (EACH + "with g:\n        if f(x):\n            return", "return"),
        ("for x in islice(session.batches(d), 5):\n    pass", "islice(session.batches(d), 5)"),
        ("for i, x in zip(range(5), session.batches(d)):\n    pass", "zip(range(5), session.batches(d))"),
        (EACH + "step += 1\n    if step == 9:\n        optimizer.step()", "step == 9"),
        (
            EACH + "step = step + 1\n    session.report(steps=step)",
            "session.report(steps=step)",
        ),
        ("loader = session.batches(d)\nfor x in loader:\n    break", "break"),
        ("for x in session.batches(\n    d,\n    8,\n):\n    break", "break"),
    ],
)
def test_found(loop: str, text: str) -> None:
    assert text in [each for each, _ in found(loop)]


def test_a_count_that_ends_the_epochs() -> None:
    assert found(EACH + "seen += 1", "if seen >= 40:\n    break") == [
        ("seen >= 40", found(EACH + "seen += 1", "if seen >= 40:\n    break")[0][1])
    ]


def test_the_fix_of_hand_made_accumulation_is_the_whole_batch() -> None:
    (_, fix), *_ = found(COUNTED + "if (i + 1) % 4 == 0:\n        optimizer.step()\n        optimizer.zero_grad()")
    assert "--micro-batch" in fix


@pytest.mark.parametrize(
    "loop",
    [
        COUNTED + "optimizer.step()",
        COUNTED + "if i % 100 == 0:\n        print(i, loss)",
        COUNTED + "bar.set_postfix(step=i)",
        COUNTED + "if i == 0:\n        first = x",
        EACH + "n -= session.ends_step\n    if not n:\n        return",
        EACH + "if not session.ends_step or session.step != 4:\n        continue\n    break",
        "source = (x for x in session.batches(d))\nfor x in source:\n    break",
        EACH + "if session.ends_step and session.step == 9:\n        break",
        EACH + "if not session.ends_step:\n        continue\n    n += 1\n    if n == 9:\n        break",
        EACH + "if session.ends_step:\n        n += 1\n        if n % 4 == 0:\n            s.step()",
        EACH + "for y in x:\n        if y:\n            break",
        EACH + "while f(x):\n        break",
        EACH + "def loss():\n        return f(x)\n    opt.step(loss)",
        EACH + "total += f(x).item()\n    count += 1\n    mean = total / count",
        EACH + "if session.batch_index % 4 == 3:\n        scheduler.step()",
        "for i in range(9):\n    if i % 4 == 0:\n        optimizer.step()\nfor x in session.batches(d):\n    pass",
    ],
)
def test_left_alone(loop: str) -> None:
    assert found(loop) == []


def test_a_mean_of_the_programs_own_may_be_reported() -> None:
    loop = EACH + "total += 1.0\n    n += 1"
    assert found(loop, "if n > 0:\n    session.report(loss=total / n)") == []


def test_another_loop_of_the_function_is_not_judged() -> None:
    """Of several calls the loop over the one that is asked for."""
    source = "def train(s):\n    for x in s.batches(a):\n        pass\n    for x in s.batches(b):\n        break\n"
    assert [each.text for each in findings(ast.parse(source), 2)] == []
    assert [each.text for each in findings(ast.parse(source), 4)] == ["break"]


@pytest.mark.parametrize(
    ("loop", "after"),
    [
        (COUNTED + "if i % 50 == 0:\n        print(i)", "for i, x in enumerate(test):\n    if i == 3:\n        break"),
        (COUNTED + "pass", "for i in range(9):\n    if i % 2:\n        continue\n    plot(i)"),
        (COUNTED + "pass", "def score():\n    for i in test:\n        if i == 3:\n            return 1"),
        (EACH + "ends = session.ends_step\n    if not ends:\n        continue\n    if f(x):\n        break", ""),
        (EACH + "n += session.ends_step\n    if not n % 9:\n        break", ""),
        ("for x in session.batches(list(islice(stream, 100)), 8):\n    pass", ""),
        ("for x, i in zip(session.batches(d), count()):\n    if i % 50 == 0:\n        print(i)", ""),
    ],
)
def test_names_and_functions_of_other_loops_are_left_alone(loop: str, after: str) -> None:
    assert found(loop, after) == []


def test_a_count_beside_the_batches_counts_slots() -> None:
    loop = "for x, i in zip(session.batches(d), count()):\n    if i % 4 == 3:\n        optimizer.step()"
    assert [text for text, _ in found(loop)] == ["i % 4 == 3"]
